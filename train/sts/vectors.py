"""Sentence vectors from files of word vectors, and the coverage of their words.

Word vectors are text, see `schemas.vector_files`. The vector of a sentence is the mean over its words. A word
is a run of letters and digits, looked up as written, then in lower case. Unknown words are skipped, and a
sentence without known words has a zero vector.

Letters: ``S`` sentences, ``E`` width of vectors.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.vector_files import read_vector_file

WORD = re.compile(r"\w+")
_EXPECTED = "--vectors takes word vectors as text"


@dataclass(frozen=True)
class Coverage:
    """Coverage of the words of the distinct sentences.

    Attributes:
        words: number of words, repeated ones included.
        known: number of known words.
        blind: number of sentences without a known word.
        unknown: count of each unknown word, the most frequent first.
    """

    words: int
    known: int
    blind: int
    unknown: Mapping[str, int] = field(default_factory=dict)


def coverage_of(sentences: Sequence[Sequence[str]], known: Collection[str]) -> Coverage:
    """Count the known and unknown words of sentences."""
    unknown = Counter(word for words in sentences for word in words if word not in known)
    total = sum(map(len, sentences))
    return Coverage(
        words=total,
        known=total - unknown.total(),
        blind=sum(not any(word in known for word in words) for words in sentences),
        unknown=dict(sorted(unknown.items(), key=lambda item: (-item[1], item[0]))),
    )


def mean_vectors(sentences: Sequence[Sequence[str]], vectors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the mean vectors of known words, float64 ``[S, E]``; zeros without any."""
    width = len(next(iter(vectors.values()), ()))
    means = np.zeros((len(sentences), width))
    for row, words in zip(means, sentences, strict=True):
        if known := [vectors[word] for word in words if word in vectors]:
            row[:] = np.mean(known, axis=0)
    return means


def read_word_vectors(location: str, words: Collection[str]) -> dict[str, np.ndarray]:
    """Read the vectors of words, looked up as written, then in lower case.

    Returns:
        Float64 ``[E]`` by word, for words with a vector.

    Raises:
        InputError: the file cannot be read, or holds no word vectors.
    """
    forms = {word: (word, word.lower()) for word in words}
    vectors = read_vector_file(location, {form for pair in forms.values() for form in pair}, expected=_EXPECTED).vectors
    # The form as written comes last and replaces the other.
    return {word: vectors[form] for word, pair in forms.items() for form in pair[::-1] if form in vectors}

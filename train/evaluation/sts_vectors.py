"""Vectors of sentences from a file: means of word vectors, or vectors that another model made of whole sentences.

Word vectors are text, see `schemas.vector_files`. The vector of a sentence is the mean of those of its words, each as often as it
occurs. A word is a run of letters and digits; it is looked up as it is written, then in lower case. Other words count for nothing,
and a sentence that has none but these has a vector of zeros.

Vectors of sentences are ``.npz`` with the arrays ``sentences``, the texts, and ``vectors``, a row for each:
``numpy.savez("vectors.npz", sentences=sentences, vectors=vectors)``.

Letters: ``S`` sentences, ``E`` width.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.errors import InputError
from schemas.vector_files import open_user_file, read_vector_file

_WORD = re.compile(r"\w+")
_EXPECTED = "--vectors takes word vectors as text, or vectors of sentences as .npz"


@dataclass(frozen=True)
class Coverage:
    """How much of some sentences is known.

    Attributes:
        words: words of the different sentences, each as often as it occurs.
        known: those that are known.
        blind: sentences of which no word is known.
        unknown: words that are not known and how often they occur, the most frequent first.
    """

    words: int
    known: int
    blind: int
    unknown: Mapping[str, int] = field(default_factory=dict)


def coverage_of(sentences: Sequence[Sequence[str]], known: Collection[str]) -> Coverage:
    """Count the words of sentences that are known."""
    unknown = Counter(word for words in sentences for word in words if word not in known)
    total = sum(map(len, sentences))
    return Coverage(
        words=total,
        known=total - unknown.total(),
        blind=sum(not any(word in known for word in words) for words in sentences),
        unknown=dict(sorted(unknown.items(), key=lambda item: (-item[1], item[0]))),
    )


def words_of(sentence: str) -> list[str]:
    """Return the runs of letters and digits in a sentence, as they are looked up among word vectors."""
    return _WORD.findall(sentence)


def mean_vectors(sentences: Sequence[Sequence[str]], vectors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the mean of the vectors of each sentence's words, float64 ``[S, E]``; zeros where there are none."""
    width = len(next(iter(vectors.values()), ()))
    means = np.zeros((len(sentences), width))
    for row, words in zip(means, sentences, strict=True):
        found = [vectors[word] for word in words if word in vectors]
        if found:
            row[:] = np.mean(found, axis=0)
    return means


def read_word_vectors(location: str, words: Collection[str]) -> dict[str, np.ndarray]:
    """Read the vectors of words from text, compressed if its name ends in ``.gz``; the rest of the file takes no memory.

    Args:
        location: the file.
        words: the words to look for, as they are written; each is also looked for in lower case.

    Returns:
        Float64 ``[E]`` by word, for those that are there.

    Raises:
        InputError: the file cannot be read, or holds no word vectors.
    """
    found = read_vector_file(location, {form for word in words for form in (word, word.lower())}, expected=_EXPECTED).vectors
    forms = {word: next((form for form in (word, word.lower()) if form in found), None) for word in words}
    return {word: found[form] for word, form in forms.items() if form is not None}


def read_sentence_vectors(location: str, sentences: Sequence[str]) -> np.ndarray:
    """Read vectors of sentences from ``.npz``, float64 ``[S, E]``, in the order of ``sentences``.

    Raises:
        InputError: the file cannot be read, lacks an array, or lacks one of the sentences.
    """
    with open_user_file(location, _EXPECTED) as (file, _):
        try:
            with np.load(io.BytesIO(file.read()), allow_pickle=False) as arrays:
                texts, vectors = arrays["sentences"], arrays["vectors"]
        except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(
                f"{location!r} does not hold vectors of sentences ({error}): expected the arrays 'sentences', of texts, and "
                "'vectors', as numpy.savez(FILE, sentences=..., vectors=...) writes them"
            ) from error
    if texts.ndim != 1 or texts.dtype.kind != "U" or vectors.ndim != 2 or len(texts) != len(vectors):
        raise InputError(
            f"{location!r}: expected 'sentences', one text each, and 'vectors', a row each, found arrays of {texts.dtype} "
            f"{texts.shape} and {vectors.dtype} {vectors.shape}"
        )
    if vectors.dtype.kind not in "fiu" or not np.isfinite(vectors).all():
        raise InputError(
            f"{location!r}: expected finite numbers in 'vectors', found {vectors.dtype} or some that are not finite"
        )
    rows = {text: number for number, text in enumerate(texts.tolist())}
    missing = [sentence for sentence in sentences if sentence not in rows]
    if missing:
        raise InputError(
            f"{location!r} lacks {len(missing):,} of {len(sentences):,} sentences, such as {missing[0]!r}: 'sentences' holds each "
            "as it stands in the data"
        )
    return vectors[[rows[sentence] for sentence in sentences]].astype(np.float64)

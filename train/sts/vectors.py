"""Vectors of sentences from files, and the coverage of their words.

Word vectors are text, see `schemas.vector_files`. The vector of a sentence is the mean over its words. A word is a run of letters
and digits, looked up as written, then in lower case. Unknown words are skipped, and a sentence without known words has a zero
vector. Vectors of sentences are ``.npz`` with a row of ``vectors`` for each text of ``sentences``, written by
``numpy.savez("vectors.npz", sentences=sentences, vectors=vectors)``.

Letters: ``S`` sentences, ``E`` width of vectors.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.errors import InputError
from schemas.footers import check_expansion
from schemas.vector_files import NPY_ERRORS, open_user_file, read_vector_file

WORD = re.compile(r"\w+")
_CHUNK = 16 << 20
_EXPECTED = "--vectors takes word vectors as text, or vectors of sentences as .npz"


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


def read_sentence_vectors(location: str, sentences: Sequence[str]) -> np.ndarray:
    """Read the vectors of sentences from ``.npz``, float64 ``[S, E]``.

    Raises:
        InputError: the file cannot be read, lacks an array, or lacks one of the sentences.
    """
    with open_user_file(location, _EXPECTED) as (file, digest):
        data = bytearray()
        while chunk := file.read(_CHUNK):
            data += chunk
            check_expansion(len(data), digest.bytes, repr(location))
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                check_expansion(sum(member.file_size for member in arrays.zip.infolist()), digest.bytes, repr(location))
                texts, vectors = (np.asarray(arrays[name]) for name in ("sentences", "vectors"))  # Bytes without npy's mark.
        except (*NPY_ERRORS, KeyError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error) as error:
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
    rows = {text: index for index, text in enumerate(texts.tolist())}
    missing = [sentence for sentence in sentences if sentence not in rows]
    if missing:
        raise InputError(
            f"{location!r} lacks {len(missing):,} of {len(sentences):,} sentences, such as {missing[0]!r}: add them to "
            "'sentences', spelled as in the data"
        )
    return vectors[[rows[sentence] for sentence in sentences]].astype(np.float64)

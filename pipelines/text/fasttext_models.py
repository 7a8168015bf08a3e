"""Models of fastText (``.bin``), read with gensim: vectors of words, and of the sub-words that other words are made of.

gensim holds a model in memory whole: several gigabytes for those that were trained on Common Crawl.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from schemas.errors import InputError, UsageError
from schemas.storage.locations import is_remote, local_path
from schemas.vector_files import VectorFile, open_user_file

MODEL_SUFFIX = ".bin"

_UNREADABLE = (ValueError, AssertionError, EOFError, NotImplementedError, LookupError, MemoryError, OSError, struct.error)


def read_model_file(location: str, wanted: Collection[str], composed: Collection[str], *, expected: str) -> VectorFile:
    """Read the vectors of words from a model of fastText.

    Args:
        location: the file, on this machine.
        wanted: the words, exactly as the model would have them.
        composed: the words that are made of their sub-words if the model has none of their forms in ``wanted``, in lower case or
            not. A word that has no sub-word there has no vector.
        expected: what may be given in its place, a sentence for messages.

    Raises:
        InputError: the file cannot be read, or holds no model.
        UsageError: gensim is not installed.
    """
    load = _loader()
    if is_remote(location):
        raise InputError(f"{location!r} lies in a store: a model of fastText is read from this machine, so copy it here first")
    with open_user_file(location, expected) as (_, digest):
        sha256 = digest.sha256()
    try:
        model = load(str(local_path(location)))
    except _UNREADABLE as error:
        raise InputError(
            f"{location!r} is not a model of fastText, or is cut off ({type(error).__name__}: {error}): fetch it again. {expected}"
        ) from error
    vectors = {word: model.get_vector(word) for word in wanted if word in model.key_to_index}
    for word in composed:
        if word not in vectors and word.lower() not in vectors:
            try:
                vectors[word] = model.get_vector(word)
            except KeyError:  # None of its sub-words is in the model.
                continue
    return VectorFile(
        vectors={word: np.asarray(vector, np.float64) for word, vector in vectors.items()},
        width=model.vector_size,
        words=len(model.key_to_index),
        bytes=digest.bytes,
        sha256=sha256,
    )


def _loader() -> Callable[[str], Any]:
    try:
        from gensim.models.fasttext import load_facebook_vectors
    except ImportError:
        raise UsageError(
            "reading a model of fastText needs gensim, which is not installed: pip install 'imagepivot[fasttext]' (on Python 3.11 "
            "to 3.13: gensim has no wheels for 3.14), or give vectors as text (.vec)"
        ) from None
    return load_facebook_vectors

"""Search for pairs of vectors with a high cosine, exact or by faiss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from pipelines.running.meter import Meter

MAX_EXACT = 100_000
"""Maximum number of vectors whose pairs are all compared."""

Links: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Pairs of items: positions of first and second, and similarities."""

_TILE = 256  # Rows that are compared simultaneously: 100 MB of cosines with 100,000 others.
_PROBES = 32
_TRAINING_VECTORS_PER_CELL = 64


def near_pairs(vectors: np.ndarray, min_cosine: float, meter: Meter = Meter()) -> Iterator[Links]:
    """Yield the pairs of unit vectors ``[N, D]`` with at least this cosine, in parts.

    Raises:
        ModuleNotFoundError: there are more than `MAX_EXACT` vectors, and faiss of the extra ``duplicates`` is not installed.
    """
    index = _inverted_file(vectors) if len(vectors) > MAX_EXACT else None
    for start in range(0, len(vectors), _TILE):
        rows = vectors[start : start + _TILE]
        if index is None:
            tile = rows @ vectors[start:].T
            first, second = np.nonzero(tile >= min_cosine)
            cosines, second = tile[first, second], second + start
        else:
            limits, cosines, second = index.range_search(rows, min_cosine)
            first = np.repeat(np.arange(len(rows)), np.diff(limits.astype(np.int64)))
        is_new = first + start < second
        yield first[is_new] + start, second[is_new], cosines[is_new]
        meter.add(images=len(rows))


def _inverted_file(vectors: np.ndarray) -> Any:
    """Index vectors by the nearest of √N centres; 32 cells are searched."""
    import faiss

    cells = math.isqrt(len(vectors))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(vectors.shape[1]), vectors.shape[1], cells, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:: max(1, len(vectors) // (_TRAINING_VECTORS_PER_CELL * cells))])
    index.add(vectors)
    index.nprobe = _PROBES
    return index

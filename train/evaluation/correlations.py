"""Pearson's and Spearman's correlation, and cosines.

Letters: ``N`` values, ``E`` width of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# Values that differ by less than float32 resolves say nothing, such as the cosines of a model that has collapsed.
_RESOLUTION = 1e-6


@dataclass(frozen=True)
class Correlation:
    """How two series go together, times 100 as papers print it; None where one of them is constant.

    Attributes:
        pearson: Pearson's r, -100 to 100.
        spearman: Spearman's rho, -100 to 100.
    """

    pearson: float | None
    spearman: float | None


def correlation(first: ArrayLike, second: ArrayLike) -> Correlation:
    """Return both correlations of two series ``[N]``, times 100.

    Raises:
        ValueError: they differ in length.
    """
    pair = pearson(first, second), spearman(first, second)
    return Correlation(*(None if value is None else 100 * value for value in pair))


def pearson(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return Pearson's r of two series ``[N]``, -1 to 1; None if one of them is constant.

    Raises:
        ValueError: they differ in length.
    """
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"series of the shapes {x.shape} and {y.shape}: expected two of one length")
    if _constant(x) or _constant(y):
        return None
    return float(np.clip(np.corrcoef(x, y)[0, 1], -1.0, 1.0))


def spearman(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return Spearman's rho of two series ``[N]``, -1 to 1: Pearson's r of their ranks; None if one of them is constant."""
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return None if _constant(x) or _constant(y) else pearson(ranks_with_ties(x), ranks_with_ties(y))


def ranks_with_ties(values: ArrayLike) -> np.ndarray:
    """Return the ranks of values ``[N]`` from 1, least first; equal values share the mean of their ranks."""
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def cosines(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Return the cosine of each row of ``[N, E]`` with the same row of another array, float64 ``[N]``.

    The cosine with a vector of zeros is 0.
    """
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = np.einsum("ne,ne->n", x, y)
    found = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return np.clip(found, -1.0, 1.0)


def _constant(values: np.ndarray) -> bool:
    return len(values) < 2 or bool(np.ptp(values) <= _RESOLUTION * np.abs(values).max())

"""Cosines of vectors, and their correlation with human scores.

Letters: ``N`` values, ``E`` width of vectors.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# Differences below the resolution of float32 are noise, e.g. between the cosines of a collapsed model.
_RESOLUTION = 1e-6


@dataclass(frozen=True)
class Correlation:
    """Pearson's r and Spearman's rho, times 100; None if a series is constant."""

    pearson: float | None
    spearman: float | None


def cosines(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Return row-wise cosines of ``[N, E]``, float64 ``[N]``; 0 for zero vectors."""
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = np.einsum("ne,ne->n", x, y)
    return np.clip(np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0), -1.0, 1.0)


def is_constant(values: np.ndarray) -> bool:
    """Return whether a series has fewer than two values, or equal ones up to noise."""
    return len(values) < 2 or bool(np.ptp(values) <= _RESOLUTION * np.abs(values).max())

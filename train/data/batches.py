"""Captions of a dataset that go through a model together.

Letters in shapes: ``N`` captions of the dataset, ``B`` captions of the batch, ``T`` tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["CaptionBatch"]


@dataclass(frozen=True)
class CaptionBatch:
    """Rows of captions; nothing is copied before a model reads them, in the form that suits it.

    Attributes:
        token_ids: non-negative integers, the token ids of all captions of the dataset, one after the other.
        offsets: int64 ``[N + 1]``; caption n has ``token_ids[offsets[n]:offsets[n + 1]]``.
        rows: integers ``[B]``, the captions of the batch, in any order, with or without repetition; B may be 0.

    Raises:
        ValueError: a caption has no tokens.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray

    def __post_init__(self) -> None:
        if len(self.rows) and self.lengths.min() < 1:
            raise ValueError(
                f"caption {self.rows[self.lengths.argmin()]} has no tokens: encoded captions hold at least <start> and <end>"
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each caption, int64 ``[B]``."""
        return self.offsets[self.rows + 1] - self.offsets[self.rows]

    def padded(self, padding: int) -> np.ndarray:
        """Return the token ids, int64 ``[B, T]``, with ``padding`` after the end of each caption."""
        lengths = self.lengths
        steps = np.arange(lengths.max(initial=0))
        inside = steps < lengths[:, None]
        grid = np.full(inside.shape, padding, dtype=np.int64)
        grid[inside] = self.token_ids[(self.offsets[self.rows][:, None] + steps)[inside]]
        return grid

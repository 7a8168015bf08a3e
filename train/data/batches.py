"""Batches of captions.

Shapes: ``N`` captions of the dataset, ``B`` captions of the batch, ``T`` tokens of the longest, ``P`` tokens
of all, ``M`` stored vectors, ``W`` width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.memmap import release


def token_positions(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions of the tokens of captions, int64 ``[P]``."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


@dataclass(frozen=True)
class TokenVectors:
    """Vectors of the tokens of captions, in their stored type.

    Attributes:
        stored: ``[M, W]`` in the type of the dataset; may be memory-mapped, read-only.
        starts: int64 ``[N]``, row of the first vector of each caption, followed by its others.
    """

    stored: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class CaptionBatch:
    """A batch of captions as rows of a dataset, without copies.

    Attributes:
        token_ids: concatenated token ids of all captions of the dataset.
        offsets: int64 ``[N + 1]``; caption n has ``token_ids[offsets[n]:offsets[n + 1]]``.
        rows: integers ``[B]``, the captions of the batch, in any order, also repeated or none.
        vectors: precomputed vectors of all tokens, or None.

    Raises:
        ValueError: a caption has no tokens.

    Examples:
        >>> ids, offsets = np.array([1, 7, 2, 1, 5, 6, 2]), np.array([0, 3, 7])
        >>> imagepivot.CaptionBatch(ids, offsets, rows=np.array([0, 1])).padded(0)
        array([[1, 7, 2, 0],
               [1, 5, 6, 2]])
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    vectors: TokenVectors | None = None

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
        """Return the token ids, int64 ``[B, T]``, padded with ``padding``."""
        lengths = self.lengths
        steps = np.arange(lengths.max(initial=0))
        inside = steps < lengths[:, None]
        grid = np.full(inside.shape, padding, dtype=np.int64)
        grid[inside] = self.token_ids[(self.offsets[self.rows][:, None] + steps)[inside]]
        return grid

    def token_vectors(self) -> np.ndarray:
        """Copy the token vectors of the batch, concatenated, float32 ``[P, W]``.

        Raises:
            ValueError: the captions have none.
        """
        if self.vectors is None:
            raise ValueError("the captions have no token vectors, which this model needs")
        rows = token_positions(self.vectors.starts[self.rows], self.lengths)
        values = self.vectors.stored[rows].astype(np.float32)
        release(self.vectors.stored)
        return values

    def compact(self) -> CaptionBatch:
        """Copy the batch without the other captions of the dataset."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        token_ids = self.token_ids[token_positions(self.offsets[self.rows], self.lengths)]
        vectors = None if self.vectors is None else TokenVectors(self.token_vectors(), offsets[:-1])
        return CaptionBatch(token_ids, offsets, np.arange(len(self)), vectors)

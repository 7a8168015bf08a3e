"""Captions of a dataset that go through a model together.

Letters in shapes: ``N`` captions of the dataset, ``B`` captions of the batch, ``T`` tokens of the longest, ``P`` tokens of all,
``M`` vectors that are held, ``W`` width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from train.data.memmap import release


@dataclass(frozen=True)
class TokenVectors:
    """Vectors of the tokens of captions, kept as they are stored: those of a batch are converted when it is read.

    Attributes:
        stored: ``[M, W]`` in the type of the dataset. May be mapped from a file, read-only.
        starts: int64 ``[N]``: the row of the first vector of each caption; the others follow.
    """

    stored: np.ndarray
    starts: np.ndarray

    def select(self, rows: np.ndarray) -> TokenVectors:
        """Return the vectors of some captions, in their order."""
        return replace(self, starts=self.starts[rows])


@dataclass(frozen=True)
class CaptionBatch:
    """Rows of captions; nothing is copied before a model reads them, in the form that suits it.

    Attributes:
        token_ids: non-negative integers, the token ids of all captions of the dataset, one after the other.
        offsets: int64 ``[N + 1]``; caption n has ``token_ids[offsets[n]:offsets[n + 1]]``.
        rows: integers ``[B]``, the captions of the batch, in any order, with or without repetition; B may be 0.
        vectors: vectors of the tokens of all captions, one for each token id, for models that read them; None if there are none.

    Raises:
        ValueError: a caption has no tokens.
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
        """Return the token ids, int64 ``[B, T]``, with ``padding`` after the end of each caption."""
        lengths = self.lengths
        steps = np.arange(lengths.max(initial=0))
        inside = steps < lengths[:, None]
        grid = np.full(inside.shape, padding, dtype=np.int64)
        grid[inside] = self.token_ids[(self.offsets[self.rows][:, None] + steps)[inside]]
        return grid

    def token_vectors(self) -> np.ndarray:
        """Return the vectors of the tokens of the batch, one caption after the other, float32 ``[P, W]``; a copy.

        Raises:
            ValueError: there are none.
        """
        if self.vectors is None:
            raise ValueError("the captions have no vectors of their tokens, which this model reads in place of words")
        lengths = self.lengths
        ends = np.cumsum(lengths)
        starts = self.vectors.starts[self.rows]
        rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
        values = self.vectors.stored[rows].astype(np.float32)
        release(self.vectors.stored)
        return values

    def alone(self) -> CaptionBatch:
        """Return the same batch without the other captions of the dataset; what is mapped is read."""
        lengths = self.lengths
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        sources = np.arange(offsets[-1]) + np.repeat(self.offsets[self.rows] - offsets[:-1], lengths)
        vectors = None if self.vectors is None else TokenVectors(self.token_vectors(), offsets[:-1])
        return CaptionBatch(self.token_ids[sources], offsets, np.arange(len(self)), vectors)

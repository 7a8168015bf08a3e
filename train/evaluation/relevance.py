"""Right items of queries, and the best wrong ones from the tiles of a ranking.

Scores are equal as in `train.evaluation.metrics`, and ties are pessimistic: a wrong item precedes right ones with an equal score.
Only the first positions count, so that the best wrong scores of each query are enough.

Letters: ``P`` pairs of a query and a right item, ``Q`` queries, ``K`` wrong scores that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from train.data.captions import Captions
from train.devices import upload
from train.evaluation.metrics import GAIN_CUTOFF, RelevanceMetrics, Scores, least_equal, right_pairs

_NEVER = 1 << 40  # Position beyond all.

Pairs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Query and right item of each pair, int64 ``[P]``; -1 for a right item that is no candidate. No other pair is repeated."""

RightItems: TypeAlias = Callable[[Captions, np.ndarray, np.ndarray], tuple[Pairs, Pairs]]
"""Definition of right items: from captions, the rows of candidates and the images of candidates to pairs of both directions.

Pairs are positions in ``rows`` and ``images``, from images to captions, then from captions to images.
"""


class ScoreCollector:
    """Source of scores that collects right and best wrong ones of another source."""

    def __init__(self, scores: Scores, pairs: tuple[Pairs, Pairs], shape: tuple[int, int], device: torch.device) -> None:
        self._scores, self._shape = scores, shape
        self._sides = _Side(pairs[0], *shape, device), _Side(pairs[1], *shape[::-1], device)

    def __call__(self, rows: slice, columns: Tensor) -> Tensor:
        """Return a tile of scores."""
        tile = self._scores(rows, columns)
        if tile.numel():
            row_indices = torch.arange(rows.start, rows.stop, device=tile.device)
            positions = [_positions_in(*pair) for pair in zip((row_indices, columns), self._shape, strict=True)]
            self._sides[0].add(tile, row_indices, columns, *positions)
            self._sides[1].add(tile.T, columns, row_indices, *positions[::-1])
        return tile

    def summarize(self) -> tuple[tuple[Tensor, ...], tuple[RelevanceMetrics, ...]]:
        """Return the best wrong items and the measures of rows and columns.

        Items are int64 on the CPU. Of equal scores, the first item is the best, and NaN never is; -1 for a query without one.
        """
        best_items, metrics = zip(*(side.summarize() for side in self._sides), strict=True)
        return best_items, metrics


class _Side:
    """Right scores and best wrong scores of one direction, on the scores' device."""

    def __init__(self, pairs: Pairs, num_queries: int, num_items: int, device: torch.device) -> None:
        self._pairs, self._num_queries, self._num_items = pairs, num_queries, num_items
        self._queries, self._items = (upload(torch.from_numpy(indices), device) for indices in pairs)
        self._right = torch.full(self._queries.shape, torch.nan, device=device)
        self._depth = min(num_items, max(GAIN_CUTOFF, int(np.bincount(pairs[0]).max())))
        self._wrong = torch.full((num_queries, self._depth), -torch.inf, device=device)  # [Q, K], descending.
        self._best_scores = torch.full((num_queries,), -torch.inf, device=device)
        self._best_items = torch.full((num_queries,), -1, device=device)

    def add(self, tile: Tensor, queries: Tensor, items: Tensor, query_positions: Tensor, item_positions: Tensor) -> None:
        """Collect the scores of a tile, with positions from `_positions_in`."""
        rows, columns = query_positions[self._queries], item_positions[self._items]
        padded = pad(tile, (0, 1, 0, 1), value=torch.nan)  # The last row and column are those of pairs outside the tile.
        self._right = torch.fmax(self._right, padded[rows, columns])  # The number, if one is NaN.
        padded[rows, columns] = -torch.inf
        wrong = padded[:-1, :-1]
        best = wrong.topk(min(self._depth, len(items))).values
        self._wrong[queries] = torch.cat([self._wrong[queries], best], 1).topk(self._depth).values
        scores, positions = wrong.nan_to_num(-torch.inf, torch.inf, -torch.inf).max(1)
        best_scores, best_items, found = self._best_scores[queries], self._best_items[queries], items[positions]
        is_better = (scores > best_scores) | (scores == best_scores) & (found < best_items)
        self._best_scores[queries] = torch.where(is_better, scores, best_scores)
        self._best_items[queries] = torch.where(is_better, found, best_items)

    def summarize(self) -> tuple[Tensor, RelevanceMetrics]:
        """Return the best wrong items and the measures."""
        bounds = least_equal(self._right.nan_to_num(-torch.inf, torch.inf, -torch.inf))
        counts = (~(self._wrong[self._queries] < bounds[:, None])).sum(1)  # At most K.
        summary = torch.cat([self._best_items, counts]).cpu()  # Joined, so that the host waits for a GPU only once.
        best_items, num_wrong = summary.split([self._num_queries, len(counts)])
        queries, items = self._pairs
        num_candidates = np.bincount(queries, items >= 0).astype(np.int64)  # Among the right items.
        wrong = np.minimum(num_wrong.numpy(), self._num_items - num_candidates[queries])
        return best_items, RelevanceMetrics.of(queries, np.where(items >= 0, wrong, _NEVER), self._num_items)


def _positions_in(indices: Tensor, size: int) -> Tensor:
    """Return the positions of numbers below ``size`` in indices, their count if none."""
    positions = torch.full((size + 1,), len(indices), device=indices.device)
    positions[indices] = torch.arange(len(indices), device=indices.device)
    return positions


def same_image(row_images: np.ndarray, column_images: np.ndarray) -> tuple[Pairs, Pairs]:
    """Pair rows and columns of the same image; the images of rows ascend."""
    in_rows = torch.bincount(torch.from_numpy(row_images), minlength=int(column_images.max()) + 1)
    rows, columns = (indices.numpy() for indices in right_pairs(in_rows, torch.from_numpy(column_images)))
    return (rows, columns), (columns, rows)

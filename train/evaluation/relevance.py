"""Measures over all right items of a query: nDCG@10, R-Precision, mAP@R, recalls.

===============  ===================================================================================================
nDCG@10          discounted cumulative gain of the first ten items over that of an ideal order (MTEB, trec_eval)
R-Precision      share of right items among the first R, where R is the query's number of right items (Musgrave et al. 2020)
mAP@R            mean over the first R positions of the precision there, 0 at wrong items (ECCV Caption, Chun et al. 2022)
recalls          share of queries with a right item up to a position; at 1 this is MTEB's hit@1
===============  ===================================================================================================

Scores are equal as in `train.evaluation.metrics`, and ties are pessimistic: a wrong item precedes right ones with an equal score.
Only the first positions count, so that the best wrong scores of each query are enough. They are collected from the tiles of
`bidirectional_ranks` during the ranking.

Letters: ``P`` pairs of a query and a right item, ``Q`` queries, ``K`` wrong scores that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from train.data.captions import Captions
from train.devices import upload
from train.evaluation.metrics import CUTOFFS, Scores, chance_recall, least_equal

_CUTOFF = 10
_NEVER = 1 << 40  # Position beyond all.
_DISCOUNTS = 1 / np.log2(np.arange(2, 2 + _CUTOFF))

Pairs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Query and right item of each pair, int64 ``[P]``; -1 for a right item that is no candidate. No other pair is repeated."""

RightItems: TypeAlias = Callable[[Captions, np.ndarray, np.ndarray], tuple[Pairs, Pairs]]
"""Definition of right items: from captions, the rows of candidates and the images of candidates to pairs of both directions.

Pairs are positions in ``rows`` and ``images``, from images to captions, then from captions to images.
"""


Relevance: TypeAlias = Mapping[str, "RelevanceMetrics"]
"""Measures of ``image_to_text`` and ``text_to_image``; the first word names the queries."""


@dataclass(frozen=True)
class RelevanceMetrics:
    """Measures of queries of one modality, in percent.

    Attributes:
        chance: the six measures of a random order.
    """

    queries: int
    chance: tuple[float, ...]
    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    ndcg_at_10: float
    r_precision: float
    map_at_r: float

    @property
    def values(self) -> tuple[float, ...]:
        """The six measures."""
        return tuple(vars(self).values())[2:]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**vars(self), "chance": dict(zip(list(vars(self))[2:], self.chance, strict=True))}

    @classmethod
    def of(cls, queries: np.ndarray, num_wrong: np.ndarray, num_items: int) -> RelevanceMetrics:
        """Summarize counts ``[P]`` of wrong items before right items of queries."""
        order = np.lexsort((num_wrong, queries))
        _, query, right = np.unique(queries[order], return_inverse=True, return_counts=True)
        nth = np.arange(1, len(query) + 1) - (right.cumsum() - right)[query]  # Among the right items, from 1.
        positions = num_wrong[order] + nth
        within = positions <= right[query]
        gains = _DISCOUNTS[np.minimum(positions, _CUTOFF) - 1] * (positions <= _CUTOFF)
        ideal = _DISCOUNTS.cumsum()[np.minimum(right, _CUTOFF) - 1]
        norms = (gains, ideal), (within, right), (within * nth / positions, right)
        measures = [np.bincount(query, values) / norm for values, norm in norms]
        recalls = [positions[nth == 1] <= cutoff for cutoff in CUTOFFS]
        chance = np.mean([_chance(min(count, num_items), num_items) for count in right.tolist()], axis=0)
        means = (100 * float(values.mean()) for values in (*recalls, *measures))
        return cls(len(right), tuple(chance.tolist()), *means)

    @classmethod
    def mean(cls, folds: Sequence[RelevanceMetrics]) -> RelevanceMetrics:
        """Return the means over folds, and the number of all queries."""
        values, chance = zip(*((fold.values, fold.chance) for fold in folds), strict=True)
        means = map(mean, zip(*values, strict=True))
        return cls(sum(fold.queries for fold in folds), tuple(map(mean, zip(*chance, strict=True))), *means)


@cache
def _chance(right: int, items: int) -> tuple[float, ...]:
    """Return the six expected measures of a random order, in percent."""
    share, positions = right / items, np.arange(1, right + 1)
    ndcg = share * _DISCOUNTS[:items].sum() / _DISCOUNTS[:right].sum()
    precisions = (1 + (positions - 1) * (right - 1) / max(items - 1, 1)) / positions  # Where the item is right.
    recalls = (chance_recall(cutoff, right, items) for cutoff in CUTOFFS)
    return *recalls, 100 * ndcg, 100 * share, 100 * share * float(precisions.mean())


class RelevanceMeter:
    """Collector of measures; its `observe` wraps the scores of a ranking."""

    def __init__(self, definitions: Mapping[str, RightItems]) -> None:
        self._definitions = definitions
        self._counters: dict[str, list[WrongCounter]] = {name: [] for name in definitions}

    def observe(self, scores: Scores, captions: Captions, rows: np.ndarray, images: np.ndarray) -> Scores:
        """Wrap a source of scores for each definition of right items."""
        for name, right_items in self._definitions.items():
            scores = WrongCounter(scores, *right_items(captions, rows, images), (len(images), len(rows)))
            self._counters[name].append(scores)
        return scores

    def means(self) -> dict[str, Relevance]:
        """Return means over all observed rankings, by definition, once these have ended."""
        folds = {name: [counter.relevance() for counter in counters] for name, counters in self._counters.items()}
        return {
            name: {direction: RelevanceMetrics.mean([fold[direction] for fold in relevances]) for direction in relevances[0]}
            for name, relevances in folds.items()
        }


class WrongCounter:
    """Source of scores that counts wrong items before right ones in another source."""

    def __init__(self, scores: Scores, row_pairs: Pairs, column_pairs: Pairs, sizes: tuple[int, int]) -> None:
        self._scores = scores
        self._sides = _Side(row_pairs, *sizes), _Side(column_pairs, *sizes[::-1])

    def __call__(self, rows: slice, columns: Tensor) -> Tensor:
        """Return a tile of scores."""
        tile = self._scores(rows, columns)
        row_indices = torch.arange(rows.start, rows.stop, device=tile.device)
        self._sides[0].add(tile, row_indices, columns)
        self._sides[1].add(tile.T, columns, row_indices)
        return tile

    def relevance(self) -> Relevance:
        """Return the measures, once all tiles were requested."""
        counts = [side.count_wrong() for side in self._sides]  # Joined, so that the host waits for a GPU only once.
        num_wrong = torch.cat(counts).cpu().split([len(side_counts) for side_counts in counts])
        metrics = (side.metrics(side_counts.numpy()) for side, side_counts in zip(self._sides, num_wrong, strict=True))
        return dict(zip(("image_to_text", "text_to_image"), metrics, strict=True))


class _Side:
    """Right scores and best wrong scores of one direction, on the scores' device."""

    def __init__(self, pairs: Pairs, num_queries: int, num_items: int) -> None:
        self._pairs, self._num_queries, self._num_items = pairs, num_queries, num_items
        self._depth = min(num_items, max(_CUTOFF, int(np.bincount(pairs[0]).max())))

    def add(self, tile: Tensor, queries: Tensor, items: Tensor) -> None:
        """Collect the scores of a tile of queries and items."""
        if not hasattr(self, "_wrong"):
            self._queries, self._items = (upload(torch.from_numpy(indices), tile.device) for indices in self._pairs)
            self._right = tile.new_full(self._queries.shape, torch.nan)
            self._wrong = tile.new_full((self._num_queries, self._depth), -torch.inf)  # [Q, K], descending.
        rows = _positions_in(queries, self._num_queries)[self._queries]
        columns = _positions_in(items, self._num_items)[self._items]
        is_right = torch.zeros([size + 1 for size in tile.shape], dtype=torch.bool, device=tile.device)
        is_right[rows, columns] = True  # The last row and column are those of pairs outside the tile.
        inside = (rows < len(queries)) & (columns < len(items))
        right = tile[rows.clamp(max=len(queries) - 1), columns.clamp(max=len(items) - 1)]
        self._right = torch.where(inside, right, self._right)
        best = tile.masked_fill(is_right[:-1, :-1], -torch.inf).topk(min(self._depth, len(items))).values
        self._wrong[queries] = torch.cat([self._wrong[queries], best], 1).topk(self._depth).values

    def count_wrong(self) -> Tensor:
        """Count the wrong items before right ones, int64 ``[P]``, at most K."""
        bounds = least_equal(self._right.nan_to_num(-torch.inf, torch.inf, -torch.inf))
        return (~(self._wrong[self._queries] < bounds[:, None])).sum(1)

    def metrics(self, num_wrong: np.ndarray) -> RelevanceMetrics:
        """Return the measures of counts from `count_wrong`."""
        queries, items = self._pairs
        num_candidates = np.bincount(queries, items >= 0).astype(np.int64)  # Among the right items.
        num_wrong = np.minimum(num_wrong, self._num_items - num_candidates[queries])
        return RelevanceMetrics.of(queries, np.where(items >= 0, num_wrong, _NEVER), self._num_items)


def _positions_in(indices: Tensor, size: int) -> Tensor:
    """Return the positions of numbers below ``size`` in indices, their count if none."""
    positions = torch.full((size + 1,), len(indices), device=indices.device)
    positions[indices] = torch.arange(len(indices), device=indices.device)
    return positions


def own_captions(captions: Captions, rows: np.ndarray, images: np.ndarray) -> tuple[Pairs, Pairs]:
    """Pair each image with its captions, and each caption with its image."""
    caption, image = np.arange(len(rows)), np.searchsorted(images, captions.images[rows])
    return (image, caption), (caption, image)

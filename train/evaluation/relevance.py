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
from dataclasses import asdict, dataclass, fields
from statistics import mean
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from train.data.captions import Captions
from train.devices import upload
from train.evaluation.metrics import CUTOFFS, Scores, chance_recall, least_equal

_CUTOFF = 10
_DISCOUNTS = 1 / np.log2(np.arange(2, 2 + _CUTOFF))

Pairs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Query and right item of each pair, int64 ``[P]``; no pair is repeated."""

RightItems: TypeAlias = Callable[[Captions, np.ndarray, np.ndarray], tuple[Pairs, Pairs]]
"""Definition of right items: from captions, the rows of candidates and the images of candidates to pairs of both directions.

Pairs are positions in ``rows`` and ``images``, from images to captions, then from captions to images.
"""


@dataclass(frozen=True)
class RelevanceMetrics:
    """Measures of queries of one modality, in percent."""

    queries: int
    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    ndcg_at_10: float
    r_precision: float
    map_at_r: float

    @property
    def values(self) -> tuple[float, ...]:
        """The measures without the number of queries."""
        return tuple(asdict(self).values())[1:]

    @classmethod
    def mean(cls, folds: Sequence[RelevanceMetrics]) -> RelevanceMetrics:
        """Return the means over folds, and the number of all queries."""
        return cls(sum(fold.queries for fold in folds), *map(mean, zip(*(fold.values for fold in folds), strict=True)))

    @classmethod
    def of(cls, queries: np.ndarray, positions: np.ndarray) -> RelevanceMetrics:
        """Summarize positions ``[P]``, from 1, of the right items of queries ``[P]``.

        Raises:
            ValueError: there are no pairs.
        """
        if not len(queries):
            raise ValueError("measures of no queries are undefined")
        order = np.lexsort((positions, queries))
        positions = positions[order]
        _, query, right = np.unique(queries[order], return_inverse=True, return_counts=True)
        nth = np.arange(len(query)) - (right.cumsum() - right)[query] + 1  # Among the right items, from 1.
        within = positions <= right[query]
        gains = _DISCOUNTS[np.minimum(positions, _CUTOFF) - 1] * (positions <= _CUTOFF)
        ideal = _DISCOUNTS.cumsum()[np.minimum(right, _CUTOFF) - 1]
        by_query = [np.bincount(query, values) for values in (gains, within, within * nth / positions)]
        measures = [by_query[0] / ideal, by_query[1] / right, by_query[2] / right]
        recalls = [positions[nth == 1] <= cutoff for cutoff in CUTOFFS]
        return cls(len(right), *(100 * float(values.mean()) for values in (*recalls, *measures)))

    @classmethod
    def of_chance(cls, queries: np.ndarray, items: int) -> RelevanceMetrics:
        """Return the expected measures of a random order of ``items``."""
        counts = np.unique(queries, return_counts=True)[1]
        rows = [
            (*(chance_recall(cutoff, right, items) for cutoff in CUTOFFS), *_chance(right, items)) for right in counts.tolist()
        ]
        return cls(len(counts), *np.mean(rows, axis=0).tolist())


def _chance(right: int, items: int) -> tuple[float, float, float]:
    share, positions = right / items, np.arange(1, right + 1)
    ndcg = share * _DISCOUNTS[:items].sum() / _DISCOUNTS[:right].sum()
    precisions = (1 + (positions - 1) * (right - 1) / max(items - 1, 1)) / positions  # Where the item is right.
    return 100 * ndcg, 100 * share, 100 * share * float(precisions.mean())


@dataclass(frozen=True)
class Relevance:
    """Measures of both directions, and those of a random order."""

    image_to_text: RelevanceMetrics
    text_to_image: RelevanceMetrics
    chance_image_to_text: RelevanceMetrics
    chance_text_to_image: RelevanceMetrics

    @classmethod
    def mean(cls, folds: Sequence[Relevance]) -> Relevance:
        """Return the means over folds."""
        return cls(*(RelevanceMetrics.mean([getattr(fold, field.name) for fold in folds]) for field in fields(cls)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


class RelevanceMeter:
    """Collector of measures; its `observe` wraps the scores of a ranking."""

    def __init__(self, definitions: Mapping[str, RightItems]) -> None:
        self._definitions = definitions
        self._counters: dict[str, list[PositionCounter]] = {name: [] for name in definitions}

    def observe(self, scores: Scores, captions: Captions, rows: np.ndarray, images: np.ndarray) -> Scores:
        """Wrap a source of scores for each definition of right items."""
        for name, right_items in self._definitions.items():
            scores = PositionCounter(scores, *right_items(captions, rows, images), (len(images), len(rows)))
            self._counters[name].append(scores)
        return scores

    def means(self) -> dict[str, Relevance]:
        """Return means over all observed rankings, by definition, once these have ended."""
        return {
            name: Relevance.mean([counter.relevance() for counter in counters]) for name, counters in self._counters.items()
        }


class PositionCounter:
    """Source of scores that passes on another source and positions the right items."""

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
        measured = (RelevanceMetrics.of(side.queries, side.positions()) for side in self._sides)
        chance = (RelevanceMetrics.of_chance(side.queries, side.num_items) for side in self._sides)
        return Relevance(*measured, *chance)


class _Side:
    """Right scores and best wrong scores of the queries of one direction."""

    def __init__(self, pairs: Pairs, num_queries: int, num_items: int) -> None:
        self.queries, self._items = pairs
        self.num_items = num_items
        self._num_right = np.bincount(self.queries, minlength=num_queries)
        self._right = torch.full((len(self.queries),), torch.nan)
        depth = min(num_items, max(_CUTOFF, int(self._num_right.max(initial=0))))
        self._wrong = torch.full((num_queries, depth), -torch.inf)  # [Q, K], descending.

    def add(self, tile: Tensor, queries: Tensor, items: Tensor) -> None:
        """Collect the scores of a tile of queries and items."""
        self._right, self._wrong = self._right.to(tile), self._wrong.to(tile)
        rows = _positions_in(queries.cpu().numpy(), len(self._wrong))[self.queries]
        columns = _positions_in(items.cpu().numpy(), self.num_items)[self._items]
        inside = np.flatnonzero((rows >= 0) & (columns >= 0))
        cells = upload(torch.from_numpy(rows[inside]), tile.device), upload(torch.from_numpy(columns[inside]), tile.device)
        right, depth = tile[cells], self._wrong.shape[1]
        self._right[upload(torch.from_numpy(inside), tile.device)] = right
        tile[cells] = -torch.inf
        best = tile.topk(min(depth, tile.shape[1])).values
        tile[cells] = right
        self._wrong[queries] = torch.cat([self._wrong[queries], best], 1).topk(depth).values

    def positions(self) -> np.ndarray:
        """Return the positions of pairs, int64 ``[P]``, from 1; above K, any above K."""
        bounds = least_equal(self._right.nan_to_num(-torch.inf, torch.inf, -torch.inf))
        wrong = self._wrong[upload(torch.from_numpy(self.queries), bounds.device)]
        num_wrong = (~(wrong < bounds[:, None])).sum(1).cpu().numpy()
        num_wrong = np.minimum(num_wrong, self.num_items - self._num_right[self.queries])
        order = np.lexsort((num_wrong, self.queries))
        first = np.searchsorted(self.queries[order], self.queries[order])
        positions = np.empty_like(num_wrong)
        positions[order] = num_wrong[order] + np.arange(len(order)) - first + 1
        return positions


def _positions_in(indices: np.ndarray, size: int) -> np.ndarray:
    positions = np.full(size, -1)
    positions[indices] = np.arange(len(indices))
    return positions


def own_captions(captions: Captions, rows: np.ndarray, images: np.ndarray) -> tuple[Pairs, Pairs]:
    """Pair each image with its captions, and each caption with its image."""
    caption, image = np.arange(len(rows)), np.searchsorted(images, captions.images[rows])
    return (image, caption), (caption, image)

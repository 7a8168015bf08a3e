"""Recall, median rank and measures over all correct items, in both directions.

A rank is one plus the number of wrong items before the right one. Ties are broken pessimistically: a wrong item with an equal score
comes before the right one, so that a model with equal scores for everything ranks last. NaN scores count like ties.

Scores are equal if they differ by at most `EQUAL_WITHIN` times the greater of 1 and the right score. Sums
depend on tile shape and thread count, so that scores of equal captions differ in the last bits. Float32
scores of unit vectors then agree to 1e-7; scores of other models are further apart.

Image to text: the best-ranked of an image's captions counts, as in Karpathy and Fei-Fei 2015 and later work;
its others are neither right nor wrong. Text to image: each caption is a query of its own.

===============  ===================================================================================================
nDCG@10          discounted cumulative gain of the first ten items over that of an ideal order (MTEB, trec_eval)
R-Precision      share of correct items among the first R, where R is the query's number of correct items (Musgrave et al. 2020)
mAP@R            mean over the first R positions of the precision there, 0 at wrong items (ECCV Caption, Chun et al. 2022)
===============  ===================================================================================================

Letters: ``I`` images, ``C`` captions, ``P`` pairs of a query and a correct item.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import permutations
from math import floor, isqrt
from statistics import mean
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from schemas.process.devices import upload
from train.chance import CUTOFFS, chance_recall

Scores = Callable[[slice, Tensor], Tensor]
"""A source of scores: from a slice of rows (images) and int64 indices of columns (captions) to scores ``[rows, columns]``.

A higher score means more alike. Each score is requested once.
"""

EQUAL_WITHIN = 8 * torch.finfo(torch.float32).eps
"""Maximum difference of equal scores, 9.5e-7: eight times the distance of neighbouring float32 values at 1."""

_SCORES_AT_ONCE = 1 << 26  # 256 MiB in float32.

GAIN_CUTOFF = 10
_DISCOUNTS = 1 / np.log2(np.arange(2, 2 + GAIN_CUTOFF))


@dataclass(frozen=True)
class RecallMetrics:
    """Recalls in percent and median rank of queries of one modality.

    The median of an even number of queries is the mean of the middle two, rounded down, as in the published
    code of Kiros et al. 2015, Vendrov et al. 2016 and Faghri et al. 2018. Means over folds are not rounded.
    """

    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    median_rank: float
    queries: int

    @property
    def recalls(self) -> tuple[float, float, float]:
        """R@1, R@5 and R@10 in percent."""
        return self.recall_at_1, self.recall_at_5, self.recall_at_10

    @classmethod
    def of(cls, ranks: Tensor) -> Self:
        """Summarize ranks ``[queries]``, which count from 1.

        Raises:
            ValueError: ``ranks`` is empty.
        """
        if not len(ranks):
            raise ValueError("recall of no queries is undefined: there are no captions to evaluate on")
        ranks = ranks.cpu()  # One synchronization for all numbers.
        first, fifth, tenth = (100 * int((ranks <= cutoff).sum()) / len(ranks) for cutoff in CUTOFFS)
        middle = ranks.sort().values[[(len(ranks) - 1) // 2, len(ranks) // 2]]
        return cls(first, fifth, tenth, median_rank=floor(int(middle.sum()) / 2), queries=len(ranks))


@dataclass(frozen=True)
class RelevanceMetrics:
    """Measures over all correct items of queries of one modality, in percent.

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
    def of(cls, queries: np.ndarray, num_wrong: np.ndarray, num_items: int, is_item: np.ndarray) -> Self:
        """Summarize counts ``[P]`` of wrong items before correct items of queries.

        ``is_item`` tells correct items that are ranked from listed ones that the data lack.
        """
        order = np.lexsort((num_wrong, queries))
        _, query, right = np.unique(queries[order], return_inverse=True, return_counts=True)
        present = np.bincount(query, is_item[order]).astype(int)
        nth = np.arange(1, len(query) + 1) - (right.cumsum() - right)[query]  # Among the correct items, from 1.
        positions = num_wrong[order] + nth
        within = positions <= right[query]
        gains = _DISCOUNTS[np.minimum(positions, GAIN_CUTOFF) - 1] * (positions <= GAIN_CUTOFF)
        ideal = _DISCOUNTS.cumsum()[np.minimum(right, GAIN_CUTOFF) - 1]
        norms = (gains, ideal), (within, right), (within * nth / positions, right)
        measures = [np.bincount(query, values) / norm for values, norm in norms]
        recalls = [positions[nth == 1] <= cutoff for cutoff in CUTOFFS]
        counts = zip(right.tolist(), present.tolist(), strict=True)
        chance = np.mean([_chance(*pair, num_items) for pair in counts], axis=0)
        means = (100 * float(values.mean()) for values in (*recalls, *measures))
        return cls(len(right), tuple(chance.tolist()), *means)


@cache
def _chance(right: int, present: int, items: int) -> tuple[float, ...]:
    """Return the six expected measures of a random order, in percent.

    Of ``right`` items, ``present`` are among the ranked ones.
    """
    share, positions = present / items, np.arange(1, min(right, items) + 1)
    ndcg = share * _DISCOUNTS[:items].sum() / _DISCOUNTS[:right].sum()
    precisions = (1 + (positions - 1) * (present - 1) / max(items - 1, 1)) / positions  # Where the item is right.
    recalls = (chance_recall(cutoff, present, items) for cutoff in CUTOFFS)
    return *recalls, 100 * ndcg, *(100 * share * float(total) / right for total in (len(positions), precisions.sum()))


@dataclass(frozen=True)
class Ranks:
    """Ranks of all queries, from 1, on the CPU.

    Attributes:
        image_to_text: int64 ``[I]``, rank of the best-ranked caption of each image; 0 for an image without captions.
        text_to_image: int64 ``[C]``, rank of the image of each caption.
        best_wrong: int64 ``[I]`` and ``[C]``, the best-scored caption and image of another image; -1 without one.
        relevance: measures over all correct items by definition of these, then by direction.
    """

    image_to_text: Tensor
    text_to_image: Tensor
    best_wrong: tuple[Tensor, ...]
    relevance: Mapping[str, Mapping[str, RelevanceMetrics]]


@dataclass(frozen=True)
class RetrievalMetrics:
    """Metrics of both directions; the first word of a direction names the queries."""

    image_to_text: RecallMetrics
    text_to_image: RecallMetrics

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """Summarize ranks; an image without captions is a candidate, but no query."""
        return cls(RecallMetrics.of(ranks.image_to_text[ranks.image_to_text > 0]), RecallMetrics.of(ranks.text_to_image))

    @property
    def sum_of_recalls(self) -> float:
        """Sum of the six recalls, 0 to 600, which early stopping monitors."""
        return sum(self.image_to_text.recalls) + sum(self.text_to_image.recalls)

    @property
    def mean_recall(self) -> float:
        """Mean of the six recalls, 0 to 100, mR in papers."""
        return self.sum_of_recalls / 6

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {**asdict(self), "mean_recall": self.mean_recall, "sum_of_recalls": self.sum_of_recalls}


def mean_over_folds(folds: Sequence[Any]) -> Any:
    """Return the means of the numbers in metrics of folds, and the sums of queries."""
    first = folds[0]
    if len(folds) == 1:
        return first
    if isinstance(first, dict):
        columns = {name: [fold[name] for fold in folds] for name in first}
        return {name: sum(column) if name == "queries" else mean_over_folds(column) for name, column in columns.items()}
    if isinstance(first, tuple):
        return tuple(map(mean, zip(*folds, strict=True)))
    if isinstance(first, int | float):
        return mean(folds)
    return replace(first, **mean_over_folds([vars(fold) for fold in folds]))


def bidirectional_ranks(
    scores: Scores, row_images: Tensor, column_images: Tensor, *, device: torch.device | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rank the best item of the same image, and find the best of another image.

    Tiled: one tile of the O(N²) scores is in memory, and each score is computed once. A tile has the rows of one strip of images
    and the columns of another. Diagonal tiles come first: they hold the right scores that all others are compared with. A tile has
    at most `_SCORES_AT_ONCE` scores, unless those of a single image are more.

    Args:
        scores: source of scores; its rows are captions, too, where captions are ranked among captions.
        row_images: int64, the image of each row, from 0 and ascending.
        column_images: int64, the image of each column, from 0.
        device: device of the scores; that of ``row_images`` if None.

    Returns:
        int64 on the CPU, each for rows and for columns. First the ranks; 0 for an item without a right one.
        Then the best wrong items, of equal scores the first in the order of images, and never NaN; -1 without
        one. The host waits for a GPU only once if the images are on the CPU.

    Raises:
        ValueError: the images of the rows do not ascend.
    """
    device, row_images, column_images = device or row_images.device, row_images.cpu(), column_images.cpu()
    if len(row_images) and bool((row_images.diff() < 0).any()):
        raise ValueError("the images of the rows do not ascend")
    owners, order = column_images.sort(stable=True)  # The columns of a strip of images are adjacent.
    num_images = 1 + max((int(images.max()) for images in (row_images, column_images) if len(images)), default=-1)
    in_rows, in_columns = (torch.bincount(images, minlength=num_images) for images in (row_images, column_images))
    strips = _strips(in_rows.tolist(), in_columns.tolist())
    order_on_device = upload(order, device)
    sizes = len(row_images), len(owners)
    # Rows first, then columns in the order of their images.
    better = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    best_items, best_scores = torch.full_like(better, -1), torch.full(better.shape, -torch.inf, device=device)
    row_better, column_better = better.split(sizes)
    (row_items, column_items), (row_best, column_best) = best_items.split(sizes), best_scores.split(sizes)
    bounds: list[list[Tensor]] = []  # Per strip, the least scores that equal the best right ones of rows and columns.
    for a, b in (*((n, n) for n in range(len(strips))), *permutations(range(len(strips)), 2)):
        rows, columns = strips[a][0], strips[b][1]
        tile = scores(rows, order_on_device[columns])
        numbers = tile.nan_to_num(-torch.inf, torch.inf, -torch.inf)  # NaN loses against every other score.
        if a == b:
            is_right = row_images[rows, None] == owners[columns]
            pairs = tuple(upload(indices, device) for indices in is_right.nonzero(as_tuple=True))
            right = numbers[pairs]
            worst = [right.new_full((size,), -torch.inf) for size in tile.shape]
            best = [start.scatter_reduce(0, indices, right, "amax") for start, indices in zip(worst, pairs, strict=True)]
            bounds.append([least_equal(own) for own in best])
            numbers[pairs] = -torch.inf
            # Items of the same image do not count against each other.
            for counts, indices, bound in zip((row_better[rows], column_better[columns]), pairs, bounds[-1], strict=True):
                counts.index_add_(0, indices, (tile[pairs] < bound[indices]).long() - 1)
        row_better[rows].add_((~(tile < bounds[a][0][:, None])).sum(1))
        column_better[columns].add_((~(tile < bounds[b][1])).sum(0))
        _keep_best(numbers, columns.start, row_best[rows], row_items[rows])
        _keep_best(numbers.T, rows.start, column_best[columns], column_items[columns])
    has_right = torch.cat((in_columns[row_images] > 0, in_rows[owners] > 0))
    better, best_items = torch.stack([better, best_items]).cpu()
    row_ranks, column_ranks = (better + 1).mul_(has_right).split(sizes)
    best_columns, best_rows = best_items.split(sizes)
    inverse = order.argsort()
    best_columns = pad(order, (0, 1), value=-1)[best_columns]  # The last item is that of -1.
    return (row_ranks, column_ranks[inverse]), (best_columns, best_rows[inverse])


def least_equal(scores: Tensor) -> Tensor:
    """Return the least scores that are equal to right scores."""
    # Clamped, since infinity minus infinity is NaN.
    return scores.sub(scores.abs().clamp(1, torch.finfo(scores.dtype).max), alpha=EQUAL_WITHIN)


def _keep_best(tile: Tensor, first: int, best_scores: Tensor, best_items: Tensor) -> None:
    """Keep the best score and item of each row; ``first`` is the item of column 0."""
    if tile.numel():
        scores, positions = tile.max(1)  # The first among equal scores.
        items = positions + first
        is_better = (scores > best_scores) | (scores == best_scores) & (items < best_items)
        best_scores.copy_(torch.where(is_better, scores, best_scores))
        best_items.copy_(torch.where(is_better, items, best_items))


def _strips(rows: Sequence[int], columns: Sequence[int]) -> list[tuple[slice, slice]]:
    """Cut images into strips, from their numbers of rows and columns."""
    side = isqrt(_SCORES_AT_ONCE) if sum(rows) * sum(columns) > _SCORES_AT_ONCE else max(sum(rows), sum(columns))
    strips, row, column, height, width = [], 0, 0, 0, 0
    for num_rows, num_columns in zip(rows, columns, strict=True):
        if height + width and max(height + num_rows, width + num_columns) > side:
            strips.append((slice(row, row + height), slice(column, column + width)))
            row, column, height, width = row + height, column + width, 0, 0
        height, width = height + num_rows, width + num_columns
    return [*strips, (slice(row, row + height), slice(column, column + width))] if height + width else strips

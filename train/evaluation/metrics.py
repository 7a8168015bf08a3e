"""Recall and median rank of image-sentence retrieval, in both directions.

A rank is one plus the number of wrong items before the right one. Ties are broken pessimistically: a wrong item with an equal score
comes before the right one, so that a model with equal scores for everything ranks last. NaN scores count like ties.

Scores are equal if they differ by at most `EQUAL_WITHIN` times the greater of 1 and the right score. Sums depend on tile shape and
thread count, so that scores of equal captions differ in the last bits. Float32 scores of unit vectors then agree to 1e-7; scores of
other models are further apart.

Image to text: the best-ranked of an image's captions counts, as in Karpathy and Fei-Fei 2015 and later work; its others are neither
right nor wrong. Text to image: each caption is a query of its own.

Letters: ``I`` images, ``C`` captions, ``K`` captions of one image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from math import comb, floor, isqrt

import torch
from torch import Tensor

from train.devices import upload
from train.evaluation.statistics import CUTOFFS

Scores = Callable[[slice, Tensor], Tensor]
"""A source of scores: from a slice of rows (images) and int64 indices of columns (captions) to scores ``[rows, columns]``.

A higher score means more alike. Each score is requested once.
"""

EQUAL_WITHIN = 8 * torch.finfo(torch.float32).eps
"""Maximum difference of equal scores, 9.5e-7: eight times the distance of neighbouring float32 values at 1."""

_SCORES_AT_ONCE = 1 << 26  # 256 MiB in float32.


@dataclass(frozen=True)
class RecallMetrics:
    """Recall and median rank of queries of one modality.

    Attributes:
        recall_at_1: share of queries with a right item at rank 1, in percent.
        recall_at_5: share with a right item up to rank 5.
        recall_at_10: share with a right item up to rank 10.
        median_rank: median of the ranks. For an even number of queries, the mean of the middle two is rounded down, as in the
            published code of Kiros et al. 2015, Vendrov et al. 2016 and Faghri et al. 2018. Means over folds are not rounded.
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
    def of(cls, ranks: Tensor) -> RecallMetrics:
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
class Ranks:
    """Ranks of all queries, from 1, on the CPU.

    Attributes:
        image_to_text: int64 ``[I]``, rank of the best-ranked caption of each image; 0 for an image without captions.
        text_to_image: int64 ``[C]``, rank of the image of each caption.
        best_wrong_caption: int64 ``[I]``, the best-scored caption of another image; -1 without one, None unless requested.
        best_wrong_image: int64 ``[C]``, the best-scored other image.
    """

    image_to_text: Tensor
    text_to_image: Tensor
    best_wrong_caption: Tensor | None = None
    best_wrong_image: Tensor | None = None


@dataclass(frozen=True)
class RetrievalMetrics:
    """Metrics of both directions; the first word of a direction names the queries."""

    image_to_text: RecallMetrics
    text_to_image: RecallMetrics

    @classmethod
    def of(cls, ranks: Ranks) -> RetrievalMetrics:
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


def retrieval_ranks(
    scores: Scores,
    num_images: int,
    image_of_caption: Tensor,
    *,
    device: torch.device | None = None,
    best_wrong: bool = False,
) -> Ranks:
    """Rank all queries in both directions, with one row of scores per image.

    ``image_of_caption`` is int64 ``[C]``, the row of the image that each caption belongs to. Other arguments are those of
    `bidirectional_ranks`.

    Raises:
        ValueError: a caption belongs to no image.
    """
    if len(image_of_caption) and not 0 <= int(image_of_caption.min()) <= int(image_of_caption.max()) < num_images:
        raise ValueError(
            f"captions belong to images {int(image_of_caption.min())} to {int(image_of_caption.max())} of {num_images}"
        )
    rows = torch.arange(num_images, device=image_of_caption.device)
    return Ranks(*bidirectional_ranks(scores, rows, image_of_caption, device=device, best_wrong=best_wrong))


def bidirectional_ranks(
    scores: Scores,
    row_images: Tensor,
    column_images: Tensor,
    *,
    device: torch.device | None = None,
    best_wrong: bool = False,
) -> tuple[Tensor, ...]:
    """Rank the best item of the same image for each row and each column.

    Tiled: one tile of the O(N²) scores is in memory, and each score is computed once. A tile has the rows of one strip of images
    and the columns of another. Diagonal tiles come first: they hold the right scores that all others are compared with. A tile has
    at most `_SCORES_AT_ONCE` scores, unless those of a single image are more.

    Args:
        scores: source of scores; its rows are captions, too, where captions are ranked among captions.
        row_images: int64, the image of each row, from 0 and ascending.
        column_images: int64, the image of each column, from 0.
        device: device of the scores; that of ``row_images`` if None.
        best_wrong: whether to find the best-scored item of another image, too. Of equal scores, the first in the order of images
            counts, and NaN never does. A tile is copied.

    Returns:
        int64 on the CPU, the rank of each row and of each column; 0 for an item without a right one. With ``best_wrong``, the
        column of each row's best wrong item and the row of each column's follow; -1 for an item without a wrong one. The host
        waits for a GPU only once if the images are on the CPU.

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
    better = torch.zeros(sum(sizes), dtype=torch.int64, device=device)  # Of columns in the order of their images.
    row_better, column_better = better.split(sizes)
    row_wrong, column_wrong = (_BestWrong.empty(size, device) for size in (sizes if best_wrong else (0, 0)))
    bounds: list[tuple[Tensor, Tensor]] = []
    for rows, columns in strips:
        tile = scores(rows, order_on_device[columns])
        pair_rows, pair_columns = _right_pairs(in_rows, owners[columns])
        pairs = upload(pair_rows - rows.start, device), upload(pair_columns, device)
        right = tile[pairs]
        bounds.append((_own_best_scores(right, pairs[0], tile.shape[0]), _own_best_scores(right, pairs[1], tile.shape[1])))
        _count_better(tile, *bounds[-1], row_better[rows], column_better[columns])
        # Items of the same image do not count against each other.
        for counts, indices, bound in zip((row_better[rows], column_better[columns]), pairs, bounds[-1], strict=True):
            counts.index_add_(0, indices, (right < bound[indices]).long() - 1)
        if best_wrong:
            wrong = tile.nan_to_num(-torch.inf, torch.inf, -torch.inf)
            wrong[pairs] = -torch.inf
            row_wrong.update(wrong, rows, columns.start)
            column_wrong.update(wrong.T, columns, rows.start)
    for a, b in permutations(range(len(strips)), 2):
        rows, columns = strips[a][0], strips[b][1]
        tile_bounds = bounds[a][0], bounds[b][1]
        tile = scores(rows, order_on_device[columns])
        _count_better(tile, *tile_bounds, row_better[rows], column_better[columns])
        if best_wrong:
            wrong = tile.nan_to_num(-torch.inf, torch.inf, -torch.inf)
            row_wrong.update(wrong, rows, columns.start)
            column_wrong.update(wrong.T, columns, rows.start)
    has_right = torch.cat((in_columns[row_images] > 0, in_rows[owners] > 0))
    row_ranks, column_ranks = (better.cpu() + 1).mul_(has_right).split(sizes)
    ranks = row_ranks, torch.empty_like(column_ranks).index_copy(0, order, column_ranks)
    if not best_wrong:
        return ranks
    wrong_columns, wrong_rows = row_wrong.indices.cpu(), column_wrong.indices.cpu()
    wrong_columns = torch.where(wrong_columns < 0, -1, order[wrong_columns.clamp(min=0)]) if len(order) else wrong_columns
    return *ranks, wrong_columns, torch.empty_like(wrong_rows).index_copy(0, order, wrong_rows)


@dataclass(frozen=True)
class _BestWrong:
    """Greatest wrong scores of items, and the first item with each."""

    scores: Tensor
    indices: Tensor

    @classmethod
    def empty(cls, size: int, device: torch.device) -> _BestWrong:
        return cls(torch.full((size,), -torch.inf, device=device), torch.full((size,), -1, device=device))

    def update(self, tile: Tensor, items: slice, start: int) -> None:
        """Add a tile ``[items, others]`` without NaN.

        ``start`` is the index of its first other item.
        """
        if not tile.shape[1]:
            return
        scores, indices = tile.max(1)  # The first of equal scores.
        scores, indices = scores.to(self.scores.dtype), indices + start
        previous = self.scores[items], self.indices[items]
        is_better = (scores > previous[0]) | ((scores == previous[0]) & (scores > -torch.inf) & (indices < previous[1]))
        self.scores[items] = torch.where(is_better, scores, previous[0])
        self.indices[items] = torch.where(is_better, indices, previous[1])


def _right_pairs(in_rows: Tensor, column_images: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of each pair of items of the same image."""
    first_row = in_rows.cumsum(0) - in_rows
    num_partners = in_rows[column_images]
    columns = torch.repeat_interleave(num_partners)
    nth_partner = torch.arange(len(columns)) - (num_partners.cumsum(0) - num_partners)[columns]
    return first_row[column_images][columns] + nth_partner, columns


def _own_best_scores(right: Tensor, indices: Tensor, size: int) -> Tensor:
    """Return the least score that equals the best right score of each item."""
    # NaN loses against every other score.
    best = right.new_full((size,), -torch.inf)
    return least_equal(best.scatter_reduce(0, indices, right.nan_to_num(-torch.inf, torch.inf, -torch.inf), "amax"))


def least_equal(scores: Tensor) -> Tensor:
    """Return the least scores that are equal to right scores."""
    # Clamped, since infinity minus infinity is NaN.
    return scores.sub(scores.abs().clamp(1, torch.finfo(scores.dtype).max), alpha=EQUAL_WITHIN)


def _count_better(tile: Tensor, row_bounds: Tensor, column_bounds: Tensor, row_better: Tensor, column_better: Tensor) -> None:
    """Count the scores that are not below their bounds, by row and by column."""
    row_better += (~(tile < row_bounds[:, None])).sum(1)
    column_better += (~(tile < column_bounds)).sum(0)


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


def chance_recall(cutoff: int, right: int, items: int) -> float:
    """Return the recall in percent at a cutoff in a random order (hypergeometric).

    >>> chance_recall(10, 1, 1000)
    1.0
    """
    return 100 * (1 - comb(items - right, cutoff) / comb(items, cutoff)) if cutoff < items else 100.0

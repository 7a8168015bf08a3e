"""Recall and median rank of image-sentence retrieval, in both directions.

Letters: ``I`` images, ``C`` captions, ``K`` captions of one image.

A rank is the number of wrong items before the right one, plus one. Equal scores count against the model: a wrong item with the
same score comes before the right one, so that a model with equal scores for everything ranks last rather than, by the order of the
rows, first. A score that is not a number counts in the same way.

Scores count as equal if they differ by rounding only: by at most `EQUAL_WITHIN` times the greater of 1 and the right score. The sum
of a product depends on the shape of a tile and on the number of threads, so that equal captions differ in the last bits. Float32
scores of unit vectors are within 1e-7 of one another then; scores of other models are further apart.

Image to text: an image has one or more captions, of which the best-ranked counts, as in Karpathy and Fei-Fei 2015 and later work;
the others are neither right nor wrong. Text to image: each caption is a query of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from math import comb, floor, isqrt

import torch
from torch import Tensor

from train.devices import upload

Scores = Callable[[slice, Tensor], Tensor]
"""A source of scores: from rows, a slice of the images, and columns, int64 numbers of captions, to their scores
``[rows, columns]``; a higher score means more alike. It is asked for each score once."""

CUTOFFS = (1, 5, 10)

EQUAL_WITHIN = 8 * torch.finfo(torch.float32).eps
"""Difference up to which scores are equal, 9.5e-7: eight times the distance of neighbouring float32 values at 1."""

_SCORES_AT_ONCE = 1 << 26  # 256 MiB in float32.


@dataclass(frozen=True)
class Direction:
    """How well queries of one modality find items of the other.

    Attributes:
        recall_at_1: share of queries whose right item has rank 1, in percent.
        recall_at_5: likewise, up to rank 5.
        recall_at_10: likewise, up to rank 10.
        median_rank: median of the ranks; for an even number of queries, the mean of the middle two, rounded down as in the
            published code of Kiros et al. 2015, Vendrov et al. 2016 and Faghri et al. 2018. A whole number, but for the mean over
            folds.
        queries: number of queries.
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
    def of(cls, ranks: Tensor) -> Direction:
        """Summarize ranks ``[queries]``, which count from 1.

        Raises:
            ValueError: there are no queries.
        """
        if not len(ranks):
            raise ValueError("recall of no queries is not defined: there are no captions to evaluate on")
        ranks = ranks.cpu()  # Once: each number that is read from a GPU is waited for.
        first, fifth, tenth = (100 * int((ranks <= cutoff).sum()) / len(ranks) for cutoff in CUTOFFS)
        middle = ranks.sort().values[[(len(ranks) - 1) // 2, len(ranks) // 2]]
        return cls(first, fifth, tenth, median_rank=floor(int(middle.sum()) / 2), queries=len(ranks))


@dataclass(frozen=True)
class Ranks:
    """Ranks of all queries, from 1, on the CPU.

    Attributes:
        image_to_text: int64 ``[I]``, rank of the best-ranked caption of each image; 0 for an image without captions.
        text_to_image: int64 ``[C]``, rank of the image of each caption.
    """

    image_to_text: Tensor
    text_to_image: Tensor


@dataclass(frozen=True)
class Retrieval:
    """Retrieval in both directions; the first word of a direction names the queries."""

    image_to_text: Direction
    text_to_image: Direction

    @classmethod
    def of(cls, ranks: Ranks) -> Retrieval:
        """Summarize ranks; an image without captions is not a query, but it is a candidate for captions."""
        return cls(Direction.of(ranks.image_to_text[ranks.image_to_text > 0]), Direction.of(ranks.text_to_image))

    @property
    def sum_of_recalls(self) -> float:
        """Sum of the six recalls, 0 to 600, which early stopping monitors."""
        return sum(self.image_to_text.recalls) + sum(self.text_to_image.recalls)

    @property
    def mean_recall(self) -> float:
        """Mean of the six recalls, 0 to 100, which papers call mR."""
        return self.sum_of_recalls / 6

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {**asdict(self), "mean_recall": self.mean_recall, "sum_of_recalls": self.sum_of_recalls}


def ranks_of(
    scores: Scores,
    images: int,
    image_of_caption: Tensor,
    *,
    device: torch.device | None = None,
    scores_at_once: int = _SCORES_AT_ONCE,
) -> Ranks:
    """Rank all queries in both directions; see `ranks_between`, of which this is the case of one row per image.

    ``image_of_caption`` is int64 ``[C]``, the row of the image that each caption belongs to.

    Raises:
        ValueError: a caption belongs to no image.
    """
    device, image_of_caption = device or image_of_caption.device, image_of_caption.cpu()
    if len(image_of_caption) and not 0 <= int(image_of_caption.min()) <= int(image_of_caption.max()) < images:
        raise ValueError(
            f"captions belong to images {int(image_of_caption.min())} to {int(image_of_caption.max())} of {images}"
        )
    return Ranks(*ranks_between(scores, torch.arange(images), image_of_caption, device=device, scores_at_once=scores_at_once))


def ranks_between(
    scores: Scores,
    row_images: Tensor,
    column_images: Tensor,
    *,
    device: torch.device | None = None,
    scores_at_once: int = _SCORES_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Rank items among others, in both directions; right are all that belong to the same image.

    The best-ranked right item counts; the others are neither right nor wrong. The score matrix is cut into tiles: strips of images,
    and what belongs to the images of a strip. Those in which items meet their own images come first, since other scores are
    compared with theirs. So each score is computed once, however many there are, and memory holds one tile.

    Args:
        scores: see `Scores`; rows are captions, too, where captions are ranked among captions.
        row_images: int64, the image of each row, from 0 and ascending.
        column_images: int64, the image of each column, from 0.
        device: where the scores are; that of ``row_images`` if None.
        scores_at_once: maximum number of scores to hold; more only where those of a single image are more.

    Returns:
        int64 on the CPU, the rank of each row and of each column; 0 where nothing belongs to the same image. A GPU is waited for
        once, for both, if the images are on the CPU.

    Raises:
        ValueError: the images of the rows do not ascend.
    """
    device, row_images, column_images = device or row_images.device, row_images.cpu(), column_images.cpu()
    if len(row_images) and bool((row_images.diff() < 0).any()):
        raise ValueError("the images of the rows do not ascend")
    owner, order = column_images.sort(stable=True)  # The columns of a strip of images are adjacent.
    images = 1 + max((int(numbers.max()) for numbers in (row_images, column_images) if len(numbers)), default=-1)
    in_rows, in_columns = (torch.bincount(numbers, minlength=images) for numbers in (row_images, column_images))
    first_row = in_rows.cumsum(0) - in_rows
    strips = _strips(in_rows.tolist(), in_columns.tolist(), scores_at_once)
    here = upload(order, device)
    sizes = len(row_images), len(owner)
    ranks = torch.zeros(sum(sizes), dtype=torch.int64, device=device)  # From 0, and of columns in the order of their images.
    row_ranks, column_ranks = ranks.split(sizes)
    # By strip: the least score that counts as equal to the greatest of each row, or column, with its own image.
    bounds_of_rows: list[Tensor] = []
    bounds_of_columns: list[Tensor] = []

    def compare(a: int, b: int, tile: Tensor) -> None:
        row_ranks[strips[a][0]] += (~(tile < bounds_of_rows[a][:, None])).sum(1)
        column_ranks[strips[b][1]] += (~(tile < bounds_of_columns[b])).sum(0)

    for number, (rows, columns) in enumerate(strips):
        tile = scores(rows, here[columns])
        # The scores of items of the same image, one after the other, with their places in the tile.
        partners = in_rows[owner[columns]]
        right = torch.repeat_interleave(torch.arange(len(partners)), partners)
        number_of_partner = torch.arange(len(right)) - (partners.cumsum(0) - partners)[right]
        left = first_row[owner[columns]][right] - rows.start + number_of_partner
        left, right = upload(left, device), upload(right, device)
        own = tile[left, right]
        for places, size, bounds, of_part, part in (
            (left, tile.shape[0], bounds_of_rows, row_ranks, rows),
            (right, tile.shape[1], bounds_of_columns, column_ranks, columns),
        ):
            # A score that is not a number loses against every other.
            worst = tile.new_full((size,), -torch.inf)
            best = worst.scatter_reduce(0, places, own.nan_to_num(-torch.inf, torch.inf, -torch.inf), "amax")
            bounds.append(_least_equal(best))
            # Items of the same image do not count against each other.
            of_part[part] -= torch.zeros(size, dtype=torch.int64, device=device).index_add(
                0, places, (~(own < bounds[number][places])).long()
            )
        compare(number, number, tile)
    for a, b in permutations(range(len(strips)), 2):
        compare(a, b, scores(strips[a][0], here[strips[b][1]]))
    row_ranks, column_ranks = (ranks.cpu() + 1).mul_(torch.cat((in_columns[row_images] > 0, in_rows[owner] > 0))).split(sizes)
    return row_ranks, torch.empty_like(column_ranks).index_copy(0, order, column_ranks)


def _least_equal(scores: Tensor) -> Tensor:
    """Return the least score that is equal to each score but for rounding."""
    # The greatest float stands for infinity, which less itself would be no number.
    return scores.sub(scores.abs().clamp(1, torch.finfo(scores.dtype).max), alpha=EQUAL_WITHIN)


def _strips(rows: Sequence[int], columns: Sequence[int], scores_at_once: int) -> list[tuple[slice, slice]]:
    """Cut images into strips, and return for each its rows and its columns, as slices.

    Args:
        rows: number of rows of each image.
        columns: number of columns of each image.
        scores_at_once: maximum number of scores of a strip's rows with another's columns, if possible.
    """
    side = isqrt(scores_at_once) if sum(rows) * sum(columns) > scores_at_once else max(sum(rows), sum(columns))
    strips, row, column, height, width = [], 0, 0, 0, 0
    for more_rows, more_columns in zip(rows, columns, strict=True):
        if height + width and max(height + more_rows, width + more_columns) > side:
            strips.append((slice(row, row + height), slice(column, column + width)))
            row, column, height, width = row + height, column + width, 0, 0
        height, width = height + more_rows, width + more_columns
    return [*strips, (slice(row, row + height), slice(column, column + width))] if height + width else strips


def chance_recall(cutoff: int, right: int, items: int) -> float:
    """Return the recall, in percent, at a cutoff in a random order of items of which ``right`` are right (hypergeometric).

    >>> chance_recall(10, 1, 1000)
    1.0
    """
    return 100 * (1 - comb(items - right, cutoff) / comb(items, cutoff)) if cutoff < items else 100.0

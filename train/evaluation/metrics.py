"""Recall and median rank of image-sentence retrieval, in both directions.

Letters: ``I`` images, ``C`` captions, ``K`` captions of one image.

A rank is the number of wrong items before the right one, plus one. Equal scores count against the model: a wrong item with the
same score comes before the right one, so that a model with equal scores for everything ranks last rather than, by the order of the
rows, first. A score that is not a number counts in the same way.

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

__all__ = ["CUTOFFS", "Direction", "Ranks", "Retrieval", "Scores", "chance_recall", "ranks_of", "retrieval"]

Scores = Callable[[slice, Tensor], Tensor]
"""A source of scores: from rows, a slice of the images, and columns, int64 numbers of captions, to their scores
``[rows, columns]``; a higher score means more alike. It is asked for each score once."""

CUTOFFS = (1, 5, 10)

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
        first, fifth, tenth = (100 * int((ranks <= cutoff).sum()) / len(ranks) for cutoff in CUTOFFS)
        middle = ranks.sort().values[[(len(ranks) - 1) // 2, len(ranks) // 2]]
        return cls(first, fifth, tenth, median_rank=floor(int(middle.sum()) / 2), queries=len(ranks))


@dataclass(frozen=True)
class Retrieval:
    """Retrieval in both directions.

    Attributes:
        image_to_text: images are the queries.
        text_to_image: captions are the queries.
    """

    image_to_text: Direction
    text_to_image: Direction

    @property
    def sum_of_recalls(self) -> float:
        """Sum of the six recalls, 0 to 600, which early stopping monitors."""
        return sum(self.image_to_text.recalls) + sum(self.text_to_image.recalls)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {**asdict(self), "sum_of_recalls": self.sum_of_recalls}


@dataclass(frozen=True)
class Ranks:
    """Ranks of all queries, from 1.

    Attributes:
        image_to_text: int64 ``[I]``, rank of the best-ranked caption of each image; 0 for an image without captions.
        text_to_image: int64 ``[C]``, rank of the image of each caption.
    """

    image_to_text: Tensor
    text_to_image: Tensor


def ranks_of(scores: Scores, images: int, image_of_caption: Tensor, *, scores_at_once: int = _SCORES_AT_ONCE) -> Ranks:
    """Rank all queries in both directions.

    The score matrix is cut into tiles: strips of images, and the captions of the images in a strip. Those in which captions meet
    their own images come first, since other scores are compared with theirs. So each score is computed once, however many there
    are, and memory holds one tile.

    Args:
        scores: see `Scores`.
        images: I.
        image_of_caption: int64 ``[C]``, row of the image that each caption belongs to.
        scores_at_once: maximum number of scores to hold; more only where the captions of a single image are more.

    Raises:
        ValueError: a caption belongs to no image.
    """
    if len(image_of_caption) and not 0 <= int(image_of_caption.min()) <= int(image_of_caption.max()) < images:
        raise ValueError(
            f"captions belong to images {int(image_of_caption.min())} to {int(image_of_caption.max())} of {images}"
        )
    owner, order = image_of_caption.sort(stable=True)  # The captions of a strip of images are adjacent.
    counts = torch.bincount(owner, minlength=images)
    strips = _strips(counts.tolist(), scores_at_once)
    image_to_text, text_to_image = (torch.zeros(size, dtype=torch.int64, device=owner.device) for size in (images, len(owner)))
    own: list[Tensor] = []  # By strip: the score of each caption with its own image.
    best: list[Tensor] = []  # By strip: the greatest of these scores of each image.

    def compare(a: int, b: int, tile: Tensor) -> None:
        rows, columns = strips[a][0], strips[b][1]
        image_to_text[rows] += (~(tile < best[a][:, None])).sum(1)
        text_to_image[columns] += (~(tile < own[b])).sum(0)  # This counts the right image too: ranks count from 1.

    for number, (rows, columns) in enumerate(strips):
        tile = scores(rows, order[columns])
        places = owner[columns] - rows.start
        own.append(tile[places, torch.arange(len(places), device=places.device)])
        # A score that is not a number loses against every other.
        worst = tile.new_full((tile.shape[0],), -torch.inf)
        best.append(worst.scatter_reduce(0, places, own[number].nan_to_num(nan=-torch.inf), "amax"))
        compare(number, number, tile)
        # The captions of an image do not count against each other.
        image_to_text[rows] -= torch.zeros_like(worst, dtype=torch.int64).index_add(
            0, places, (~(own[number] < best[number][places])).long()
        )
    for a, b in permutations(range(len(strips)), 2):
        compare(a, b, scores(strips[a][0], order[strips[b][1]]))
    return Ranks(
        image_to_text=(image_to_text + 1) * (counts > 0),
        text_to_image=torch.empty_like(text_to_image).index_copy(0, order, text_to_image),
    )


def _strips(captions: Sequence[int], scores_at_once: int) -> list[tuple[slice, slice]]:
    """Cut images into strips, and return for each its images and its captions, as slices.

    Args:
        captions: number of captions of each image.
        scores_at_once: maximum number of scores of a strip's images with another's captions, if possible.
    """
    side = isqrt(scores_at_once) if len(captions) * sum(captions) > scores_at_once else max(len(captions), sum(captions))
    strips, image, caption, held = [], 0, 0, 0
    for number, count in enumerate(captions):
        if number > image and (number - image == side or held + count > side):
            strips.append((slice(image, number), slice(caption, caption + held)))
            image, caption, held = number, caption + held, 0
        held += count
    return [*strips, (slice(image, len(captions)), slice(caption, caption + held))] if captions else []


def retrieval(scores: Scores, images: int, image_of_caption: Tensor, *, scores_at_once: int = _SCORES_AT_ONCE) -> Retrieval:
    """Measure recall and median rank in both directions; arguments as in `ranks_of`.

    An image without captions is not a query, but it is a candidate for captions.
    """
    ranks = ranks_of(scores, images, image_of_caption, scores_at_once=scores_at_once)
    return Retrieval(
        image_to_text=Direction.of(ranks.image_to_text[ranks.image_to_text > 0]),
        text_to_image=Direction.of(ranks.text_to_image),
    )


def chance_recall(cutoff: int, right: int, items: int) -> float:
    """Return the recall, in percent, at a cutoff in a random order of items of which ``right`` are right (hypergeometric).

    >>> chance_recall(10, 1, 1000)
    1.0
    """
    return 100 * (1 - comb(items - right, cutoff) / comb(items, cutoff)) if cutoff < items else 100.0

"""Recall and median rank of image-sentence retrieval, in both directions.

Letters: ``I`` images, ``C`` captions, ``E`` embedding width, ``K`` captions of one image.

A rank is the number of wrong items before the right one, plus one. Equal scores count against the model: a wrong item with the
same score comes before the right one, so that a model with equal scores for everything ranks last rather than, by the order of the
rows, first. A score that is not a number counts in the same way.

Image to text: an image has one or more captions, of which the best-ranked counts, as in Karpathy and Fei-Fei 2015 and later work;
the others are neither right nor wrong. Text to image: each caption is a query of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import comb, floor

import torch
from torch import Tensor

__all__ = ["CUTOFFS", "Direction", "Ranks", "Retrieval", "Similarity", "chance_recall", "ranks_of", "retrieval"]

Similarity = Callable[[Tensor, Tensor], Tensor]
"""From embeddings of images ``[I, E]`` and captions ``[C, E]`` to scores ``[I, C]``; a higher score means more alike."""

CUTOFFS = (1, 5, 10)

_SCORES_AT_ONCE = 1 << 26  # 256 MiB in float32


@dataclass(frozen=True)
class Direction:
    """How well queries of one modality find items of the other.

    Attributes:
        recall_at_1: share of queries whose right item has rank 1, in percent.
        recall_at_5: likewise, up to rank 5.
        recall_at_10: likewise, up to rank 10.
        median_rank: median of the ranks; for an even number of queries, the mean of the middle two, rounded down as in the
            published code of Kiros et al. 2015, Vendrov et al. 2016 and Faghri et al. 2018.
        queries: number of queries.
    """

    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    median_rank: int
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


def ranks_of(
    similarity: Similarity, images: Tensor, captions: Tensor, image_of_caption: Tensor, *, scores_at_once: int = _SCORES_AT_ONCE
) -> Ranks:
    """Rank all queries in both directions.

    Memory holds the embeddings and a strip of at most ``scores_at_once`` scores, but at least one row of ``C``. If all scores fit,
    each is computed once, otherwise twice: the score of a caption with its own image must be known before others are compared with
    it, and only the very same product gives the very same digits.

    Args:
        similarity: see `Similarity`; must return the same result for the same arguments.
        images: ``[I, E]``.
        captions: ``[C, E]``.
        image_of_caption: int64 ``[C]``, row in ``images`` that each caption belongs to.
        scores_at_once: maximum number of scores to hold.

    Raises:
        ValueError: the rows do not match.
    """
    if image_of_caption.shape != captions.shape[:1]:
        raise ValueError(f"{len(captions)} captions but {len(image_of_caption)} images of captions")
    if len(captions) and not 0 <= int(image_of_caption.min()) <= int(image_of_caption.max()) < len(images):
        raise ValueError(
            f"captions belong to images {int(image_of_caption.min())} to {int(image_of_caption.max())} of {len(images)}"
        )
    owner, order = image_of_caption.sort(stable=True)  # The captions of a strip of images are adjacent.
    strips = _Strips(similarity, images, captions[order], scores_at_once)
    own = _own_scores(strips, owner)
    # A score that is not a number loses against every other.
    best = own.new_full((len(images),), -torch.inf).scatter_reduce(0, owner, own.nan_to_num(nan=-torch.inf), "amax")
    image_to_text = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    text_to_image = torch.zeros(len(captions), dtype=torch.int64, device=images.device)
    for rows, scores in strips:
        image_to_text[rows] = (~(scores < best[rows, None])).sum(1)
        text_to_image += (~(scores < own)).sum(0)  # This counts the right image too: ranks count from 1.
    own_before = torch.zeros_like(image_to_text).index_add(0, owner, (~(own < best[owner])).long())
    has_caption = torch.zeros_like(image_to_text).index_fill(0, owner, 1)
    return Ranks(
        image_to_text=(image_to_text - own_before + 1) * has_caption,
        text_to_image=torch.empty_like(text_to_image).index_copy(0, order, text_to_image),
    )


def retrieval(
    similarity: Similarity, images: Tensor, captions: Tensor, image_of_caption: Tensor, *, scores_at_once: int = _SCORES_AT_ONCE
) -> Retrieval:
    """Measure recall and median rank in both directions; arguments as in `ranks_of`.

    An image without captions is not a query, but it is a candidate for captions.
    """
    ranks = ranks_of(similarity, images, captions, image_of_caption, scores_at_once=scores_at_once)
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


@dataclass(frozen=True)
class _Strips:
    """The score matrix in strips of images, computed again in each pass unless it is a single strip."""

    similarity: Similarity
    images: Tensor
    captions: Tensor
    scores_at_once: int

    @cached_property
    def _whole(self) -> Tensor:
        return self.similarity(self.images, self.captions)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        if len(self.images) * len(self.captions) <= self.scores_at_once:
            yield slice(0, len(self.images)), self._whole
            return
        height = max(1, self.scores_at_once // len(self.captions))
        for start in range(0, len(self.images), height):
            rows = slice(start, min(start + height, len(self.images)))
            yield rows, self.similarity(self.images[rows], self.captions)


def _own_scores(strips: _Strips, owner: Tensor) -> Tensor:
    """Return the score ``[C]`` of each caption with its own image; ``owner`` is ascending."""
    parts = []
    for rows, scores in strips:
        first, last = torch.searchsorted(owner, torch.tensor([rows.start, rows.stop], device=owner.device)).tolist()
        columns = torch.arange(first, last, device=owner.device)
        parts.append(scores[owner[first:last] - rows.start, columns])
    return torch.cat(parts) if parts else owner.new_zeros(0, dtype=torch.float32)

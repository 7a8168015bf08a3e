"""Recall and median rank of image-sentence retrieval, in both directions.

Letters: ``I`` images, ``C`` captions, ``E`` embedding width, ``K`` captions of one image.

A rank is the number of wrong items that come before the right one, plus one. Equal scores count against the model: a
wrong item with the same score comes before the right one, so that a model that scores everything alike ranks last and not,
by the order of the rows, first. A score that is not a number counts in the same way.

Image to text: an image has one or several captions, and the best-ranked of them counts, as in Karpathy and Fei-Fei 2015 and
all that follow; the others are neither right nor wrong. Text to image: each caption is a query of its own.
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
"""Embeddings of images ``[I, E]`` and captions ``[C, E]`` to scores ``[I, C]``; larger is nearer."""

CUTOFFS = (1, 5, 10)

_SCORES_AT_ONCE = 1 << 26  # 256 MiB in float32


@dataclass(frozen=True)
class Direction:
    """How well queries of one modality find items of the other.

    Attributes:
        recall_at_1: queries whose right item has rank 1, percent.
        recall_at_5: likewise, up to rank 5.
        recall_at_10: likewise, up to rank 10.
        median_rank: median of the ranks; of an even number of queries the mean of the two in the middle, rounded down, as the
            published code of Kiros et al. 2015, Vendrov et al. 2016 and Faghri et al. 2018 does.
        queries: number of queries.
    """

    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    median_rank: int
    queries: int

    @property
    def recalls(self) -> tuple[float, float, float]:
        """R@1, R@5 and R@10, percent."""
        return self.recall_at_1, self.recall_at_5, self.recall_at_10

    @classmethod
    def of(cls, ranks: Tensor) -> Direction:
        """Sums up ranks ``[queries]``, which count from 1.

        Raises:
            ValueError: there is no query.
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
        """The six recalls added up, 0 to 600: what early stopping looks at."""
        return sum(self.image_to_text.recalls) + sum(self.text_to_image.recalls)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {**asdict(self), "sum_of_recalls": self.sum_of_recalls}


@dataclass(frozen=True)
class Ranks:
    """Ranks of all queries, from 1.

    Attributes:
        image_to_text: ``[I]`` int64; rank of the best-ranked caption of each image, 0 for an image without captions.
        text_to_image: ``[C]`` int64; rank of the image of each caption.
    """

    image_to_text: Tensor
    text_to_image: Tensor


def ranks_of(
    similarity: Similarity, images: Tensor, captions: Tensor, image_of_caption: Tensor, *, scores_at_once: int = _SCORES_AT_ONCE
) -> Ranks:
    """Ranks of all queries in both directions.

    Memory holds the embeddings and a strip of at most ``scores_at_once`` scores, but at least one row of ``C``. Where all scores
    fit, each is computed once, else twice: the score of a caption's own image has to be known before others can be compared
    with it, and only the very same product gives the very same digits.

    Args:
        similarity: see ``Similarity``; must give the same result for the same arguments.
        images: ``[I, E]``.
        captions: ``[C, E]``.
        image_of_caption: ``[C]`` int64; row of ``images`` that each caption belongs to.
        scores_at_once: most scores that are held.

    Raises:
        ValueError: the rows do not fit together.
    """
    if image_of_caption.shape != captions.shape[:1]:
        raise ValueError(f"{len(captions)} captions but {len(image_of_caption)} images of captions")
    if len(captions) and not 0 <= int(image_of_caption.min()) <= int(image_of_caption.max()) < len(images):
        raise ValueError(
            f"captions belong to images {int(image_of_caption.min())} to {int(image_of_caption.max())} of {len(images)}"
        )
    owner, order = image_of_caption.sort(stable=True)  # The captions of a strip of images lie together.
    strips = _Strips(similarity, images, captions[order], scores_at_once)
    own = _own_scores(strips, owner)
    # A score that is no number loses against every other.
    best = own.new_full((len(images),), -torch.inf).scatter_reduce(0, owner, own.nan_to_num(nan=-torch.inf), "amax")
    image_to_text = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    text_to_image = torch.zeros(len(captions), dtype=torch.int64, device=images.device)
    for rows, scores in strips:
        image_to_text[rows] = (~(scores < best[rows, None])).sum(1)
        text_to_image += (~(scores < own)).sum(0)  # The right image is counted too: ranks count from 1.
    own_before = torch.zeros_like(image_to_text).index_add(0, owner, (~(own < best[owner])).long())
    has_caption = torch.zeros_like(image_to_text).index_fill(0, owner, 1)
    return Ranks(
        image_to_text=(image_to_text - own_before + 1) * has_caption,
        text_to_image=torch.empty_like(text_to_image).index_copy(0, order, text_to_image),
    )


def retrieval(
    similarity: Similarity, images: Tensor, captions: Tensor, image_of_caption: Tensor, *, scores_at_once: int = _SCORES_AT_ONCE
) -> Retrieval:
    """Recall and median rank in both directions; arguments as of ``ranks_of``.

    An image without captions is no query, but it is among the items that a caption may find.
    """
    ranks = ranks_of(similarity, images, captions, image_of_caption, scores_at_once=scores_at_once)
    return Retrieval(
        image_to_text=Direction.of(ranks.image_to_text[ranks.image_to_text > 0]),
        text_to_image=Direction.of(ranks.text_to_image),
    )


def chance_recall(cutoff: int, right: int, items: int) -> float:
    """Recall at a cutoff, percent, of a random order of items of which ``right`` are right (hypergeometric).

    >>> chance_recall(10, 1, 1000)
    1.0
    """
    return 100 * (1 - comb(items - right, cutoff) / comb(items, cutoff)) if cutoff < items else 100.0


@dataclass(frozen=True)
class _Strips:
    """The score matrix by strips of images; computed anew at each pass, unless it is one strip."""

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
    """Score ``[C]`` of each caption with its own image; ``owner`` ascends."""
    found = []
    for rows, scores in strips:
        first, last = torch.searchsorted(owner, torch.tensor([rows.start, rows.stop], device=owner.device)).tolist()
        columns = torch.arange(first, last, device=owner.device)
        found.append(scores[owner[first:last] - rows.start, columns])
    return torch.cat(found) if found else owner.new_zeros(0, dtype=torch.float32)

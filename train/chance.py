"""Scores of a random ranking, printed beside measured ones; names of scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, sqrt
from statistics import fmean
from typing import Any

CUTOFFS = (1, 5, 10)
"""K of R@K."""

DIRECTIONS = ("image_to_text", "text_to_image")
"""Directions of image-sentence retrieval; the first word names the queries."""

RECALLS = tuple(f"recall_at_{cutoff}" for cutoff in CUTOFFS)
"""Names of the recalls."""


@cache
def chance_recall(cutoff: int, right: int, items: int) -> float:
    """Return the recall in percent at a cutoff in a random order (hypergeometric).

    >>> chance_recall(10, 1, 1000)
    1.0
    """
    return 100 * (1 - comb(items - right, cutoff) / comb(items, cutoff)) if cutoff < items else 100.0


def chance_recalls(right: Sequence[int], items: int) -> tuple[float, ...]:
    """Return recalls of a random order, from the right items of each query."""
    return tuple(fmean(chance_recall(cutoff, count, items) for count in right) for cutoff in CUTOFFS)


@dataclass(frozen=True)
class Chance:
    """Recalls of a random ranking: R@1, R@5 and R@10 in percent.

    Attributes:
        images: number of images of the gallery.
    """

    image_to_text: tuple[float, ...]
    text_to_image: tuple[float, ...]
    images: int

    @property
    def sum_of_recalls(self) -> float:
        """Sum of the six recalls."""
        return sum(self.image_to_text) + sum(self.text_to_image)

    @property
    def standard_error(self) -> float:
        """Upper bound of the standard error of the sum of recalls.

        All queries of an image count as one draw, in both directions, as if they hit and missed together.
        """
        errors = 0.0
        for recalls in (self.image_to_text, self.text_to_image):
            first, fifth, tenth = (recall / 100 for recall in recalls)
            # Of the number of hits at the three cutoffs: a hit at rank 1 is also one at the others.
            errors += 100 * sqrt(max(0.0, 5 * first + 3 * fifth + tenth - (first + fifth + tenth) ** 2) / self.images)
        return errors

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON, with the keys of retrieval metrics."""
        recalls = {name: dict(zip(RECALLS, getattr(self, name), strict=True)) for name in DIRECTIONS}
        return {"images": self.images, **recalls, "sum_of_recalls": self.sum_of_recalls}


def is_above_chance(score: float, chances: Collection[Chance]) -> bool:
    """Return whether a sum over languages exceeds chance by two standard errors."""
    return score > sum(chance.sum_of_recalls + 2 * chance.standard_error for chance in chances)

"""Scores of a random ranking, printed beside measured ones; names of scores."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, sqrt
from typing import Any

CUTOFFS = (1, 5, 10)
"""K of R@K."""

DIRECTIONS = ("image_to_text", "text_to_image")
"""Directions of image-sentence retrieval; the first word names the queries."""

RECALLS = tuple(f"recall_at_{cutoff}" for cutoff in CUTOFFS)
"""Names of the recalls."""

MEASURES = (*RECALLS, "median_rank")
"""Names of the recalls and of the median rank."""


@cache
def chance_recall(cutoff: int, right: int, items: int) -> float:
    """Return the recall in percent at a cutoff in a random order (hypergeometric).

    >>> chance_recall(10, 1, 1000)
    1.0
    """
    few, many = sorted((min(cutoff, items), right))  # Both ways give the same ratio, this one of smaller numbers.
    return 100 * (comb(items, few) - comb(items - many, few)) / comb(items, few)


def chance_measures(right: Sequence[int], items: int) -> tuple[float, ...]:
    """Return `MEASURES` of a random order, from the correct items of each query.

    The median rank is the least rank within which half of the correct items are expected.

    >>> chance_measures([1, 1], 1000)
    (0.1, 0.5, 1.0, 500)
    """
    counts = Counter(right)

    def recall(cutoff: int) -> float:
        return sum(number * chance_recall(cutoff, count, items) for count, number in counts.items()) / len(right)

    return *map(recall, CUTOFFS), bisect_left(range(items), 50.0, lo=1, key=recall)


@dataclass(frozen=True)
class Chance:
    """Scores of a random ranking: R@1, R@5 and R@10 in percent, and the median rank.

    Attributes:
        images: number of images of the gallery.
    """

    image_to_text: tuple[float, ...]
    text_to_image: tuple[float, ...]
    images: int

    @property
    def sum_of_recalls(self) -> float:
        """Sum of the six recalls."""
        return sum(self.image_to_text[:3]) + sum(self.text_to_image[:3])

    @property
    def standard_error(self) -> float:
        """Upper bound of the standard error of the sum of recalls.

        All queries of an image count as one draw, in both directions, as if they hit and missed together.
        """
        errors = 0.0
        for recalls in (self.image_to_text, self.text_to_image):
            first, fifth, tenth = (recall / 100 for recall in recalls[:3])
            # Variance of the sum of hits at the three cutoffs: a hit at rank 1 is also one at the others.
            errors += 100 * sqrt(max(0.0, 5 * first + 3 * fifth + tenth - (first + fifth + tenth) ** 2) / self.images)
        return errors

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON, with the keys of retrieval metrics."""
        scores = {name: dict(zip(MEASURES, getattr(self, name), strict=True)) for name in DIRECTIONS}
        return {"images": self.images, **scores, "sum_of_recalls": self.sum_of_recalls}


def is_above_chance(score: float, chances: Collection[Chance]) -> bool:
    """Return whether a sum over languages exceeds chance by two standard errors."""
    return score > sum(chance.sum_of_recalls + 2 * chance.standard_error for chance in chances)

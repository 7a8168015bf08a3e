"""Averages of scores over languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from train.evaluation.scoring import Score


@dataclass(frozen=True)
class Average:
    """Recalls as means over languages.

    Attributes:
        split: split of the captions.
        portion: portion of the captions.
        languages: the languages.
        image_to_text: means of R@1, R@5 and R@10, in percent.
        text_to_image: likewise.
    """

    split: str
    portion: str
    languages: tuple[str, ...]
    image_to_text: tuple[float, ...]
    text_to_image: tuple[float, ...]

    @property
    def mean_recall(self) -> float:
        """Mean of the six recalls, 0 to 100, which papers call mR."""
        return mean(self.image_to_text + self.text_to_image)

    @property
    def sum_of_recalls(self) -> float:
        """Sum of the six recalls, 0 to 600: the mean of those of the languages."""
        return sum(self.image_to_text + self.text_to_image)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {**lists, "mean_recall": self.mean_recall, "sum_of_recalls": self.sum_of_recalls}


def averages(scores: Sequence[Score]) -> list[Average]:
    """Return averages over the languages of each split and portion that has several."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.split, score.portion), []).append(score)
    return [
        Average(
            split=split,
            portion=portion,
            languages=tuple(score.language for score in group),
            image_to_text=_mean_recalls([score.retrieval.image_to_text.recalls for score in group]),
            text_to_image=_mean_recalls([score.retrieval.text_to_image.recalls for score in group]),
        )
        for (split, portion), group in groups.items()
        if len(group) > 1
    ]


def evaluation_report(scores: Sequence[Score]) -> dict[str, Any]:
    """Return scores and their averages as plain values, for JSON."""
    return {
        "scores": [score.to_dict() for score in scores],
        "averages": [average.to_dict() for average in averages(scores)],
    }


def _mean_recalls(recalls: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(mean, zip(*recalls, strict=True)))

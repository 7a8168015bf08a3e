"""What extraction aims at on each class of processor, and whether a row of rates reaches it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["ONE_IMAGE_SECONDS", "REGIONS", "Aim", "Verdict", "aims_of", "floor", "verdicts"]

REGIONS = "faster-rcnn-36"
"""The extractor whose yardstick is no single network."""

_FLOORS = {entry["name"]: entry["ratio"] for entry in json.loads(Path(__file__).with_name("floors.json").read_text("utf-8"))}


def floor(name: str) -> float:
    """Return the bound of a figure that must not get worse, from ``floors.json``, the only place that lists them."""
    return _FLOORS[name]


ONE_IMAGE_SECONDS = floor("one image")
"""At most this many seconds for the command over a single image."""

_BF16_CLASSES = ("AVX-512 with bf16", "AMX")  # Elsewhere torch computes bfloat16 in software.


class Aim(NamedTuple):
    """A rate that is to be at least so many times another one.

    Attributes:
        column: of imagepivot.
        yardstick: column of the other rate.
        ratio: least ratio.
    """

    column: str
    yardstick: str
    ratio: float


class Verdict(NamedTuple):
    """Whether an aim is met.

    Attributes:
        aim: in words.
        bound: the number that is to be reached.
        reached: the number; None if something was not measured.
        is_met: whether it is on the right side of the bound; None likewise.
    """

    aim: str
    bound: float
    reached: float | None = None
    is_met: bool | None = None

    @property
    def cell(self) -> str:
        """Number, bound and verdict, for a table; empty if something was not measured."""
        return "" if self.reached is None else f"{self.reached:.2f} of {self.bound}: {self.word}"

    @property
    def word(self) -> str:
        """The verdict."""
        return {True: "met", False: "missed", None: "not measured"}[self.is_met]

    def __str__(self) -> str:
        return f"{self.aim}: {self.word}" + ("" if self.reached is None else f" with {self.reached:.2f}")


def aims_of(extractor: str, processor: str, precision: str) -> tuple[Aim, ...]:
    """Return the aims of a row; none in bf16 on a class of processors that has no instructions for it.

    Args:
        extractor: its name.
        processor: one of `processor.CLASSES`, or another name.
        precision: ``fp32`` or ``bf16``.
    """
    if precision == "fp32":
        if extractor == REGIONS:
            return (Aim("imagepivot", "baseline", floor("regions, fp32")),)
        compiled = Aim("imagepivot, --compile", "baseline", floor("extraction, fp32, --compile"))
        return Aim("imagepivot", "baseline", floor("extraction, fp32")), compiled
    if processor not in _BF16_CLASSES:
        return ()
    # Of regions there is no folded model; the yardstick computes in fp32.
    if extractor == REGIONS:
        return (Aim("imagepivot", "baseline", floor("regions, bf16")),)
    return (Aim("imagepivot", "folded", floor("extraction, bf16")),)


def verdicts(aims: tuple[Aim, ...], rates: Mapping[str, float], one_image: float | None) -> list[Verdict]:
    """Judge a row.

    Args:
        aims: from `aims_of`.
        rates: images per second by column, as far as they were measured.
        one_image: seconds of the command over one image by the clock; None if they were not measured.
    """
    found = []
    for column, yardstick, ratio in aims:
        aim = f"{column} at least {ratio} of {yardstick}"
        if column in rates and yardstick in rates:
            reached = rates[column] / rates[yardstick]
            found.append(Verdict(aim, ratio, reached, reached >= ratio))
        else:
            found.append(Verdict(aim, ratio))
    aim = f"one image in at most {ONE_IMAGE_SECONDS} s"
    is_met = None if one_image is None else one_image <= ONE_IMAGE_SECONDS
    return [*found, Verdict(aim, ONE_IMAGE_SECONDS, one_image, is_met)]

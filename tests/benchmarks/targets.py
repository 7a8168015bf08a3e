"""Targets of extraction for each class of processors, and verdicts on measured rates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

REGIONS = "faster-rcnn-36"
"""The extractor whose baseline is no single network."""

_FLOORS = {entry["name"]: entry["ratio"] for entry in json.loads(Path(__file__).with_name("floors.json").read_text("utf-8"))}
_BF16_CLASSES = ("AVX-512 with bf16", "AMX")  # Elsewhere torch computes bfloat16 in software.


def floor(name: str) -> float:
    """Return the bound of a figure that must not get worse, from ``floors.json``, the only place that lists them."""
    return _FLOORS[name]


class Target(NamedTuple):
    """A least ratio of two columns of the speed table."""

    column: str
    baseline: str
    ratio: float


class Verdict(NamedTuple):
    """A bound, the number that was measured (None: not measured), and whether it meets the bound."""

    target: str
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
        return f"{self.target}: {self.word}" + ("" if self.reached is None else f" with {self.reached:.2f}")


def targets_of(extractor: str, processor: str, precision: str) -> tuple[Target, ...]:
    """Return the targets of a row; none in bf16 on a class of processors (`processor.CLASSES`) without instructions for it."""
    if precision == "bf16" and processor not in _BF16_CLASSES:
        return ()
    if extractor == REGIONS:  # In bf16, too, the baseline computes in fp32: of regions there is no folded model.
        return (Target("imagepivot", "baseline", floor(f"regions, {precision}")),)
    if precision == "bf16":
        return (Target("imagepivot", "folded", floor("extraction, bf16")),)
    compiled = Target("imagepivot, --compile", "baseline", floor("extraction, fp32, --compile"))
    return Target("imagepivot", "baseline", floor("extraction, fp32")), compiled


def verdicts(targets: tuple[Target, ...], rates: Mapping[str, float], one_image: float | None) -> list[Verdict]:
    """Judge a row.

    Args:
        targets: from `targets_of`.
        rates: images per second by column, as far as they were measured.
        one_image: seconds of the command over one image by the clock; None if they were not measured.
    """
    result = []
    for column, baseline, ratio in targets:
        reached = rates[column] / rates[baseline] if column in rates and baseline in rates else None
        is_met = None if reached is None else reached >= ratio
        result.append(Verdict(f"{column} at least {ratio} of {baseline}", ratio, reached, is_met))
    seconds = floor("one image")
    is_met = None if one_image is None else one_image <= seconds
    return [*result, Verdict(f"one image in at most {seconds} s", seconds, one_image, is_met)]

"""What a user chooses about regions, besides weights, device and precision. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.errors import UsageError

__all__ = ["BACKENDS", "MAX_REGIONS", "RegionOptions"]

BACKENDS = ("torchvision", "detectron2")
MAX_REGIONS = 300
"""The detector proposes at most this many boxes an image."""


@dataclass(frozen=True)
class RegionOptions:
    """Which regions of an image are kept, what their classes are called, and what computes them.

    The defaults are the fixed 36 of bottom-up attention; its adaptive set has 10 to 100.

    Attributes:
        min_regions: an image has at least this many, the best by score where too few reach the threshold.
        max_regions: and at most this many.
        score_threshold: regions whose best surviving class has at least this score are kept.
        class_names: text file with the names of the classes, one a line, for people who look at the dataset; None for none.
        attribute_names: likewise, of the attributes.
        backend: ``torchvision`` (nothing to compile) or ``detectron2`` (where that is installed).

    Raises:
        UsageError: a value is out of range.
    """

    min_regions: int = 36
    max_regions: int = 36
    score_threshold: float = 0.2
    class_names: str | None = None
    attribute_names: str | None = None
    backend: str = "torchvision"

    def __post_init__(self) -> None:
        if not 1 <= self.min_regions <= self.max_regions <= MAX_REGIONS:
            raise UsageError(
                f"--min-regions is {self.min_regions} and --max-regions {self.max_regions}, expected "
                f"1 <= min <= max <= {MAX_REGIONS}, the proposals of an image"
            )
        if not 0 <= self.score_threshold <= 1:
            raise UsageError(f"--score-threshold is {self.score_threshold}, expected a probability from 0 to 1")
        if self.backend not in BACKENDS:
            raise UsageError(f"--backend is {self.backend!r}, expected one of {', '.join(BACKENDS)}")

    @property
    def count(self) -> str:
        """How many regions an image has, for names: ``36``, or ``10-100``."""
        return str(self.max_regions) if self.min_regions == self.max_regions else f"{self.min_regions}-{self.max_regions}"

    def parameters(self) -> dict[str, Any]:
        """What of this decides the values, as JSON values: the names of the classes do not."""
        return {"min": self.min_regions, "max": self.max_regions, "score_threshold": self.score_threshold}

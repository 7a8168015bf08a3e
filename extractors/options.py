"""Options of an extractor except weights and device; importing loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from extractors.images.decoding import DECODING
from schemas.errors import UsageError
from schemas.features import FeatureSpec
from schemas.options import Opt, Options

if TYPE_CHECKING:
    from extractors.weights.resolve import Weights


_REGIONS = "Regions"
MAX_REGIONS = 300
"""Maximum number of boxes that the detector proposes per image."""


@dataclass(frozen=True, repr=False)
class RegionOptions(Options):
    """Selection of regions, names of their classes, and backend.

    The defaults give the fixed 36 regions of bottom-up attention; its adaptive set has 10 to 100.

    Raises:
        UsageError: a value is out of range.

    Examples:
        >>> adaptive = imagepivot.RegionOptions(min_regions=10, max_regions=100)
        >>> request = imagepivot.ExtractorRequest("faster-rcnn-36", weights="random:0", regions=adaptive)
    """

    min_regions: Annotated[int, Opt("Store at least this many regions per image. Default: 36.", panel=_REGIONS)] = 36
    max_regions: Annotated[int, Opt("Store at most this many regions per image. Default: 36.", panel=_REGIONS)] = 36
    score_threshold: Annotated[
        float,
        Opt("Between these bounds, keep regions of at least this score. Default: 0.2.", panel=_REGIONS),
    ] = 0.2
    class_names: Annotated[
        str | None,
        Opt("Store class names, e.g. of objects_vocab.txt.", panel=_REGIONS),
    ] = None
    attribute_names: Annotated[
        str | None, Opt("Store attribute names from this file, e.g. attributes_vocab.txt.", panel=_REGIONS)
    ] = None
    backend: Annotated[
        Literal["torchvision", "detectron2"],
        Opt("Compute regions with torchvision or detectron2. Default: torchvision.", panel=_REGIONS),
    ] = "torchvision"

    def _check(self) -> None:
        if not 1 <= self.min_regions <= self.max_regions <= MAX_REGIONS:
            raise UsageError(
                f"--min-regions is {self.min_regions} and --max-regions {self.max_regions}, expected "
                f"1 <= min <= max <= {MAX_REGIONS}, the number of proposals per image"
            )
        if not 0 <= self.score_threshold <= 1:
            raise UsageError(f"--score-threshold is {self.score_threshold}, expected a probability from 0 to 1")

    @property
    def count(self) -> str:
        """Number of regions per image for names: ``36``, or ``10-100``."""
        return str(self.max_regions) if self.min_regions == self.max_regions else f"{self.min_regions}-{self.max_regions}"

    def parameters(self) -> dict[str, Any]:
        """Return the options that determine the features, as JSON values."""
        return {"min": self.min_regions, "max": self.max_regions, "score_threshold": self.score_threshold}


@dataclass(frozen=True)
class ExtractorOptions:
    """Options of an extractor except weights and device, see `ExtractorRequest`.

    Attributes:
        spec: from `ExtractorRequest.spec`; takes ``unpooled`` and ``keep_crops`` into account.
    """

    spec: FeatureSpec
    precision: str = "fp32"
    compile: bool = False
    regions: RegionOptions = field(default_factory=RegionOptions)
    unpooled: bool = False
    keep_crops: bool = False

    def parameters(self, weights: Weights, **more: Any) -> dict[str, Any]:
        """Return the parameters of a `Description`: common ones and ``more``."""
        compiled = {"compiled": True} if self.compile else {}
        stored = {} if self.spec.dtype == "float32" else {"dtype": self.spec.dtype}
        common = {"name": self.spec.name, "decoding": DECODING, **weights.parameters(), "precision": self.precision}
        return common | compiled | stored | more

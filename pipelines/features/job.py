"""What ``imagepivot features`` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

import extractors
from extractors.settings import RegionOptions
from pipelines.inputs.images import ImageSource
from schemas.errors import UsageError
from schemas.keys import DEFAULT_SHARDS, check_shards

__all__ = ["FeaturesJob"]

_LIBRARIES = ("apache-beam", "pillow", "torch", "torchvision")


@dataclass(frozen=True)
class FeaturesJob:
    """What ``imagepivot features`` does.

    Attributes:
        images: the images.
        output: folder of the dataset.
        extractor: name of the extractor.
        weights: ``default``, a file, or ``random:SEED``.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        compile: whether a GPU runs a compiled model.
        regions: which regions to keep, of an extractor that makes some, and what they are called; its defaults when None.
        batch_size: images that the model takes at once; changes speed and memory, not the features. None: the extractor's own
            number.
        shards: number of shards.
        overwrite: replace a dataset of another fingerprint.
        update: add the images that are new in the source to a dataset that is there.
        retry_failed: try the images again that failed before.
    """

    images: ImageSource
    output: str
    extractor: str = "resnet50-pool"
    weights: str = "default"
    device: str = "auto"
    precision: str = "fp32"
    compile: bool = False
    regions: RegionOptions | None = None
    batch_size: int | None = None
    shards: int = DEFAULT_SHARDS
    overwrite: bool = False
    update: bool = False
    retry_failed: bool = False

    def __post_init__(self) -> None:
        check_shards(self.shards)
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"--batch-size is {self.batch_size}, expected 1 or more")
        if self.overwrite and (self.update or self.retry_failed):
            raise UsageError(
                "--overwrite makes a dataset again, --update and --retry-failed keep what is there: give one of them"
            )

    def describe(self) -> extractors.Description:
        """What the extractor makes; it is not loaded."""
        return extractors.describe(
            self.extractor, weights=self.weights, precision=self.precision, compile=self.compile, regions=self.regions
        )

    def load(self, device: str | None = None) -> extractors.Extractor:
        """Loads the extractor, on another device if one is named."""
        return extractors.load(
            self.extractor,
            weights=self.weights,
            device=device or self.device,
            precision=self.precision,
            compile=self.compile,
            regions=self.regions,
        )

    def check_device(self) -> None:
        """Raise `UsageError` where this machine lacks the device, or the device does not do what is asked of it."""
        from extractors.computing.devices import check_request

        check_request(self.device, self.precision, compile=self.compile)

    def libraries(self) -> tuple[str, ...]:
        """Distributions whose versions matter to the features."""
        backend = self.regions.backend if self.regions is not None else ""
        origin = {self.extractor.partition(":")[0], backend}
        return (*_LIBRARIES, *(name for name in ("timm", "detectron2") if name in origin))

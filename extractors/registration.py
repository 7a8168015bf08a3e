"""Extractors of users, registered in the catalogue without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from extractors.base import Description, Extractor, sample_image
from extractors.catalogue import ENTRIES, Entry
from schemas.errors import UsageError
from schemas.features import FeatureSpec

if TYPE_CHECKING:
    import torch

    from extractors.options import ExtractorOptions
    from extractors.weights.resolve import Weights

ExtractorBuilder: TypeAlias = "Callable[[Description, torch.device], Extractor]"
"""Function from a description and a device to an extractor; usually its class."""


@dataclass(frozen=True)
class RegisteredExtractor:
    """The `ExtractorModule` of a registered extractor; picklable if its builder is."""

    spec: FeatureSpec
    build: ExtractorBuilder
    version: str
    batch_size: int = 16

    def register(self) -> None:
        """Add the extractor to this process's catalogue, or replace its version."""
        ENTRIES[self.spec.name] = Entry(self.spec, module=self, weights=f"none, its code has version {self.version!r}")

    def find_weights(self, spec: FeatureSpec, request: str) -> Weights:
        """Return no weights, see `extractors.catalogue.ExtractorModule`."""
        from extractors.weights.resolve import Weights

        if request != "default":
            raise UsageError(
                f"--weights is {request!r}, but the registered extractor {spec.name!r} loads its own: leave "
                "it out, and register other weights with another name or version"
            )
        return Weights(state={})

    def describe(self, settings: ExtractorOptions, weights: Weights) -> Description:
        """Describe the extractor by its version, see `ExtractorModule`."""
        if settings.precision != "fp32" or settings.compile:
            raise UsageError(
                f"the registered extractor {self.spec.name!r} chooses precision and compilation in its "
                "code: leave --precision and --compile out, or register another name"
            )
        parameters = settings.parameters(weights, version=self.version)
        del parameters["weights"]  # The version covers them.
        return Description(settings.spec, parameters, batch_size=self.batch_size)

    def load(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> Extractor:
        """Build the extractor, and check its array of one image."""
        extractor, spec = self.build(self.describe(settings, weights), device), settings.spec
        array = extractor.extract(extractor.collate([extractor.preprocess(sample_image())]))
        if array.shape != (1, *spec.shape) or array.dtype != spec.dtype:
            raise UsageError(
                f"extractor {spec.name!r} computes {array.dtype} {list(array.shape)} for one image, expected {spec.dtype} "
                f"{[1, *spec.shape]}: correct extract or the spec, and return self.spec.rounded(values)"
            )
        return extractor


def register_extractor(spec: FeatureSpec, builder: ExtractorBuilder, *, version: str, batch_size: int = 16) -> None:
    """Register an extractor under the name of its spec.

    Each program that extracts must register it. The command imports the module of ``--import``, or of an
    entry point of the group ``imagepivot.extractors``; worker processes import the module of the builder.

    Args:
        spec: name, shape and source of the feature of one image.
        builder: builds the extractor from a `Description` and a torch device; usually its class.
        version: part of the fingerprint; change it whenever code or weights change the values.
        batch_size: images per batch on a CPU.

    Raises:
        UsageError: the name belongs to another extractor or a family, or the version is empty.
    """
    entry = ENTRIES.get(spec.name)
    existing = entry.module.build if entry is not None and isinstance(entry.module, RegisteredExtractor) else entry
    places = [(getattr(value, "__module__", ""), getattr(value, "__qualname__", "")) for value in (existing, builder)]
    if not spec.name or ":" in spec.name or (entry is not None and places[0] != places[1]):
        raise UsageError(f"extractor {spec.name!r} exists already, or is no name without colons: choose another name")
    if not version or batch_size < 1:
        raise UsageError(
            f"extractor {spec.name!r} has version {version!r} and batch size {batch_size}, expected text and a positive number"
        )
    RegisteredExtractor(spec, builder, version, batch_size).register()


def registered_extractor(name: str) -> RegisteredExtractor | None:
    """Return a registered extractor, or None for those of this package."""
    entry = ENTRIES.get(name)
    return entry.module if entry is not None and isinstance(entry.module, RegisteredExtractor) else None

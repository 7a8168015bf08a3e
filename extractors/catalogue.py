"""The extractors by name. Knows their shapes without importing torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from extractors.base import Description, Extractor
from schemas.errors import UsageError
from schemas.features import FeatureSpec

__all__ = ["describe", "load", "names", "spec"]

_EXTRA = ("PIL", "numpy", "safetensors", "torch", "torchvision")


@dataclass(frozen=True)
class _Entry:
    """An extractor that can be loaded: its spec, and the module whose ``describe`` and ``load`` make it."""

    spec: FeatureSpec
    module: str


_ENTRIES = {
    entry.spec.name: entry
    for entry in (
        _Entry(
            FeatureSpec(
                name="resnet50-pool",
                shape=(2048,),
                source="Multi30K, github.com/multi30k/dataset, scripts/feature-extractor: ResNet50, global average pool",
            ),
            module="extractors.resnet50",
        ),
    )
}


def names() -> tuple[str, ...]:
    """Names of all extractors, sorted."""
    return tuple(sorted(_ENTRIES))


def spec(name: str) -> FeatureSpec:
    """Name, shape and type of the feature that an extractor makes, without loading anything.

    Raises:
        UsageError: there is no extractor of that name.
    """
    return _entry(name).spec


def describe(name: str, *, weights: str = "default", precision: str = "fp32") -> Description:
    """What `load` of the same arguments would make, without a device: for the machine that plans and does not extract.

    Args:
        name: one of `names`.
        weights: ``default``, a path or ``random:SEED``; read and hashed, so a missing file is an error here already.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``; whether a device can do it is `load`'s question.

    Raises:
        UsageError: an argument is not one of those named.
        InputError: the weights are missing, broken, or another model's.
    """
    entry = _entry(name)
    return _module(entry).describe(entry.spec, weights=weights, precision=precision)


def load(name: str, *, weights: str = "default", device: str = "cpu", precision: str = "fp32") -> Extractor:
    """Load an extractor, ready to use.

    Args:
        name: one of `names`.
        weights: ``default`` (torchvision's of that name, downloaded once and verified), the path of a ``.pth``, ``.pt`` or
            ``.safetensors`` file, or ``random:SEED`` (untrained).
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (a GPU where there is one).
        precision: ``fp32`` or ``bf16``; on a GPU also ``tf32`` and ``fp16``.

    Example:
        >>> extractor = load("resnet50-pool", weights="random:0")  # doctest: +SKIP
        >>> pixels = [extractor.preprocess(decode(data)) for data in files]  # doctest: +SKIP
        >>> extractor.extract(extractor.collate(pixels)).shape  # doctest: +SKIP
        (16, 2048)

    Raises:
        UsageError: an argument is not one of those named, or this machine lacks the device.
        InputError: the weights are missing, broken, or another model's.
    """
    entry = _entry(name)
    return _module(entry).load(entry.spec, weights=weights, device=device, precision=precision)


def _entry(name: str) -> _Entry:
    if name not in _ENTRIES:
        raise UsageError(f"there is no extractor {name!r}; choose one of {', '.join(names())}")
    return _ENTRIES[name]


def _module(entry: _Entry) -> ModuleType:
    try:
        return importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise UsageError(
            f"extractor {entry.spec.name!r} needs the package {error.name!r}, which is not installed here: "
            "pip install 'imagepivot[extractors]'"
        ) from error

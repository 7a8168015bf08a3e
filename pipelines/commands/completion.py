"""Values that a shell completes. Nothing heavy is imported for them: the shell waits."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.jobs import DEVICE, PRECISION

__all__ = ["devices", "extractor_names", "precisions", "recipes", "starting", "weights_requests"]


def extractor_names(incomplete: str) -> list[str]:
    """Complete the name of an extractor."""
    from extractors.catalogue import names

    return starting(incomplete, (*names(), "timm:", "detectron2:"))


def recipes(incomplete: str) -> list[str]:
    """Complete the name of a text recipe."""
    return starting(incomplete, ("multi30k-lc", "moses-truecase", "raw"))


def weights_requests(incomplete: str) -> list[str]:
    """Complete what stands for weights; the shell itself completes the name of a file."""
    return starting(incomplete, ("default", "random:0"))


def devices(incomplete: str) -> list[str]:
    """Complete the name of a device."""
    return starting(incomplete, DEVICE.completion)


def precisions(incomplete: str) -> list[str]:
    """Complete the name of a precision of an extractor."""
    return starting(incomplete, PRECISION.completion)


def starting(incomplete: str, values: Iterable[str]) -> list[str]:
    """Return the values that begin with what is there."""
    return [value for value in values if value.startswith(incomplete)]

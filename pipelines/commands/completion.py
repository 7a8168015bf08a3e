"""Values that a shell completes. Nothing heavy is imported for them: the shell waits."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["devices", "extractor_names", "precisions", "recipes", "weights_requests"]


def extractor_names(incomplete: str) -> list[str]:
    """Complete the name of an extractor."""
    from extractors.catalogue import names

    return _starting(incomplete, (*names(), "timm:", "detectron2:"))


def recipes(incomplete: str) -> list[str]:
    """Complete the name of a text recipe."""
    return _starting(incomplete, ("multi30k-lc", "moses-truecase", "raw"))


def weights_requests(incomplete: str) -> list[str]:
    """Complete what stands for weights; the shell itself completes the name of a file."""
    return _starting(incomplete, ("default", "random:0"))


def devices(incomplete: str) -> list[str]:
    """Complete the name of a device."""
    return _starting(incomplete, ("auto", "cpu", "cuda", "cuda:0"))


def precisions(incomplete: str) -> list[str]:
    """Complete the name of a precision of an extractor."""
    return _starting(incomplete, ("fp32", "bf16", "tf32", "fp16"))


def _starting(incomplete: str, values: Iterable[str]) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]

"""Devices and precisions of training: the requested one is used, or it is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from schemas.errors import UsageError

__all__ = ["PRECISIONS", "check_device_name", "check_precision", "check_precision_name", "computing", "resolve_device"]

PRECISIONS = ("fp32", "tf32", "bf16")


def check_device_name(device: str) -> None:
    """Check that a device has one of the known names; whether this host has it is up to `resolve_device`.

    Raises:
        UsageError: the name is unknown.
    """
    if device not in ("cpu", "auto") and not re.fullmatch(r"cuda(:[0-9]+)?", device):
        raise UsageError(f"device is {device!r}, expected 'cpu', 'cuda', 'cuda:N' or 'auto'")


def resolve_device(device: str) -> torch.device:
    """Return the device of a name.

    Args:
        device: ``cpu``; ``cuda`` (the first GPU, or this process's own under ``torchrun``); ``cuda:N``; or ``auto`` (``cuda`` if
            there is a GPU, otherwise ``cpu``).

    Raises:
        UsageError: the name is unknown, or the host has no such device.
    """
    check_device_name(device)
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    _, colon, number = device.partition(":")
    index = int(number) if colon else int(os.environ.get("LOCAL_RANK", "0"))
    if not available or index >= count:
        raise UsageError(
            f"device 'cuda:{index}' is not on this host: torch.cuda.is_available() is {available}, torch.cuda.device_count() is "
            f"{count}, torch is {torch.__version__} built for CUDA {torch.version.cuda}. Check the driver (nvidia-smi) and "
            "CUDA_VISIBLE_DEVICES, or pass --device cpu, which is many times slower"
        )
    return torch.device("cuda", index)


def check_precision_name(precision: str) -> None:
    """Check that a precision is one of `PRECISIONS`.

    Raises:
        UsageError: it is not.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")


def check_precision(precision: str, device: torch.device) -> None:
    """Check that a device can compute in a precision.

    Args:
        precision: ``fp32``; ``tf32`` (float32 whose products have 10-bit mantissas); ``bf16`` (matrix products in bfloat16;
            weights, embeddings and losses in float32).
        device: from `resolve_device`.

    Raises:
        UsageError: the precision is unknown, or this device does not have it.
    """
    check_precision_name(precision)
    if precision == "tf32" and device.type == "cpu":
        raise UsageError("precision 'tf32' needs a GPU, but the device is 'cpu': pass fp32 or bf16, or another device")


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Compute in a precision inside the block, and restore every switch of torch afterwards."""
    switches = _switches(tf32=precision == "tf32") if device.type == "cuda" else []
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in switches]
    try:
        for owner, name, value in switches:
            setattr(owner, name, value)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _switches(*, tf32: bool) -> list[tuple[Any, str, Any]]:
    """Return torch's switches as owner, attribute and value. Torch 2.9 renamed those of TF32; old and new must not be mixed."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "rnn"):
        value = "tf32" if tf32 else "ieee"
        return [(cudnn.rnn, "fp32_precision", value), (matmul, "fp32_precision", value)]
    return [(cudnn, "allow_tf32", tf32), (matmul, "allow_tf32", tf32)]

"""Devices and precisions of training: the one that was asked for is the one that is used, or it is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from schemas.errors import UsageError

__all__ = ["PRECISIONS", "check_precision", "computing", "resolve_device"]

PRECISIONS = ("fp32", "tf32", "bf16")


def resolve_device(device: str) -> torch.device:
    """Finds the device that was asked for.

    Args:
        device: ``cpu``, ``cuda`` (the first GPU, or this process's own under ``torchrun``), ``cuda:N``, or ``auto`` (``cuda`` where
            there is a GPU, else ``cpu``).

    Raises:
        UsageError: it is none of these, or the host does not have it.
    """
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    kind, colon, number = ("cuda" if device == "auto" else device).partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise UsageError(f"device is {device!r}, expected 'cpu', 'cuda', 'cuda:N' or 'auto'")
    index = int(number) if colon else int(os.environ.get("LOCAL_RANK", "0"))
    if not available or index >= count:
        raise UsageError(
            f"device 'cuda:{index}' is not on this host: torch.cuda.is_available() is {available}, torch.cuda.device_count() is "
            f"{count}, torch is {torch.__version__} built for CUDA {torch.version.cuda}. Check the driver (nvidia-smi) and "
            "CUDA_VISIBLE_DEVICES, or pass --device cpu, which is many times slower"
        )
    return torch.device("cuda", index)


def check_precision(precision: str, device: torch.device) -> None:
    """Checks that a device computes in a precision.

    Args:
        precision: ``fp32``; ``tf32`` (float32 with products of 10-bit mantissas); ``bf16`` (matrix products in bfloat16, weights,
            embeddings and losses in float32).
        device: from `resolve_device`.

    Raises:
        UsageError: it is none of these, or not one of this device's.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if precision == "tf32" and device.type == "cpu":
        raise UsageError("precision 'tf32' needs a GPU, but the device is 'cpu': pass fp32 or bf16, or another device")


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Computes in a precision inside the block. Every switch of torch is as before afterwards."""
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
    """Torch's switches as owner, attribute and value. The names of TF32's changed in torch 2.9; the two must not be mixed."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(cudnn, "rnn"):
        value = "tf32" if tf32 else "ieee"
        return [(cudnn.rnn, "fp32_precision", value), (matmul, "fp32_precision", value)]
    return [(cudnn, "allow_tf32", tf32), (matmul, "allow_tf32", tf32)]

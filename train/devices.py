"""Devices and precisions of training; an unavailable device is an error."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from schemas.process import devices


def choose_device(device: str) -> torch.device:
    """Return the device of a name.

    Args:
        device: ``cpu``; ``cuda`` (the first GPU, or this process's own under ``torchrun``); ``cuda:N``; or
            ``auto`` (``cuda``, without a GPU ``cpu``).

    Raises:
        UsageError: the name is unknown, or the host has no such device.
    """
    is_own = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return devices.resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if is_own else device)


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Compute in a precision inside the block, on a GPU as the current device."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(devices.float32_products(tf32=precision == "tf32"))
        stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"))
        yield

"""Devices and precisions of training; an unavailable device is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from schemas.errors import UsageError

PRECISIONS = ("fp32", "tf32", "bf16")


def resolve_device(device: str) -> torch.device:
    """Return the device of a name.

    Args:
        device: ``cpu``; ``cuda`` (the first GPU, or this process's own under ``torchrun``); ``cuda:N``; or ``auto`` (``cuda``,
            without a GPU ``cpu``).

    Raises:
        UsageError: the name is unknown, or the host has no such device.
    """
    if device not in ("cpu", "auto") and not re.fullmatch(r"cuda(:[0-9]+)?", device):
        raise UsageError(f"device is {device!r}, expected 'cpu', 'cuda', 'cuda:N' or 'auto'")
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    _, colon, position = device.partition(":")
    index = int(position) if colon else int(os.environ.get("LOCAL_RANK", "0"))
    if not available or index >= count:
        raise UsageError(
            f"device 'cuda:{index}' is not on this host: torch.cuda.is_available() is {available}, torch.cuda.device_count() is "
            f"{count}, torch is {torch.__version__} built for CUDA {torch.version.cuda}. Check the driver (nvidia-smi) and "
            "CUDA_VISIBLE_DEVICES, or pass --device cpu, which is many times slower"
        )
    return torch.device("cuda", index)


def check_precision(precision: str, device: torch.device) -> None:
    """Check that a device can compute in a precision.

    Args:
        precision: ``fp32``; ``tf32`` (float32 whose products have 10-bit mantissas); ``bf16`` (matrix products in bfloat16;
            weights, embeddings and losses in float32).
        device: from `resolve_device`.

    Raises:
        UsageError: the precision is unknown, or unsupported by the device.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if precision == "tf32" and device.type == "cpu":
        raise UsageError("precision 'tf32' needs a GPU, but the device is 'cpu': pass fp32 or bf16, or another device")


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device; to a GPU asynchronously, from pinned memory."""
    if device.type != "cuda" or values.device == device:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Compute in a precision inside the block, on a GPU as the current device."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(_float32_products(tf32=precision == "tf32"))
        stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"))
        yield


@contextmanager
def _float32_products(*, tf32: bool) -> Iterator[None]:
    """Switch TF32 on or off for all float32 products of cuBLAS and cuDNN.

    Torch has old and new switches. Reading an old switch that contradicts a new one is an error, e.g. in ``torch.compile``.
    Therefore both are set, the old ones first, since they set new ones, too. Switches that already contradict stay.
    """
    cudnn = torch.backends.cudnn
    new = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in new]
    old = _read_switch(lambda: cudnn.allow_tf32), _read_switch(torch.get_float32_matmul_precision)

    def switch_to(convolutions: Any, products: Any, values: Sequence[str]) -> None:
        if old[0] is not None:
            cudnn.allow_tf32 = convolutions
        if old[1] is not None:
            torch.set_float32_matmul_precision(products)
        for switch, value in zip(new, values, strict=True):
            switch.fp32_precision = value

    value = "tf32" if tf32 else "ieee"
    switch_to(tf32, "high" if tf32 else "highest", [value, value, value, "ieee"])  # The last is for CPUs.
    try:
        yield
    finally:
        switch_to(*old, before)


def _read_switch(read: Callable[[], Any]) -> Any:
    """Return the value of an old switch; None if new switches contradict it."""
    try:
        return read()
    except RuntimeError:
        return None

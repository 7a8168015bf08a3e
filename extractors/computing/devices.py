"""Devices and precisions: what is asked for is what is used, or it is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import UsageError

__all__ = [
    "PRECISIONS",
    "cast_layers",
    "check_precision",
    "check_request",
    "compiled",
    "numerics",
    "resolve_device",
    "resolve_precision",
    "upload",
]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Torch's switches apply to the whole process, and a worker may extract in several threads: what each thread inside `numerics`
# needs, and what the first of them found. All that are inside need the same.
_switching = Condition()
_inside: list[bool] = []
_found: list[tuple[Any, str, Any]] = []
_LAYER_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(device: str) -> torch.device:
    """Return the device that is asked for.

    Args:
        device: ``cpu``, ``cuda`` (the first GPU), ``cuda:N``, or ``auto`` (``cuda`` if there is a GPU, else ``cpu``).

    Raises:
        UsageError: the device is none of these, or this host does not have it.
    """
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda:0" if available else "cpu")
    if device == "cpu":
        return torch.device("cpu")
    kind, colon, number = device.partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise UsageError(f"device is {device!r}, expected 'cpu', 'cuda', 'cuda:N' or 'auto'")
    index = int(number) if colon else 0
    if not available or index >= count:
        raise UsageError(
            f"device {device!r} is not on this host: torch.cuda.is_available() is {available}, torch.cuda.device_count() is "
            f"{count}, torch is {torch.__version__} built for CUDA {torch.version.cuda}. Check the driver (nvidia-smi) and "
            "CUDA_VISIBLE_DEVICES, or pass --device cpu, which is many times slower"
        )
    return torch.device("cuda", index)


def check_precision(precision: str) -> None:
    """Raise `UsageError` unless ``precision`` is one of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")


def resolve_precision(precision: str, device: torch.device) -> str:
    """Check that a device computes in a precision, and return the precision.

    Args:
        precision: ``fp32``; ``tf32`` (float32 with products of 10-bit mantissas); ``bf16`` or ``fp16`` (convolutions and matrix
            products in 16 bits, everything else in its own type, the feature in float32).
        device: from `resolve_device`.

    Raises:
        UsageError: the precision is none of these, or the device does not compute in it.
    """
    check_precision(precision)
    if device.type == "cpu" and precision in ("tf32", "fp16"):
        raise UsageError(f"precision {precision!r} needs a GPU, but the device is 'cpu': pass fp32 or bf16, or another device")
    return precision


def check_request(device: str, precision: str, *, compile: bool = False) -> torch.device:  # noqa: A002
    """Return a device after checking that it can do what is asked of it.

    Args:
        device: as `resolve_device` takes it.
        precision: as `resolve_precision` takes it.
        compile: whether the model is to be compiled.

    Raises:
        UsageError: this host lacks the device, or the device lacks the precision or cannot run compiled models.
    """
    torch_device = resolve_device(device)
    resolve_precision(precision, torch_device)
    _check_compile(torch_device, enabled=compile)
    return torch_device


def _check_compile(device: torch.device, *, enabled: bool) -> None:
    if enabled and device.type == "cpu":
        raise UsageError(
            "--compile needs a GPU, but the device is 'cpu', where features must be the same bytes for any number of threads: "
            "leave it out, or choose a GPU"
        )


def cast_layers(model: nn.Module, precision: str) -> torch.dtype:
    """Cast the convolutions and matrix products of a model, in place, once.

    Results equal those of ``torch.autocast``, which would cast the same layers again in each call.

    Returns:
        Type that the input of the model must have.
    """
    dtype = _LAYER_DTYPES[precision]
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            for parameter in layer.parameters(recurse=False):  # Some layers hold their norm, which stays as it is.
                parameter.data = parameter.data.to(dtype)
    return dtype


def upload(pixels: Tensor, device: torch.device) -> Tensor:
    """Copy pixels to a device; to a GPU through page-locked memory, so that the caller does not wait for the copy."""
    if device.type == "cpu" or pixels.device == device:
        return pixels.to(device)
    return pixels.pin_memory().to(device, non_blocking=True)


def compiled(model: nn.Module, device: torch.device, *, enabled: bool) -> nn.Module:
    """Compile a model if ``enabled``, and return it.

    Raises:
        UsageError: ``enabled`` on a CPU, where the kernels, and with them the bytes of the features, would depend on the number
            of threads.
    """
    _check_compile(device, enabled=enabled)
    if enabled:
        model.compile()
    return model


@contextmanager
def numerics(precision: str, device: torch.device) -> Iterator[None]:
    """Make a GPU compute in a precision inside the block, and restore every switch afterwards.

    By default torch lets convolutions on a GPU round to TF32; ``fp32`` switches this off. Algorithms that may differ from run to
    run are switched off too. Threads that need other switches wait; those that need the same are inside together, say one per GPU.
    """
    if device.type != "cuda":
        yield
        return
    tf32 = precision == "tf32"
    with _switching:
        _switching.wait_for(lambda: not _inside or _inside[0] == tf32)
        if not _inside:
            for owner, name, value in _switches(tf32=tf32):
                _found.append((owner, name, getattr(owner, name)))
                setattr(owner, name, value)
        _inside.append(tf32)
    try:
        yield
    finally:
        with _switching:
            _inside.pop()
            if not _inside:
                for owner, name, value in _found:
                    setattr(owner, name, value)
                _found.clear()
                _switching.notify_all()


def _switches(*, tf32: bool) -> list[tuple[Any, str, Any]]:
    """Return torch's switches as owner, attribute and value. Those of TF32 were renamed in torch 2.9; the two sets do not mix."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    repeatable: list[tuple[Any, str, Any]] = [(cudnn, "benchmark", False), (cudnn, "deterministic", True)]
    if hasattr(cudnn, "conv"):
        value = "tf32" if tf32 else "ieee"
        return [*repeatable, (cudnn.conv, "fp32_precision", value), (matmul, "fp32_precision", value)]
    return [*repeatable, (cudnn, "allow_tf32", tf32), (matmul, "allow_tf32", tf32)]

"""Devices and precisions: what is asked for is what is used, or it is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Condition
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from extractors.base import warn_once
from extractors.computing.compile import check_compile
from schemas.errors import UsageError
from schemas.process.resources import bfloat16_remark

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Torch's switches apply to the whole process, and a worker may extract in several threads: what each thread inside
# `precision_context` needs, and what puts back what the first of them found. All that are inside need the same.
_switching = Condition()
_inside: list[bool] = []
_found = ExitStack()

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of 16 bits by precision; the other precisions compute in float32."""


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


def check_precision(precision: str, device: torch.device | None = None) -> None:
    """Check that a precision exists, and that a device computes in it.

    Args:
        precision: ``fp32``; ``tf32`` (float32 with products of 10-bit mantissas); ``bf16`` or ``fp16`` (convolutions and matrix
            products in 16 bits, everything else in its own type, the feature in float32).
        device: from `resolve_device`; None to leave it out.

    Raises:
        UsageError: the precision is none of these, or the device does not compute in it.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if device is None:
        return
    if device.type == "cpu" and precision in ("tf32", "fp16"):
        raise UsageError(f"precision {precision!r} needs a GPU, but the device is 'cpu': pass fp32 or bf16, or another device")
    if sentence := bfloat16_remark(precision, device.type):
        warn_once(sentence)


def check_request(device: str, precision: str, *, compile: bool = False) -> torch.device:  # noqa: A002
    """Return a device, named as for `resolve_device`, after checking the precision, and that models can be compiled for it.

    Raises:
        UsageError: this host lacks the device, or the device lacks the precision or no model can be compiled for it.
    """
    torch_device = resolve_device(device)
    check_precision(precision, torch_device)
    if compile:
        check_compile(torch_device)
    return torch_device


def cast_layers(model: nn.Module, precision: str) -> torch.dtype:
    """Cast the convolutions and matrix products of a model, in place, once.

    Results equal those of ``torch.autocast``, which would cast the same layers again in each call.

    Returns:
        Type that the input of the model must have.
    """
    dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            for parameter in layer.parameters(recurse=False):  # Some layers hold their norm, which stays as it is.
                parameter.data = parameter.data.to(dtype)
    return dtype


def cache_casts(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let the convolutions and matrix products of a model keep what ``torch.autocast`` would make of their weights in each call.

    The weights themselves stay as they are, for what else reads them, and so do layers of classes derived from torch's, which may
    compute with them first: the features have the same bits, and the model takes half as much memory again.

    Args:
        model: on its device.
        dtype: type of the block of autocast that the model will run in; None for no such block, and nothing is kept.
    """
    for layer in model.modules() if dtype is not None else ():
        if type(layer) in _CAST_CACHING:
            casts = {name: None if values is None else values.detach().to(dtype) for name, values in layer._parameters.items()}
            layer.__class__ = _CAST_CACHING[type(layer)]
            for name, values in casts.items():
                layer.register_buffer(f"cast_{name}", values, persistent=False)


class _CastCaching(nn.Module):
    cast_weight: Tensor
    cast_bias: Tensor | None
    _product: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Any:  # noqa: A002
        if not torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return self._product(input, self.cast_weight, self.cast_bias)


class _CastCachingLinear(_CastCaching, nn.Linear):
    _product = staticmethod(F.linear)


class _CastCachingConv2d(_CastCaching, nn.Conv2d):
    _product = nn.Conv2d._conv_forward


_CAST_CACHING: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _CastCachingLinear, nn.Conv2d: _CastCachingConv2d}


def upload(pixels: Tensor, device: torch.device) -> Tensor:
    """Copy pixels to a device; to a GPU through page-locked memory, so that the caller does not wait for the copy."""
    if device.type == "cpu" or pixels.device == device:
        return pixels.to(device)
    pinned = pixels if pixels.is_pinned() else pixels.pin_memory()
    return pinned.to(device, non_blocking=True)


def download(parts: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Start to copy results from a GPU, into page-locked memory, so that the caller does not wait for what is being computed.

    Args:
        parts: ``[B, ...]`` each, on the GPU of `precision_context`; at least one.

    Returns:
        Waits for the copies and returns the parts one behind the other, on the CPU.
    """
    copies = [part.to("cpu", non_blocking=True) for part in parts]
    end = torch.cuda.Event(blocking=True)  # Who waits sleeps: other threads need the core.
    end.record()

    def wait() -> Tensor:
        end.synchronize()
        return copies[0] if len(copies) == 1 else torch.cat(copies)

    return wait


def pinned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of the host from which a GPU copies by itself, of unknown content.

    Torch keeps such memory for later, and knows the copies that were started: what is dropped is given out again when they have
    ended, so nobody has to count buffers.
    """
    with torch.cuda.device(device):  # See `precision_context`.
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


@contextmanager
def precision_context(precision: str, device: torch.device) -> Iterator[None]:
    """Make a GPU compute in a precision inside the block, and restore every switch afterwards. It is this thread's GPU meanwhile.

    By default torch lets convolutions on a GPU round to TF32; ``fp32`` switches this off. Algorithms that may differ from run to
    run are switched off too, where torch passes that on (see `extractors.computing.fused_conv2d`). Threads that need other switches
    wait; those that need the same are inside together, say one per GPU.
    """
    if device.type != "cuda":
        yield
        return
    tf32 = precision == "tf32"
    with _switching:
        _switching.wait_for(lambda: not _inside or _inside[0] == tf32)
        if not _inside:
            _found.enter_context(_repeatable())
            _found.enter_context(_float32_products(tf32=tf32))
        _inside.append(tf32)
    try:
        # Else what names no device, such as page-locked memory, would open a context on the first GPU.
        with torch.cuda.device(device):
            yield
    finally:
        with _switching:
            _inside.pop()
            if not _inside:
                _found.close()
                _switching.notify_all()


@contextmanager
def _repeatable() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextmanager
def _float32_products(*, tf32: bool) -> Iterator[None]:
    """Let all float32 products on a GPU, of cuBLAS and cuDNN, round to TF32, or none; as in `train.devices`.

    Torch has old and new switches, and raises an error where somebody, such as ``torch.compile``, asks for an old one that the new
    ones contradict. So both are set, the old ones first, since they set new ones, too. What is contradicted already stays.
    """
    cudnn = torch.backends.cudnn
    new = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in new]
    old = _told(lambda: cudnn.allow_tf32), _told(torch.get_float32_matmul_precision)

    def switch_to(convolutions: Any, products: Any, values: Sequence[str]) -> None:
        if old[0] is not None:
            cudnn.allow_tf32 = convolutions
        if old[1] is not None:
            torch.set_float32_matmul_precision(products)
        for switch, value in zip(new, values, strict=True):
            switch.fp32_precision = value

    value = "tf32" if tf32 else "ieee"
    switch_to(tf32, "high" if tf32 else "highest", [value, value, value, "ieee"])  # The last is that of CPUs.
    try:
        yield
    finally:
        switch_to(*old, before)


def _told(ask: Callable[[], Any]) -> Any:
    """Return the value of an old switch; None where somebody has set new ones that contradict it."""
    try:
        return ask()
    except RuntimeError:
        return None

"""Devices, precisions (TF32, autocast) and pinned copies."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from extractors.base import warn_once
from extractors.computing.compile import check_compile
from schemas.process.devices import check_precision, float32_products, resolve_device
from schemas.process.resources import bfloat16_remark

# Torch's switches are global, and a worker may extract in several threads. All threads inside `precision_context` need equal
# switches: `_inside` has one item per thread, `_restore` resets the switches after the last one.
_switching = Condition()
_inside: list[bool] = []
_restore = ExitStack()

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""16-bit dtypes by precision; the other precisions compute in float32."""


def check_request(device: str, precision: str, *, compile: bool = False) -> torch.device:  # noqa: A002
    """Resolve a device, and check precision and compiler for it.

    Raises:
        UsageError: see `resolve_device`, `check_precision` and `check_compile`.
    """
    torch_device = resolve_device(device)
    check_precision(precision, torch_device)
    if sentence := bfloat16_remark(precision, torch_device.type):
        warn_once(sentence)
    if compile:
        check_compile(torch_device)
    return torch_device


def cast_layers(model: nn.Module, precision: str) -> torch.dtype:
    """Cast convolution and linear layers in place, and return their dtype.

    Results equal those of ``torch.autocast``, which would cast the layers in each call.
    """
    dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            for parameter in layer.parameters(recurse=False):  # Without the norms of layers that contain them.
                parameter.data = parameter.data.to(dtype)
    return dtype


def cache_casts(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cache the autocast copies of convolution and linear weights in a model.

    Features keep their bits. Weights remain for other readers, and subclasses of torch's layers remain unchanged, so the model
    takes 1.5 times the memory. Without autocast, ``dtype`` is None and the model remains unchanged.
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


def download(values: Tensor) -> Callable[[], Tensor]:
    """Start an asynchronous copy from the GPU of `precision_context` to pinned memory.

    Returns:
        Function that waits for the copy and returns it.
    """
    copy = values.to("cpu", non_blocking=True)
    end = torch.cuda.Event(blocking=True)  # Blocking sync: do not spin, other threads need the core.
    end.record()

    def wait() -> Tensor:
        end.synchronize()
        return copy

    return wait


@contextmanager
def precision_context(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of a GPU and this thread's current device in the block.

    By default torch allows TF32 in convolutions on a GPU; ``fp32`` forbids it. Nondeterministic algorithms are forbidden, too,
    where torch passes that on (see `extractors.computing.fused_conv2d`). Threads with equal switches run concurrently, others wait.
    """
    if device.type != "cuda":
        yield
        return
    tf32 = precision == "tf32"
    with _switching:
        _switching.wait_for(lambda: not _inside or _inside[0] == tf32)
        if not _inside:
            _restore.enter_context(_deterministic())
            _restore.enter_context(float32_products(tf32=tf32))
        _inside.append(tf32)
    try:
        # Otherwise calls without a device, such as for pinned memory, would open a context on the first GPU.
        with torch.cuda.device(device):
            yield
    finally:
        with _switching:
            _inside.pop()
            if not _inside:
                _restore.close()
                _switching.notify_all()


@contextmanager
def _deterministic() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before

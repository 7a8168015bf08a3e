"""Fused convolution, bias, residual add and ReLU by oneDNN (CPU) or cuDNN (GPU).

On a CPU the weights are pre-packed. On a GPU torch would launch one kernel per operation, each reading and writing the whole
feature map. cuDNN has one for all if it finds an engine for shapes, dtype and GPU. Each cuDNN layer is compared with torch's
layers before use. Torch's layers compute if results differ, if two runs differ, or if cuDNN has no engine.

Torch passes the TF32 switch to cuDNN's fused convolutions, but does not forbid nondeterministic algorithms
there (``aten/src/ATen/native/cudnn/ConvShared.cpp``).

Shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from extractors.base import warn_once
from extractors.computing.cpu_parallel import run_single_threaded
from extractors.computing.devices import precision_context
from extractors.computing.oom import run_with_oom_retry
from schemas.errors import first_line

# Maximum difference relative to the maximum of a layer. In float32 it distinguishes TF32 (errors up to 5e-4)
# from another order of sums; in 16 bits torch rounds up to three times, cuDNN once.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 8 * 2**-10, torch.bfloat16: 8 * 2**-7}


class FusedConv2d(nn.Module):
    """Convolution, residual add and ReLU by oneDNN.

    Args:
        conv: convolution on the CPU.
        shape: ``[B, C, H, W]`` of its input, which determines the weight layout.
        dtype: dtype of the computation, cast inside as by autocast; None for the convolution's own.
    """

    def __init__(self, conv: nn.Conv2d, shape: Sequence[int], *, relu: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype or conv.weight.dtype
        self._geometry = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)
        # In one thread, as every forward: oneDNN chooses the layout by thread count.
        [self._weight] = run_single_threaded(
            lambda weight: torch.ops.mkldnn._reorder_convolution_weight(weight, *self._geometry, list(shape)),
            [conv.weight.detach().to(self._dtype)],
        )
        self._bias = None if conv.bias is None else conv.bias.detach().to(self._dtype)
        self._relu = relu

    def forward(self, values: Tensor, other: Tensor | None = None) -> Tensor:
        """Convolve ``[B, C, H, W]``, and add the result to ``other``, if any, in place."""
        layer = (values.to(self._dtype), self._weight, self._bias, *self._geometry)
        if other is None:
            return torch.ops.mkldnn._convolution_pointwise(*layer, "relu" if self._relu else "none", [], "")
        after = "relu" if self._relu else None
        return torch.ops.mkldnn._convolution_pointwise_.binary(other.to(self._dtype), *layer, "add", 1.0, after, [], "")


def pointwise(weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """Convert weight ``[P, C, D]`` and bias ``[P, D]`` to a grouped 1×1 convolution."""
    count, inputs, outputs = weight.shape
    with torch.device("meta"):
        conv = nn.Conv2d(count * inputs, count * outputs, 1, groups=count, bias=bias is not None)
    conv.weight = nn.Parameter(weight.transpose(1, 2).reshape(conv.weight.shape), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias.reshape(-1), requires_grad=False)
    return conv


def can_fuse_in(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports fused convolutions of a dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class CudnnFusedConv2d(nn.Module):
    """Zero-padded convolution, optional residual add and ReLU in one cuDNN launch."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self._conv = conv
        self._geometry: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
        self._is_fused = True
        self._unsupported: set[tuple[int, ...]] = set()  # Input shapes without an engine.

    def forward(self, values: Tensor, other: Tensor | None = None) -> Tensor:
        """Convolve ``[B, C, H, W]``, add ``other``, and apply the ReLU."""
        if not self._is_fused or values.shape in self._unsupported:
            return self._by_torch(values, other)
        try:
            return self._by_cudnn(values, other)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            result = self._by_torch(values, other)  # Raises, too, if cuDNN's layers are not the reason.
            self._unsupported.add(tuple(values.shape))
            _warn_unfused(first_line(error)[:200])
            return result

    def compare(self, values: Tensor, other: Tensor | None, tolerance: float) -> Tensor:
        """Return the result of torch's layers; disable cuDNN if its result differs."""
        expected = self._by_torch(values, other)
        try:
            differs = self._differs(expected, values, other, tolerance)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            differs = first_line(error)[:200]
        if differs:
            self._is_fused = False
            _warn_unfused(differs)
        return expected

    def _differs(self, expected: Tensor, values: Tensor, other: Tensor | None, tolerance: float) -> str:
        """Return the difference of cuDNN's results in words; empty if they agree."""
        # The next result reuses this memory; cuDNN must not read it.
        torch.full_like(expected, torch.nan)
        result, again = (self._by_cudnn(values, other) for _ in range(2))
        is_near = (result - expected).abs() <= tolerance * expected.abs().max()  # False for NaN.
        is_other, changes = torch.stack(((~is_near).any(), (result != again).any())).tolist()
        return "its results differ from torch's" if is_other else "two runs have different results" if changes else ""

    def _by_torch(self, values: Tensor, other: Tensor | None) -> Tensor:
        result: Tensor = self._conv(values)
        return (result if other is None else result.add_(other)).relu_()

    def _by_cudnn(self, values: Tensor, other: Tensor | None) -> Tensor:
        weight, bias = self._conv.weight, self._conv.bias
        if other is None:
            return torch.cudnn_convolution_relu(values, weight, bias, *self._geometry)
        return torch.cudnn_convolution_add_relu(values, weight, other, 1.0, bias, *self._geometry)


def disable_mismatching_layers(graph: fx.GraphModule, shape: tuple[int, ...], precision: str, device: torch.device) -> None:
    """Disable cuDNN layers that differ from torch's on noise ``[B, C, H, W]``.

    Raises:
        ImagepivotError: the GPU memory is too small for the network and the noise.
    """
    dtype = next(graph.parameters()).dtype
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    tolerance = _TOLERANCES[torch.float16 if precision == "tf32" else dtype]
    with precision_context(precision, device), torch.inference_mode():
        run_with_oom_retry(_Comparison(graph, tolerance).run, noise.contiguous(memory_format=torch.channels_last))


class _Comparison(fx.Interpreter):
    """Interpreter that runs a network with torch's layers and compares cuDNN's."""

    def __init__(self, graph: fx.GraphModule, tolerance: float) -> None:
        super().__init__(graph)
        self._tolerance = tolerance

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        layer = self.fetch_attr(target)
        if isinstance(layer, CudnnFusedConv2d):
            return layer.compare(args[0], args[1] if len(args) > 1 else None, self._tolerance)
        return super().call_module(target, args, kwargs)


def _warn_unfused(reason: str) -> None:
    warn_once(f"cuDNN cannot fuse some layers on this GPU ({reason}): torch computes them, more slowly")

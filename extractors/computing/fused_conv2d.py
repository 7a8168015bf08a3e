"""Fused convolutions: convolution, bias, residual add and ReLU in one kernel, of oneDNN on a CPU and of cuDNN on a GPU.

On a CPU the weights are laid out once. On a GPU torch launches a kernel for each of these operations, which reads and writes the
whole feature map; cuDNN has one for all of them, if it finds an engine for the shapes, the type and the GPU. Each layer of cuDNN
is compared with torch's own layers before it is used, and torch's layers compute where the results differ, where two runs differ,
or where there is no engine, then or later.

Torch lets cuDNN's fused convolutions round to TF32 where it lets others (``torch.backends.cudnn``), but does not tell cuDNN to
leave out algorithms that may differ from run to run (``aten/src/ATen/native/cudnn/ConvShared.cpp``).

Shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from extractors.computing.compile import first_line
from extractors.computing.cpu_parallel import run_single_threaded
from extractors.computing.devices import precision_context
from extractors.computing.oom import run_with_oom_retry


class FusedConv2d(nn.Module):
    """A convolution by oneDNN with what follows it.

    Args:
        conv: the convolution, on the CPU.
        shape: ``[B, C, H, W]`` of its input, for which the layout of the weights is chosen.
        relu: whether a ReLU follows.
        dtype: type that it casts to, itself, as autocast casts for torch's layers; None for the layer's own.
    """

    def __init__(self, conv: nn.Conv2d, shape: Sequence[int], *, relu: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype or conv.weight.dtype
        self._numbers = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)
        # In one thread, as every forward: of several, oneDNN may choose a layout that one thread is half as fast with.
        [self._weight] = run_single_threaded(
            lambda weight: torch.ops.mkldnn._reorder_convolution_weight(weight, *self._numbers, list(shape)),
            [conv.weight.detach().to(self._dtype)],
        )
        self._bias = None if conv.bias is None else conv.bias.detach().to(self._dtype)
        self._relu = relu

    def forward(self, values: Tensor, other: Tensor | None = None) -> Tensor:
        """Convolve ``[B, C, H, W]``; the result is added to ``other`` in place, if that is given."""
        layer = (values.to(self._dtype), self._weight, self._bias, *self._numbers)
        if other is None:
            return torch.ops.mkldnn._convolution_pointwise(*layer, "relu" if self._relu else "none", [], "")
        after = "relu" if self._relu else None
        return torch.ops.mkldnn._convolution_pointwise_.binary(other.to(self._dtype), *layer, "add", 1.0, after, [], "")


def pointwise(weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """Return matrix products as a 1×1 convolution: of each row of inputs, ``P`` times ``C`` channels, by as many matrices.

    Args:
        weight: the matrices, ``[P, C, D]``.
        bias: ``[P, D]``.
    """
    count, inputs, outputs = weight.shape
    with torch.device("meta"):
        conv = nn.Conv2d(count * inputs, count * outputs, 1, groups=count, bias=bias is not None)
    conv.weight = nn.Parameter(weight.transpose(1, 2).reshape(conv.weight.shape), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias.reshape(-1), requires_grad=False)
    return conv


def can_fuse_in(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN computes merged convolutions of a type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    # Other processors would raise an error.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


logger = logging.getLogger(__name__)

# Greatest difference by the greatest value of a layer. Float32 tells TF32, whose products are off by up to 5e-4, from other orders
# of its sums; in 16 bits torch rounds up to three times where cuDNN rounds once.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 8 * 2**-10, torch.bfloat16: 8 * 2**-7}
_TOLERANCE_OF_TF32 = _TOLERANCES[torch.float16]


class CudnnFusedConv2d(nn.Module):
    """A convolution and a ReLU, with an addition in between if there is one, in one launch.

    Args:
        conv: the convolution, padded with zeros; its weights stay here.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self._conv = conv
        self._numbers: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
        self._is_fused = True
        self._without: set[tuple[int, ...]] = set()  # Shapes of inputs for which there is no engine.

    def forward(self, values: Tensor, other: Tensor | None = None) -> Tensor:
        """Convolve ``[B, C, H, W]``, add ``other``, and cut off what is negative."""
        if not self._is_fused or values.shape in self._without:
            return self._by_torch(values, other)
        try:
            return self._by_cudnn(values, other)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # If the reason is another one, such as too little memory, torch's layers raise an error, too.
            found = self._by_torch(values, other)
            self._without.add(tuple(values.shape))
            _tell(first_line(error)[:200])
            return found

    def compare(self, values: Tensor, other: Tensor | None, tolerance: float) -> Tensor:
        """Return what torch's layers make of an input, after leaving cuDNN out from now on if it does not make the same."""
        expected = self._by_torch(values, other)
        try:
            differs = self._differs(expected, values, other, tolerance)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            differs = first_line(error)[:200]
        if differs:
            self._is_fused = False
            _tell(differs)
        return expected

    def _differs(self, expected: Tensor, values: Tensor, other: Tensor | None, tolerance: float) -> str:
        """Return how cuDNN's results differ from those expected; an empty string if they do not."""
        # The result of the next operation takes its place in memory, and cuDNN must not read what was there.
        torch.full_like(expected, torch.nan)
        found, again = (self._by_cudnn(values, other) for _ in range(2))
        is_near = (found - expected).abs() <= tolerance * expected.abs().max()  # Not where a result is no number.
        is_other, changes = torch.stack(((~is_near).any(), (found != again).any())).tolist()
        return "its results are not torch's" if is_other else "its results are not the same twice" if changes else ""

    def _by_torch(self, values: Tensor, other: Tensor | None) -> Tensor:
        found: Tensor = self._conv(values)
        return (found if other is None else found.add_(other)).relu_()

    def _by_cudnn(self, values: Tensor, other: Tensor | None) -> Tensor:
        weight, bias = self._conv.weight, self._conv.bias
        if other is None:
            return torch.cudnn_convolution_relu(values, weight, bias, *self._numbers)
        return torch.cudnn_convolution_add_relu(values, weight, other, 1.0, bias, *self._numbers)


def disable_mismatching_layers(graph: fx.GraphModule, shape: tuple[int, ...], precision: str, device: torch.device) -> None:
    """Let cuDNN compute only those layers of a network whose results are those of torch on noise.

    Args:
        graph: the network, on the GPU, some of whose layers are `CudnnFusedConv2d`.
        shape: ``[B, C, H, W]`` of the noise.
        precision: one of `extractors.computing.devices.PRECISIONS`.
        device: the GPU.

    Raises:
        ImagepivotError: the memory of the GPU is too small for the network and the noise.
    """
    dtype = next(graph.parameters()).dtype
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    tolerance = _TOLERANCE_OF_TF32 if precision == "tf32" else _TOLERANCES[dtype]
    with precision_context(precision, device), torch.inference_mode():
        run_with_oom_retry(_Comparison(graph, tolerance).run, noise.contiguous(memory_format=torch.channels_last))


class _Comparison(fx.Interpreter):
    """Runs a network with torch's layers, and compares cuDNN's with them."""

    def __init__(self, graph: fx.GraphModule, tolerance: float) -> None:
        super().__init__(graph)
        self._tolerance = tolerance

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        layer = self.fetch_attr(target)
        if isinstance(layer, CudnnFusedConv2d):
            return layer.compare(args[0], args[1] if len(args) > 1 else None, self._tolerance)
        return super().call_module(target, args, kwargs)


@lru_cache(maxsize=32)  # Once, however many layers there are.
def _tell(reason: str) -> None:
    logger.warning("cuDNN does not fuse some of the layers on this GPU (%s): torch computes them one by one", reason)

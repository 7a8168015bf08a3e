"""Convolutions on a CPU that oneDNN computes together with the addition and the ReLU behind them, with weights laid out once.

Letters in shapes: ``B`` images of one forward, ``C`` channels, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from extractors.computing.cpu_parallel import run_single_threaded


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

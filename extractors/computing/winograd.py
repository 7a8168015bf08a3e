"""Winograd convolution of 3×3 filters (Lavin and Gray 2016, arXiv:1509.09308).

The output is split into 4×4 or 2×2 tiles. F(4×4, 3×3) needs 36 multiplications per tile and channel pair instead of 144, F(2×2,
3×3) 16 instead of 36. The element-wise products become one matrix product per transform position, run by MKL
(`WinogradConv2d`), or as a grouped 1×1 convolution by oneDNN (`GroupedWinogradConv2d`).

Shapes: ``B`` images of one forward, ``C`` and ``D`` channels of inputs and outputs, ``H`` and ``W`` pixels, ``m`` side of an output
tile, ``a`` = m + 2 side of its input tile, ``P`` = a² transform positions, ``t`` and ``u`` tiles per column and per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from extractors.computing.fused_conv2d import FusedConv2d, can_fuse_in, pointwise

KERNEL_SIZE = 3
"""Side of a filter."""

# Besides infinity, by outputs of a tile; chosen for small rounding errors.
_INTERPOLATION_POINTS = {2: (0, 1, -1), 3: (0, 1, -1, 0.5), 4: (0, 1, -1, 0.5, -2)}
_CHANNELS_PER_TRANSFORM = 64  # Limits the memory of filter transforms.
_STRIP = 4_000_000  # Bytes of input tiles per strip, near a processor's cache size.


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN is faster than MKL: with AVX-512, but not on Intel."""
    # Older versions of torch do not name the processor.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_f")) and "Intel" not in capabilities["cpu_name"] and can_fuse_in(torch.float32)


def winograd_tile(conv: nn.Conv2d, shape: Sequence[int]) -> int | None:
    """Return the fastest tile side for ``[B, C, H, W]``; None if Winograd is slower."""
    geometry = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    is_plain = geometry == ((KERNEL_SIZE, KERNEL_SIZE), (1, 1), (1, 1), (1, 1), 1, "zeros")
    # Limits beyond which Winograd convolution is faster; the fastest side is first.
    min_channels, min_tiles, sides = (128, 16, (4,)) if prefers_onednn() else (64, 32, (4, 2))
    if not is_plain or conv.weight.dtype != torch.float32 or min(conv.in_channels, conv.out_channels) < min_channels:
        return None
    batch, _, height, width = shape
    return next((side for side in sides if batch * -(-height // side) * -(-width // side) >= min_tiles), None)


def make_winograd(
    conv: nn.Conv2d,
    shape: Sequence[int],
    *,
    relu: bool,
    compile: bool,  # noqa: A002
) -> WinogradConv2d | None:
    """Return a Winograd convolution for ``[B, C, H, W]``; None if it is slower.

    Weights are not pre-packed for ``compile``, since the compiler packs them.
    """
    side = winograd_tile(conv, shape)
    if side is None:
        return None
    if not prefers_onednn():
        return WinogradConv2d(conv, side, relu=relu)
    return GroupedWinogradConv2d(conv, side, None if compile else shape, relu=relu)


def winograd_matrices(outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``B_t`` ``[a, a]``, ``G`` ``[a, 3]`` and ``A_t`` ``[m, a]``, 2 ≤ m ≤ 4.

    By Toom-Cook interpolation, ``y = A_t @ ((G @ g) * (B_t @ d))`` are the outputs of a filter g and inputs d along one axis.
    """
    points, inputs = _INTERPOLATION_POINTS[outputs], outputs + KERNEL_SIZE - 1
    return np.linalg.inv(_evaluation(points, inputs)).T, _evaluation(points, KERNEL_SIZE), _evaluation(points, outputs).T


class WinogradConv2d(nn.Module):
    """Winograd convolution by matrix products, with an optional ReLU."""

    def __init__(self, conv: nn.Conv2d, side: int, *, relu: bool) -> None:
        super().__init__()
        self._side, self._inputs, self._relu, self._channels = side, side + KERNEL_SIZE - 1, relu, conv.out_channels
        self._bias_position = self._inputs + 1  # Position of the interpolation point (1, 1), with weight 1 in all outputs.
        b_t, g, a_t = (torch.from_numpy(np.kron(matrix, matrix)) for matrix in winograd_matrices(side))
        weight = conv.weight.new_empty(len(g), conv.in_channels, conv.out_channels)
        chunks = (tensor.split(_CHANNELS_PER_TRANSFORM, dim=1) for tensor in (conv.weight, weight))
        for filters, transformed in zip(*chunks, strict=True):
            taps = filters.to(torch.float64).permute(2, 3, 1, 0).reshape(KERNEL_SIZE**2, -1)  # [9, inputs * D]
            transformed.copy_((g @ taps).view(transformed.shape))
        for name, values in (("_b_t", b_t), ("_a_t", a_t)):
            self.register_buffer(name, values.to(conv.weight.dtype), persistent=False)
        self._strip = max(_STRIP, weight.nbytes // 2)  # Each strip reads all weights.
        self._set_weight(weight, None if conv.bias is None else conv.bias.detach())

    _b_t: Tensor
    _a_t: Tensor
    _weight: Tensor
    _bias: Tensor | None

    def _set_weight(self, weight: Tensor, bias: Tensor | None) -> None:
        """Store transformed filters ``[P, C, D]`` and a bias ``[D]``."""
        self.register_buffer("_weight", weight, persistent=False)
        self.register_buffer("_bias", bias, persistent=False)

    def _rows_per_strip(self, count: int, across: int, channels: int) -> int:
        return max(1, self._strip // (self._inputs**2 * count * across * channels * self._b_t.element_size()))

    def forward(self, values: Tensor) -> Tensor:
        """Convolve float32 ``[B, C, H, W]`` to ``[B, D, H, W]``, both channels-last."""
        pixels = values.permute(0, 2, 3, 1)
        count, height, width, channels = pixels.shape
        side, inputs = self._side, self._inputs
        down, across = -(-height // side), -(-width // side)
        padded = F.pad(pixels, (0, 0, 1, across * side - width + 1, 1, down * side - height + 1))
        tiles = padded.unfold(1, inputs, side).unfold(2, inputs, side)  # [B, t, u, C, a, a]
        rows = self._rows_per_strip(count, across, channels)
        maps = pixels.new_empty(count, down, side, across, side, self._channels)
        for strip, outputs in zip(tiles.split(rows, dim=1), maps.split(rows, dim=1), strict=True):
            tile_values = self._outputs(strip)
            outputs.copy_(tile_values.relu_() if self._relu else tile_values)
        maps = maps.view(count, down * side, across * side, self._channels)
        return maps[:, :height, :width].permute(0, 3, 1, 2)

    def _outputs(self, tiles: Tensor) -> Tensor:
        """Compute the outputs of tiles: ``[B, t, u, C, a, a]`` to ``[B, t, m, u, m, D]``."""
        count, down, across, channels = tiles.shape[:4]
        positions, side = self._inputs**2, self._side
        transformed = self._b_t @ tiles.permute(4, 5, 0, 1, 2, 3).reshape(positions, -1)
        products = torch.bmm(transformed.view(positions, -1, channels), self._weight)  # [P, B * t * u, D]
        if self._bias is not None:
            products[self._bias_position] += self._bias
        outputs = self._a_t @ products.view(positions, -1)
        return outputs.view(side, side, count, down, across, -1).permute(2, 3, 0, 4, 1, 5)


class GroupedWinogradConv2d(WinogradConv2d):
    """Winograd convolution by oneDNN: 1×1, tiles as pixels, positions as groups.

    ``shape`` of the input, ``[B, C, H, W]``, determines the weight layout; it is None for a compiled model.
    """

    def __init__(self, conv: nn.Conv2d, side: int, shape: Sequence[int] | None, *, relu: bool) -> None:
        super().__init__(conv, side, relu=relu)
        if shape is not None:
            count, channels, height, width = shape
            down, across = -(-height // side), -(-width // side)
            tiles = count * across * min(down, self._rows_per_strip(count, across, channels))
            self._products = FusedConv2d(self._products, (1, self._products.in_channels, tiles, 1), relu=False)

    _products: Any

    def _set_weight(self, weight: Tensor, bias: Tensor | None) -> None:
        biases = weight.new_zeros(len(weight), self._channels)
        if bias is not None:
            biases[self._bias_position] = bias
        self._products = pointwise(weight, biases)

    def _outputs(self, tiles: Tensor) -> Tensor:
        count, down, across, channels = tiles.shape[:4]
        num_tiles, positions, side = count * down * across, self._inputs**2, self._side
        inputs = tiles.permute(0, 1, 2, 4, 5, 3).reshape(num_tiles, positions, channels)
        transformed = torch.bmm(self._b_t.expand(num_tiles, -1, -1), inputs)
        products = self._products(transformed.view(1, num_tiles, 1, -1).permute(0, 3, 1, 2))  # [1, P * D, B * t * u, 1]
        outputs = torch.bmm(self._a_t.expand(num_tiles, -1, -1), products.permute(0, 2, 3, 1).reshape(num_tiles, positions, -1))
        return outputs.view(count, down, across, side, side, -1).permute(0, 1, 3, 2, 4, 5)


def _evaluation(points: tuple[float, ...], coefficients: int) -> np.ndarray:
    """Return the matrix that evaluates a polynomial at points and at infinity."""
    values: Any = np.vander(np.array(points, dtype=np.float64), coefficients, increasing=True)
    return np.vstack([values, np.eye(coefficients)[-1]])

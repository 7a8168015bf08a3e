"""Winograd's algorithm for 3×3 convolutions in fewer multiplications (Lavin and Gray 2016, arXiv:1509.09308).

Along each axis, a tile of outputs is a product of polynomials: evaluate both at as many points as the product has coefficients,
multiply, and go back. A tile of 4 by 4 outputs takes 36 products of channels where the plain sum takes 144, one of 2 by 2 takes 16
instead of 36. The points are chosen for exactness: features of VGG19 are as near to those in float64 as with torch's convolutions,
or nearer, because fewer numbers are added up one after the other.

What is left are products of matrices of tiles by channels, one for each point. MKL does them (`WinogradConv2d`), or, where its
products are slow, oneDNN as a convolution of single pixels with one group for each point (`GroupedWinogradConv2d`).

Letters in shapes: ``B`` images of one forward, ``C`` and ``D`` channels of inputs and outputs, ``H`` and ``W`` pixels, ``m`` side
of a tile of outputs, ``a`` = m + 2 that of its inputs, ``P`` = a² points, ``t`` and ``u`` tiles from top to bottom and from left to
right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from extractors.computing.fused_conv2d import FusedConv2d, can_fuse_in, pointwise

KERNEL_SIZE = 3
"""Side of a filter."""

# Besides infinity, by outputs of a tile.
_INTERPOLATION_POINTS = {2: (0, 1, -1), 3: (0, 1, -1, 0.5), 4: (0, 1, -1, 0.5, -2)}
_AT_ONCE = 64  # Channels of inputs whose filters are transformed together.
_STRIP = 4_000_000  # Bytes of the inputs of tiles that go through at once, near to a processor's cache.


class _Limits(NamedTuple):
    """The convolutions for which the algorithm is faster.

    With fewer channels the transforms, and with fewer tiles the reading of the larger weights, outweigh what products save.

    Attributes:
        min_channels: minimum of input and of output channels.
        min_tiles: minimum of tiles of all images of a forward.
        sides: candidate sides of tiles, the faster one first.
    """

    min_channels: int
    min_tiles: int
    sides: tuple[int, ...]


_LIMITS, _LIMITS_OF_GROUPED = _Limits(64, 32, (4, 2)), _Limits(128, 16, (4,))


@cache
def prefers_onednn() -> bool:
    """Tell whether matrix products, by MKL, have about half the rate of convolutions, by oneDNN.

    It was so on an AMD EPYC with AVX-512, and neither on Intel's processor with it nor with AVX2
    (``docs/internals/performance.md``).
    """
    # Versions of torch before this function do not name the processor.
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_f")) and "Intel" not in known["cpu_name"] and can_fuse_in(torch.float32)


def winograd_tile(conv: nn.Conv2d, shape: Sequence[int]) -> int | None:
    """Return the side of the tiles with which a convolution of an input ``[B, C, H, W]`` is faster; None where it is not."""
    is_plain = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode) == (
        (KERNEL_SIZE, KERNEL_SIZE),
        (1, 1),
        (1, 1),
        (1, 1),
        1,
        "zeros",
    )
    limits = _LIMITS_OF_GROUPED if prefers_onednn() else _LIMITS
    if not is_plain or conv.weight.dtype != torch.float32 or min(conv.in_channels, conv.out_channels) < limits.min_channels:
        return None
    batch, _, height, width = shape
    return next((side for side in limits.sides if batch * -(-height // side) * -(-width // side) >= limits.min_tiles), None)


def make_winograd(
    conv: nn.Conv2d,
    shape: Sequence[int],
    *,
    relu: bool,
    compile: bool,  # noqa: A002
) -> WinogradConv2d | None:
    """Return a convolution of an input ``[B, C, H, W]``, with a ReLU if one follows, as Winograd's; None where it is not faster.

    The weights are not laid out if it will be compiled: the compiler does that itself.
    """
    side = winograd_tile(conv, shape)
    if side is None:
        return None
    if not prefers_onednn():
        return WinogradConv2d(conv, side, relu=relu)
    return GroupedWinogradConv2d(conv, side, None if compile else shape, relu=relu)


def winograd_matrices(outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the matrices of a tile along one axis: of inputs ``[a, a]``, of the filter ``[a, 3]``, of products ``[m, a]``.

    Filtering is the transpose of a product of polynomials (Toom and Cook): evaluate at as many points as the product has
    coefficients, multiply, and invert the evaluation.

    Args:
        outputs: m, 2 to 4.
    """
    points, inputs = _INTERPOLATION_POINTS[outputs], outputs + KERNEL_SIZE - 1
    return np.linalg.inv(_evaluation(points, inputs)).T, _evaluation(points, KERNEL_SIZE), _evaluation(points, outputs).T


class WinogradConv2d(nn.Module):
    """A 3×3 convolution by Winograd's algorithm, with the ReLU that follows it.

    Args:
        conv: the convolution, for which `winograd_tile` found a side.
        side: of the tiles.
        relu: whether a ReLU follows.
    """

    def __init__(self, conv: nn.Conv2d, side: int, *, relu: bool) -> None:
        super().__init__()
        self._side, self._inputs, self._relu, self._channels = side, side + KERNEL_SIZE - 1, relu, conv.out_channels
        before, filters, after = (torch.from_numpy(np.kron(one, one)) for one in winograd_matrices(side))
        weight = conv.weight.new_empty(len(filters), conv.in_channels, conv.out_channels)
        # In float64 all inputs at once would take eight times the memory of the layer.
        for some, made in zip(conv.weight.split(_AT_ONCE, dim=1), weight.split(_AT_ONCE, dim=1), strict=True):
            taps = some.to(torch.float64).permute(2, 3, 1, 0).reshape(KERNEL_SIZE**2, -1)  # [9, inputs * D]
            made.copy_((filters @ taps).view(made.shape))
        for name, values in (("_before", before), ("_after", after)):
            self.register_buffer(name, values.to(conv.weight.dtype), persistent=False)
        self._strip = max(_STRIP, weight.nbytes // 2)  # The weights are read once for each strip.
        self._keep(weight, None if conv.bias is None else conv.bias.detach())

    _before: Tensor
    _after: Tensor
    _weight: Tensor
    _bias: Tensor | None

    def _keep(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep transformed filters ``[P, C, D]`` and a bias ``[D]``."""
        self.register_buffer("_weight", weight, persistent=False)
        self.register_buffer("_bias", bias, persistent=False)

    def _rows_at_once(self, count: int, across: int, channels: int) -> int:
        """Return the rows of tiles of a strip."""
        return max(1, self._strip // (self._inputs**2 * count * across * channels * self._before.element_size()))

    def forward(self, values: Tensor) -> Tensor:
        """Convolve float32 ``[B, C, H, W]``, with the channels innermost in memory; so is the result, ``[B, D, H, W]``."""
        pixels = values.permute(0, 2, 3, 1)
        count, height, width, channels = pixels.shape
        side, inputs = self._side, self._inputs
        down, across = -(-height // side), -(-width // side)
        padded = F.pad(pixels, (0, 0, 1, across * side - width + 1, 1, down * side - height + 1))
        tiles = padded.unfold(1, inputs, side).unfold(2, inputs, side)  # [B, t, u, C, a, a]
        at_once = self._rows_at_once(count, across, channels)
        maps = pixels.new_empty(count, down, side, across, side, self._channels)
        for strip, made in zip(tiles.split(at_once, dim=1), maps.split(at_once, dim=1), strict=True):
            made.copy_(self._outputs(strip))
        maps = maps.view(count, down * side, across * side, self._channels)
        return maps[:, :height, :width].permute(0, 3, 1, 2)

    @property
    def _whole(self) -> int:
        """The point whose products count once in each output: both polynomials are evaluated at 1 there."""
        return self._inputs + 1

    def _outputs(self, tiles: Tensor) -> Tensor:
        """Compute the outputs of tiles: ``[B, t, u, C, a, a]`` to ``[B, t, m, u, m, D]``."""
        count, down, across, channels = tiles.shape[:4]
        positions, side = self._inputs**2, self._side
        transformed = self._before @ tiles.permute(4, 5, 0, 1, 2, 3).reshape(positions, -1)
        products = torch.bmm(transformed.view(positions, -1, channels), self._weight)  # [a * a, B * t * u, D]
        if self._bias is not None:
            products[self._whole] += self._bias
        outputs = self._after @ products.view(positions, -1)
        if self._relu:
            outputs = outputs.relu_()
        return outputs.view(side, side, count, down, across, -1).permute(2, 3, 0, 4, 1, 5)


class GroupedWinogradConv2d(WinogradConv2d):
    """The same with oneDNN: tiles are the pixels of a convolution that looks at one at a time, points its groups of channels.

    Args:
        conv: the convolution, for which `winograd_tile` found a side.
        side: of the tiles.
        shape: ``[B, C, H, W]`` of its input, for which the layout of the weights is chosen; None to leave that to a compiler.
        relu: whether a ReLU follows.
    """

    def __init__(self, conv: nn.Conv2d, side: int, shape: Sequence[int] | None, *, relu: bool) -> None:
        super().__init__(conv, side, relu=relu)
        if shape is not None:
            count, channels, height, width = shape
            down, across = -(-height // side), -(-width // side)
            tiles = count * across * min(down, self._rows_at_once(count, across, channels))
            self._products = FusedConv2d(self._products, (1, self._products.in_channels, tiles, 1), relu=False)

    _products: Any

    def _keep(self, weight: Tensor, bias: Tensor | None) -> None:
        biases = weight.new_zeros(len(weight), self._channels)
        if bias is not None:
            biases[self._whole] = bias
        self._products = pointwise(weight, biases)

    def _outputs(self, tiles: Tensor) -> Tensor:
        count, down, across, channels = tiles.shape[:4]
        number, points, side = count * down * across, self._inputs**2, self._side
        transformed = torch.bmm(
            self._before.expand(number, -1, -1), tiles.permute(0, 1, 2, 4, 5, 3).reshape(number, points, channels)
        )
        products = self._products(transformed.view(1, number, 1, -1).permute(0, 3, 1, 2))  # [1, P * D, B * t * u, 1]
        outputs = torch.bmm(self._after.expand(number, -1, -1), products.permute(0, 2, 3, 1).reshape(number, points, -1))
        if self._relu:
            outputs = outputs.relu_()
        return outputs.view(count, down, across, side, side, -1).permute(0, 1, 3, 2, 4, 5)


def _evaluation(points: tuple[float, ...], coefficients: int) -> np.ndarray:
    """Return the matrix that evaluates a polynomial of so many coefficients at points, and at infinity."""
    values: Any = np.vander(np.array(points, dtype=np.float64), coefficients, increasing=True)
    return np.vstack([values, np.eye(coefficients)[-1]])

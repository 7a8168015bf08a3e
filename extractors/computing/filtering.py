"""3×3 convolutions in fewer multiplications: minimal filtering (Lavin and Gray 2016, arXiv:1509.09308), as matrix products.

Of a tile of outputs and the inputs that it depends on, the filter is a product of polynomials along each axis: evaluate both at as
many points as the product has coefficients, multiply, and go back. A tile of 4 by 4 outputs takes 36 products of channels where the
plain sum takes 144, one of 2 by 2 takes 16 instead of 36. The points are chosen for exactness: features of VGG19 are as near to
those in float64 as with torch's convolutions, or nearer, because fewer numbers are added up one after the other.

Letters in shapes: ``B`` images of one forward, ``C`` and ``D`` channels of inputs and outputs, ``H`` and ``W`` pixels, ``m`` side
of a tile of outputs, ``a`` = m + 2 that of its inputs, ``t`` and ``u`` tiles from top to bottom and from left to right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["TAPS", "FilteredConvolution", "tile_for", "transforms"]

TAPS = 3
"""Side of a filter."""

_POINTS = {2: (0, 1, -1), 3: (0, 1, -1, 0.5), 4: (0, 1, -1, 0.5, -2)}  # Of evaluation, besides infinity, by outputs of a tile.
# With fewer channels the transforms, and with fewer tiles the reading of the larger weights, outweigh what products save.
_LEAST_TILES = 32
_AT_ONCE = 64  # Channels of inputs whose filters are transformed together.
_STRIP = 4_000_000  # Bytes of the inputs of tiles that go through at once, near to a processor's cache.


class _Limits(NamedTuple):
    """What is filtered: convolutions of so many channels, in tiles of these sides, the faster one first."""

    least_channels: int
    sides: tuple[int, ...]


_LIMITS, _LIMITS_OF_SLOW_PRODUCTS = _Limits(64, (4, 2)), _Limits(128, (4,))


@cache
def _products_are_slow() -> bool:
    """Tell whether matrix products, by MKL, have about half the rate of convolutions, by oneDNN, so that filtering saves less.

    It was so on an AMD EPYC with AVX-512, and neither on Intel's processor with it nor with AVX2, see ``docs/speed.md``.
    """
    # Versions of torch before this function do not name the processor.
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_f")) and "Intel" not in known["cpu_name"]


def tile_for(conv: nn.Conv2d, shape: Sequence[int]) -> int | None:
    """Return the side of the tiles with which a convolution in float32 on a CPU is faster; None where it is not.

    Args:
        conv: the convolution.
        shape: ``[B, C, H, W]`` of its input.
    """
    is_plain = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode) == (
        (TAPS, TAPS),
        (1, 1),
        (1, 1),
        (1, 1),
        1,
        "zeros",
    )
    limits = _LIMITS_OF_SLOW_PRODUCTS if _products_are_slow() else _LIMITS
    if not is_plain or conv.weight.dtype != torch.float32 or min(conv.in_channels, conv.out_channels) < limits.least_channels:
        return None
    batch, _, height, width = shape
    return next((side for side in limits.sides if batch * -(-height // side) * -(-width // side) >= _LEAST_TILES), None)


def transforms(outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the matrices of a tile along one axis: of inputs ``[a, a]``, of the filter ``[a, 3]``, of products ``[m, a]``.

    Filtering is the transpose of a product of polynomials (Toom and Cook): evaluate at as many points as the product has
    coefficients, multiply, and invert the evaluation.

    Args:
        outputs: m, 2 to 4.
    """
    points, inputs = _POINTS[outputs], outputs + TAPS - 1
    return np.linalg.inv(_evaluation(points, inputs)).T, _evaluation(points, TAPS), _evaluation(points, outputs).T


class FilteredConvolution(nn.Module):
    """A 3×3 convolution by minimal filtering, with the ReLU that follows it.

    Args:
        conv: the convolution, for which `tile_for` found a side.
        side: of the tiles.
        relu: whether a ReLU follows.
    """

    def __init__(self, conv: nn.Conv2d, side: int, *, relu: bool) -> None:
        super().__init__()
        self._channels = conv.out_channels
        before, filters, after = (torch.from_numpy(np.kron(one, one)) for one in transforms(side))
        weight = conv.weight.new_empty(len(filters), conv.in_channels, conv.out_channels)
        # In float64 all inputs at once would take eight times the memory of the layer.
        for some, made in zip(conv.weight.split(_AT_ONCE, dim=1), weight.split(_AT_ONCE, dim=1), strict=True):
            taps = some.to(torch.float64).permute(2, 3, 1, 0).reshape(TAPS**2, -1)  # [9, inputs * D]
            made.copy_((filters @ taps).view(made.shape))
        for name, values in (("_before", before), ("_weight", weight), ("_after", after)):
            self.register_buffer(name, values.to(conv.weight.dtype), persistent=False)
        self.register_buffer("_bias", None if conv.bias is None else conv.bias.detach(), persistent=False)
        self._side, self._inputs, self._relu = side, side + TAPS - 1, relu
        self._strip = max(_STRIP, self.get_buffer("_weight").nbytes // 2)  # The weights are read once for each strip.

    _before: Tensor
    _weight: Tensor
    _after: Tensor
    _bias: Tensor | None

    def forward(self, values: Tensor) -> Tensor:
        """Convolve float32 ``[B, C, H, W]``, with the channels innermost in memory; so is the result, ``[B, D, H, W]``."""
        pixels = values.permute(0, 2, 3, 1)
        count, height, width, channels = pixels.shape
        side, inputs = self._side, self._inputs
        down, across = -(-height // side), -(-width // side)
        padded = F.pad(pixels, (0, 0, 1, across * side - width + 1, 1, down * side - height + 1))
        tiles = padded.unfold(1, inputs, side).unfold(2, inputs, side)  # [B, t, u, C, a, a]
        at_once = max(1, self._strip // (inputs**2 * count * across * channels * values.element_size()))
        maps = pixels.new_empty(count, down, side, across, side, self._channels)
        for strip, made in zip(tiles.split(at_once, dim=1), maps.split(at_once, dim=1), strict=True):
            made.copy_(self._outputs(strip))
        maps = maps.view(count, down * side, across * side, self._channels)
        return maps[:, :height, :width].permute(0, 3, 1, 2)

    def _outputs(self, tiles: Tensor) -> Tensor:
        """Compute the outputs of tiles: ``[B, t, u, C, a, a]`` to ``[B, t, m, u, m, D]``."""
        count, down, across, channels = tiles.shape[:4]
        positions, side = self._inputs**2, self._side
        transformed = self._before @ tiles.permute(4, 5, 0, 1, 2, 3).reshape(positions, -1)
        products = torch.bmm(transformed.view(positions, -1, channels), self._weight)  # [a * a, B * t * u, D]
        if self._bias is not None:
            # Where both polynomials are evaluated at 1, products count once in each output.
            products[self._inputs + 1] += self._bias
        outputs = self._after @ products.view(positions, -1)
        if self._relu:
            outputs = outputs.relu_()
        return outputs.view(side, side, count, down, across, -1).permute(2, 3, 0, 4, 1, 5)


def _evaluation(points: tuple[float, ...], coefficients: int) -> np.ndarray:
    """Return the matrix that evaluates a polynomial of so many coefficients at points, and at infinity."""
    values: Any = np.vander(np.array(points, dtype=np.float64), coefficients, increasing=True)
    return np.vstack([values, np.eye(coefficients)[-1]])

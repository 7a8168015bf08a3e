"""The last stage of the detector as matrix products in float32: on a CPU, and on a GPU where it is found to be faster.

On a CPU nine tenths of the time is spent here. A 3×3 convolution that looks at every second pixel is four ordinary convolutions,
each on the pixels of one parity: 7 by 7 of a region's 14 by 14. With the positions as the outermost axis every 1×1 convolution is
one product, and for the 3×3 convolutions minimal filtering (see `extractors.computing.filtering`) needs 121 products where the
plain sum takes 441: outputs in tiles of 4 and 3 along each axis. The error of a photograph's features is 1.8e-7 of their length,
against 1.3e-7 with convolutions. The whole stage takes two thirds of the time.

Where MKL's products are slow, oneDNN does the same ones as convolutions of single pixels, with the fields as the outermost axis.

Letters in shapes: ``N`` regions, ``M`` = 4 * N fields of one parity, ``K`` = 121 products, ``C`` channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from extractors.computing.filtering import TAPS, transforms
from extractors.computing.onednn import MergedConvolution, pointwise

__all__ = ["GroupedLastStage", "LastStage"]

_SIDE = 7  # Positions of a field of one parity along one axis.
_TILES = (4, 3)  # Outputs of each tile along one axis.


class LastStage:
    """Stage ``layer4`` of `extractors.regions.bottom_up.network.Head` on pooled regions, with the mean over their pixels.

    Args:
        layer4: the three blocks of the stage, with norms folded, float32 on one device.
    """

    def __init__(self, layer4: nn.Module) -> None:
        self._before, self._after, blocks = _taken_apart(layer4)
        self._blocks = list(blocks)

    def __call__(self, pooled: Tensor) -> Tensor:
        """Compute features: float32 ``[N, 1024, 14, 14]`` to ``[N, 2048]``."""
        count, channels = pooled.shape[:2]
        fields = pooled.view(count, channels, _SIDE, 2, _SIDE, 2).permute(2, 4, 3, 5, 0, 1)
        values = fields.reshape(-1, channels)  # [49 * M, C]; parities vary slower than regions.
        for block in self._blocks:
            values = self._apply(block, values)
        return values.view(-1, count, values.shape[1]).mean(dim=0)

    def _apply(self, block: _Block, values: Tensor) -> Tensor:
        """Apply a block: ``[49 * M, C]`` to ``[49 * M, 2048]``; may overwrite ``values``."""
        hidden = torch.addmm(block.bias1, values, block.weight1).relu_()
        hidden = self._convolve(hidden, block.weight2).add_(block.bias2).relu_()
        if block.shortcut is None:
            values.add_(block.bias3)
        else:
            values = torch.addmm(block.bias3, values, block.shortcut)
        return values.addmm_(hidden, block.weight3).relu_()

    def _convolve(self, values: Tensor, weight: Tensor) -> Tensor:
        """Apply a 3×3 convolution: ``[49 * M, C]`` to the same shape."""
        products, channels, _ = weight.shape
        transformed = (self._before @ values.view(_SIDE**2, -1)).view(products, -1, channels)  # [K, M, C]
        filtered = torch.bmm(transformed, weight)  # [K, M, C]
        return (self._after @ filtered.view(products, -1)).view(-1, channels)


class GroupedLastStage:
    """What `LastStage` is, on a CPU whose products are slow (`extractors.computing.filtering.products_are_slow`).

    Args:
        layer4: as for `LastStage`, on the CPU.
        regions: N of most calls, for which the layout of the weights is chosen.
    """

    def __init__(self, layer4: nn.Module, regions: int) -> None:
        self._before, self._after, blocks = _taken_apart(layer4)
        self._blocks = [_GroupedBlock.of(block, 4 * regions) for block in blocks]

    def __call__(self, pooled: Tensor) -> Tensor:
        """Compute features: float32 ``[N, 1024, 14, 14]`` to ``[N, 2048]``."""
        count, channels = pooled.shape[:2]
        fields = pooled.view(count, channels, _SIDE, 2, _SIDE, 2).permute(3, 5, 0, 2, 4, 1)
        values = _pixels(fields.reshape(-1, channels))  # [1, C, M * 49, 1]
        for block in self._blocks:
            hidden = self._convolve(block.first(values), block)
            values = block.third(hidden, values if block.shortcut is None else block.shortcut(values))
        return _rows(values).view(4, count, _SIDE**2, -1).mean(dim=(0, 2))

    def _convolve(self, values: Tensor, block: _GroupedBlock) -> Tensor:
        """Apply a 3×3 convolution and a ReLU: ``[1, C, M * 49, 1]`` to the same shape."""
        rows = _rows(values).unflatten(0, (-1, _SIDE**2))  # [M, 49, C]
        fields, _, channels = rows.shape
        transformed = torch.bmm(self._before.expand(fields, -1, -1), rows)  # [M, K, C]
        products = _rows(block.second(_pixels(transformed.view(fields, -1)))).view(transformed.shape)
        filtered = torch.bmm(self._after.expand(fields, -1, -1), products)
        return _pixels(filtered.add_(block.bias2).relu_().view(-1, channels))


def _taken_apart(layer4: nn.Module) -> tuple[Tensor, Tensor, Iterator[_Block]]:
    """Return the transforms of inputs, ``[K, 49]``, and of products, ``[49, K]``, and the blocks one by one."""
    weight = next(layer4.parameters())
    before, of_taps, after = (torch.from_numpy(np.kron(one, one)).to(weight) for one in _transforms())
    return before, after, (_Block.of(block, of_taps) for block in layer4.children())


@dataclass(frozen=True)
class _Block:
    """The matrices of a bottleneck, from inputs to outputs. ``bias3`` includes that of the shortcut."""

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor  # [K, C, C], transformed
    bias2: Tensor
    weight3: Tensor
    bias3: Tensor
    shortcut: Tensor | None

    @staticmethod
    def of(block: Any, filters: Tensor) -> _Block:
        """Take a folded bottleneck apart; ``filters``, ``[K, 9]``, transforms its 3×3 filters."""
        first, second, third = block.conv1, block.conv2, block.conv3
        taps = second.weight.permute(2, 3, 1, 0).reshape(filters.shape[1], -1)  # [9, C * C]
        transformed = (filters @ taps).view(len(filters), *second.weight.shape[1::-1])
        bias, shortcut = third.bias, None
        if block.downsample is not None:
            aside = block.downsample[0]
            bias, shortcut = bias + aside.bias, _matrix(aside)
        return _Block(_matrix(first), first.bias, transformed, second.bias, _matrix(third), bias, shortcut)


@dataclass(frozen=True)
class _GroupedBlock:
    """The products of a bottleneck as convolutions of single pixels: the first and the third with their bias and ReLU."""

    first: MergedConvolution
    second: MergedConvolution
    bias2: Tensor
    third: MergedConvolution
    shortcut: MergedConvolution | None

    @staticmethod
    def of(block: _Block, fields: int) -> _GroupedBlock:
        """Lay out the matrices of a block for so many fields."""

        def merged(matrices: Tensor, rows: int, bias: Tensor | None = None) -> MergedConvolution:
            conv = pointwise(matrices, bias)
            return MergedConvolution(conv, (1, conv.in_channels, rows, 1), relu=bias is not None)

        pixels = fields * _SIDE**2
        return _GroupedBlock(
            merged(block.weight1[None], pixels, block.bias1),
            merged(block.weight2, fields),
            block.bias2,
            merged(block.weight3[None], pixels, block.bias3),
            None if block.shortcut is None else merged(block.shortcut[None], pixels),
        )


def _pixels(rows: Tensor) -> Tensor:
    """Return rows ``[R, C]`` as the pixels of one image, ``[1, C, R, 1]``, in the same memory."""
    return rows.view(1, len(rows), 1, -1).permute(0, 3, 1, 2)


def _rows(pixels: Tensor) -> Tensor:
    """Return what `_pixels` was given."""
    return pixels.permute(0, 2, 3, 1).flatten(0, 2)


def _matrix(conv: nn.Conv2d) -> Tensor:
    """Return the weight of a 1×1 convolution as ``[inputs, outputs]``."""
    return conv.weight.flatten(1).t()


def _transforms() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the matrices along one axis: of the inputs ``[11, 7]``, of the filter ``[11, 3]``, and of the products ``[7, 11]``.

    A tile sees the inputs of its outputs and one more on both sides; inputs outside of the field are zero and left out.
    """
    before, filters, after = [], [], []
    start = 0
    for outputs in _TILES:
        of_inputs, of_filter, of_products = transforms(outputs)
        inputs = len(of_inputs)
        placed = np.zeros((inputs, _SIDE + TAPS - 1))
        placed[:, start : start + inputs] = of_inputs
        before.append(placed[:, 1:-1])
        filters.append(of_filter)
        outcome = np.zeros((_SIDE, inputs))
        outcome[start : start + outputs] = of_products
        after.append(outcome)
        start += outputs
    return np.concatenate(before), np.concatenate(filters), np.concatenate(after, axis=1)

"""The last stage of the detector, ``layer4`` of `extractors.regions.bottom_up.network.Head`, on max-pooled regions.

Pooling is faithful to ``roi_pooling_layer.cpp`` of Fast R-CNN, Caffe's rounding included, with the bits of torchvision's
``roi_pool``. Regions overlap, and those of less than 224 pixels have bins of one or two cells a side: of the 58,800 bins of 300
proposals, 6,000 to 9,000 were distinct. So on a CPU, where most of the time is spent here, each distinct bin is pooled once, with
the channels innermost in memory. Two layers look at single bins, the first 1×1 convolution and that of the shortcut: they are
computed once for each distinct bin, too, and each region takes the results from there.

In float32 the rest is matrix products, on a GPU too: cuDNN's kernel for dilated 3×3 convolutions in float32 was 50 times as slow.
A 3×3 convolution that looks at every second pixel is four ordinary convolutions, each on the pixels of one parity: 7 by 7 of a
region's 14 by 14. With the positions as the outermost axis every 1×1 convolution is one product, and for the 3×3 convolutions
Winograd's algorithm (see `extractors.computing.winograd`) needs 121 products where the plain sum takes 441: outputs in tiles of 4
and 3 along each axis. The error of a photograph's features is 1.8e-7 of their length, against 1.3e-7 with convolutions. Where
MKL's products are slow, oneDNN does the same ones as convolutions of single pixels, with the fields as the outermost axis.

Letters in shapes: ``N`` regions, ``P`` = 14 rows and columns of a pooled region, ``B`` distinct bins, ``M`` = 4 * N fields of one
parity, ``K`` = 121 products, ``C`` channels, ``h`` and ``w`` cells of a map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from extractors.computing.fused_conv2d import FusedConv2d, pointwise
from extractors.computing.winograd import KERNEL_SIZE, winograd_matrices

_SIDE = 7  # Positions of a field of one parity along one axis.
_POOLED = 2 * _SIDE  # Rows and columns of a pooled region.
_TILES = (4, 3)  # Outputs of each tile along one axis.


class LastStage(ABC):
    """The stage, in two steps: on bins, and on regions."""

    @abstractmethod
    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Compute what regions share: of bins ``[B, 1024]``, whatever `finish` takes, ``[B, C]`` each."""

    @abstractmethod
    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features.

        Args:
            shared: from `share`; all bins of all calls put together.
            index: int64 ``[N, 14, 14]``, the bins of each region.

        Returns:
            float32 ``[N, 2048]``.
        """

    def __call__(self, pooled: Tensor) -> Tensor:
        """Compute features of pooled regions: ``[N, 1024, 14, 14]`` to float32 ``[N, 2048]``."""
        bins = pooled.permute(0, 2, 3, 1).flatten(0, 2)
        index = torch.arange(len(bins), device=bins.device).view(-1, _POOLED, _POOLED)
        return self.finish(self.share(bins), index)


class PlainStage(LastStage):
    """The stage on each region by itself.

    Args:
        head: from ``[N, 1024, 14, 14]`` to ``[N, 2048]``.
    """

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self._head = head

    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Return the bins."""
        return (bins,)

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        return self._head(_regions(shared[0], index))


class MergedStage(LastStage):
    """The stage as convolutions merged with what follows them, see `extractors.computing.fused_conv2d`, on the CPU.

    Args:
        layer4: the three blocks of the stage, with norms folded, of a type of which convolutions are merged on this processor.
        regions: N of most calls, for which the layout of the weights is chosen.
    """

    def __init__(self, layer4: nn.Module, regions: int) -> None:
        def merged(conv: nn.Conv2d, *, relu: bool = True) -> FusedConv2d:
            return FusedConv2d(conv, (regions, conv.in_channels, _POOLED, _POOLED), relu=relu)

        blocks: list[Any] = list(layer4.children())
        self._blocks = [[merged(conv) for conv in (block.conv1, block.conv2, block.conv3)] for block in blocks]
        self._shortcut = merged(blocks[0].downsample[0], relu=False)

    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Apply the first convolution with its ReLU, and that of the shortcut, see `LastStage.share`."""
        pixels = _pixels(bins)
        return _rows(self._blocks[0][0](pixels)), _rows(self._shortcut(pixels))

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        hidden, maps = (_regions(table, index) for table in shared)
        for number, (first, second, third) in enumerate(self._blocks):
            hidden = first(maps) if number else hidden
            maps = third(second(hidden), maps)
        return maps.to(torch.float32).mean(dim=(2, 3))


class ProductStage(LastStage):
    """The stage as matrix products.

    Args:
        layer4: the three blocks of the stage, with norms folded, float32 on one device.
    """

    def __init__(self, layer4: nn.Module) -> None:
        self._before, self._after, blocks = _taken_apart(layer4)
        self._blocks = list(blocks)

    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Apply the first product with its ReLU, and that of the shortcut, see `LastStage.share`."""
        block = self._blocks[0]
        assert block.shortcut is not None
        return torch.addmm(block.bias1, bins, block.weight1).relu_(), torch.addmm(block.bias3, bins, block.shortcut)

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        order = index.view(-1, _SIDE, 2, _SIDE, 2).permute(1, 3, 2, 4, 0).flatten()  # Parities vary slower than regions.
        hidden, values = (table.index_select(0, order) for table in shared)  # [49 * M, C]
        values = self._finish(self._blocks[0], hidden, values)
        for block in self._blocks[1:]:
            hidden = torch.addmm(block.bias1, values, block.weight1).relu_()
            values = self._finish(block, hidden, values.add_(block.bias3))
        return values.view(-1, len(index), values.shape[1]).mean(dim=0)

    def _finish(self, block: _Block, hidden: Tensor, aside: Tensor) -> Tensor:
        """Apply the rest of a block: ``[49 * M, C]``, and what is added to it, overwritten, to ``[49 * M, 2048]``."""
        hidden = self._convolve(hidden, block.weight2).add_(block.bias2).relu_()
        return aside.addmm_(hidden, block.weight3).relu_()

    def _convolve(self, values: Tensor, weight: Tensor) -> Tensor:
        """Apply a 3×3 convolution: ``[49 * M, C]`` to the same shape."""
        products, channels, _ = weight.shape
        transformed = (self._before @ values.view(_SIDE**2, -1)).view(products, -1, channels)  # [K, M, C]
        filtered = torch.bmm(transformed, weight)  # [K, M, C]
        return (self._after @ filtered.view(products, -1)).view(-1, channels)


class GroupedStage(LastStage):
    """The same as `ProductStage`, on a CPU whose products are slow (`extractors.computing.winograd.prefers_onednn`).

    Args:
        layer4: as for `ProductStage`, on the CPU.
        regions: N of most calls, for which the layout of the weights is chosen.
    """

    def __init__(self, layer4: nn.Module, regions: int) -> None:
        self._before, self._after, blocks = _taken_apart(layer4)
        self._blocks = [_GroupedBlock.of(block, 4 * regions) for block in blocks]

    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Apply the first product with its ReLU, and that of the shortcut, see `LastStage.share`."""
        pixels, block = _pixels(bins), self._blocks[0]
        assert block.shortcut is not None
        return _rows(block.first(pixels)), _rows(block.shortcut(pixels))

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        order = index.view(-1, _SIDE, 2, _SIDE, 2).permute(2, 4, 0, 1, 3).flatten()
        hidden, values = (_pixels(table.index_select(0, order)) for table in shared)  # [1, C, M * 49, 1]
        for number, block in enumerate(self._blocks):
            hidden = block.first(values) if number else hidden
            values = block.third(self._convolve(hidden, block), values)
        return _rows(values).view(4, len(index), _SIDE**2, -1).mean(dim=(0, 2))

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

    first: FusedConv2d
    second: FusedConv2d
    bias2: Tensor
    third: FusedConv2d
    shortcut: FusedConv2d | None

    @staticmethod
    def of(block: _Block, fields: int) -> _GroupedBlock:
        """Lay out the matrices of a block for so many fields."""

        def merged(matrices: Tensor, rows: int, bias: Tensor | None = None) -> FusedConv2d:
            conv = pointwise(matrices, bias)
            return FusedConv2d(conv, (1, conv.in_channels, rows, 1), relu=bias is not None)

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


def _regions(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a table, ``[B, C]``, that regions have, as their maps: ``[N, C, 14, 14]``, channels innermost."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1).permute(0, 3, 1, 2)


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
        of_inputs, of_filter, of_products = winograd_matrices(outputs)
        inputs = len(of_inputs)
        placed = np.zeros((inputs, _SIDE + KERNEL_SIZE - 1))
        placed[:, start : start + inputs] = of_inputs
        before.append(placed[:, 1:-1])
        filters.append(of_filter)
        outcome = np.zeros((_SIDE, inputs))
        outcome[start : start + outputs] = of_products
        after.append(outcome)
        start += outputs
    return np.concatenate(before), np.concatenate(filters), np.concatenate(after, axis=1)


_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def distinct_bins(boxes: Tensor, side: int, scale: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Find the bins of the regions of an image.

    Args:
        boxes: float32 ``[N, 4]``, x1 y1 x2 y2 in pixels.
        side: P.
        scale: cells for each pixel.
        height: h.
        width: w.

    Returns:
        The bins, int64 ``[K, 4]``: rows and columns of cells, first row, first column, all zero for those without cells; in
        order, so that bins of one size stand together. And which of them each region has, int64 ``[N, P, P]``.
    """
    lefts, columns = _bins(boxes[:, 0], boxes[:, 2], side, scale, width)
    tops, rows = _bins(boxes[:, 1], boxes[:, 3], side, scale, height)
    high, wide = height + 1, width + 1  # A box beyond the map begins behind its last cell.
    keys = ((rows[:, :, None] * wide + columns[:, None]) * high + tops[:, :, None]) * wide + lefts[:, None]
    keys[(rows[:, :, None] * columns[:, None]) == 0] = 0
    found, index = keys.unique(return_inverse=True)
    return torch.stack(torch.unravel_index(found, (high, wide, high, wide)), dim=1), index


def pool_bins(maps: Tensor, bins: Tensor) -> Tensor:
    """Find the greatest of the cells of each bin.

    Args:
        maps: ``[1, C, h, w]`` on the CPU, none of them negative, as behind a ReLU: such numbers are in the order of their bits.
        bins: int64 ``[K, 4]``, from `distinct_bins`.

    Returns:
        ``[K, C]`` in the type of the maps. Bins without cells are zero.
    """
    cells = maps[0].permute(1, 2, 0).contiguous().view(_INTEGERS[maps.dtype])  # [h, w, C]
    across = cells.shape[1]
    cells = cells.flatten(0, 1)
    pooled = cells.new_zeros(len(bins), cells.shape[1])
    sizes, counts = bins[:, :2].unique_consecutive(dim=0, return_counts=True)
    for (rows, columns), of_size, corners in zip(
        sizes.tolist(),
        pooled.split(counts.tolist()),
        (bins[:, 2] * across + bins[:, 3]).split(counts.tolist()),
        strict=True,
    ):
        for number, (down, right) in enumerate(product(range(rows), range(columns))):
            found = cells.index_select(0, corners + (down * across + right))
            torch.maximum(of_size, found, out=of_size) if number else of_size.copy_(found)
    return pooled.view(maps.dtype)


def _bins(starts: Tensor, ends: Tensor, side: int, scale: float, cells: int) -> tuple[Tensor, Tensor]:
    """Return the first cell of each bin along an axis, and the number of its cells: int64 ``[N, P]``."""
    start, end = ((at.to(torch.float64) * scale + 0.5).floor().to(torch.float32) for at in (starts, ends))  # Halves go up.
    size = ((end - start + 1).clamp(min=1) / side)[:, None]
    numbers = torch.arange(side, dtype=torch.float32)
    first, last = ((numbers * size).floor() + start[:, None]).clamp(0, cells), ((numbers + 1) * size).ceil() + start[:, None]
    return first.long(), (last.clamp(0, cells) - first).clamp(min=0).long()

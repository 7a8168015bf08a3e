"""RoI pooling and res5 head of the detector.

Most CPU time of the extractor is spent here. The head, ``layer4`` of
`extractors.regions.bottom_up.network.Head`, has four implementations:

===============  ===============================  ============================================================================
class            used for                         idea
===============  ===============================  ============================================================================
`PlainStage`     reference; CPU without the rest  torch's layers on each region
`MergedStage`    bf16 on a CPU                    convolutions with fused residual add and ReLU (oneDNN)
`ProductStage`   fp32, MKL or GPU                 matrix products; Winograd convolution on the four stride-2 phases
`GroupedStage`   fp32, CPU with slow MKL          products of `ProductStage` as grouped 1×1 convolutions (oneDNN)
===============  ===============================  ============================================================================

Pooling has the bits of torchvision's ``roi_pool`` and of ``roi_pooling_layer.cpp`` of Fast R-CNN. Regions overlap, so on a CPU each
distinct bin is pooled once. The first 1×1 convolution and that of the shortcut are also computed once per distinct bin.

A 3×3 convolution with dilation 2 is four ordinary convolutions, one per stride-2 phase: 7×7 positions of a region's 14×14. With
tiles of 4 and 3 outputs along each axis, Winograd convolution (`extractors.computing.winograd`) needs 121 products instead of 441.

Shapes: ``N`` regions, ``P`` = 14 rows and columns of a pooled region, ``B`` distinct bins, ``M`` = 4 * N
phases, ``K`` = 121 products, ``C`` channels, ``h`` and ``w`` cells of a feature map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from extractors.computing.fused_conv2d import FusedConv2d, pointwise
from extractors.computing.winograd import winograd_matrices

_SIDE = 7  # Positions of a phase along one axis.
_POOLED = 2 * _SIDE  # Rows and columns of a pooled region.
_TILES = (4, 3)  # Outputs of each tile along one axis.
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class LastStage(ABC):
    """Interface of the res5 head in two steps, per bin and per region."""

    @abstractmethod
    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Apply the layers on single bins: ``[B, 1024]`` to tables ``[B, C]``."""

    @abstractmethod
    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features.

        Args:
            shared: concatenated tables from `share`.
            index: int64 ``[N, 14, 14]``, bin indices of each region.

        Returns:
            float32 ``[N, 2048]``.
        """

    def __call__(self, pooled: Tensor) -> Tensor:
        """Compute region features: ``[N, 1024, 14, 14]`` to float32 ``[N, 2048]``."""
        bins = pooled.permute(0, 2, 3, 1).flatten(0, 2)
        index = torch.arange(len(bins), device=bins.device).view(-1, _POOLED, _POOLED)
        return self.finish(self.share(bins), index)


class PlainStage(LastStage):
    """Res5 head by a module from ``[N, 1024, 14, 14]`` to ``[N, 2048]``."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        self._head = head

    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Return the bins."""
        return (bins,)

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        return self._head(_gather_regions(shared[0], index))


class MergedStage(LastStage):
    """Res5 head of `FusedConv2d` layers on a CPU.

    Args:
        layer4: three blocks with folded norms, in a dtype for which `can_fuse_in` is True.
        regions: usual N, for the weight layout.
    """

    def __init__(self, layer4: nn.Module, regions: int) -> None:
        def fuse(conv: nn.Conv2d, *, relu: bool = True) -> FusedConv2d:
            return FusedConv2d(conv, (regions, conv.in_channels, _POOLED, _POOLED), relu=relu)

        blocks: list[Any] = list(layer4.children())
        self._blocks: list[Sequence[Callable[..., Tensor]]] = [
            [fuse(conv) for conv in (block.conv1, block.conv2, block.conv3)] for block in blocks
        ]
        self._shortcut = fuse(blocks[0].downsample[0], relu=False)

    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Apply the first convolution with its ReLU, and that of the shortcut."""
        pixels = _pixels(bins)
        return _to_rows(self._blocks[0][0](pixels)), _to_rows(self._shortcut(pixels))

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        hidden, maps = (_gather_regions(table, index) for table in shared)
        return self._run_blocks(hidden, maps).to(torch.float32).mean(dim=(2, 3))

    def _run_blocks(self, hidden: Tensor, values: Tensor) -> Tensor:
        for i, (first, second, third) in enumerate(self._blocks):
            hidden = first(values) if i else hidden
            values = third(second(hidden), values)
        return values


class ProductStage(LastStage):
    """Res5 head of matrix products, for three float32 blocks with folded norms."""

    def __init__(self, layer4: nn.Module) -> None:
        self._b_t, self._a_t, self._shortcut, blocks = _decompose(layer4)
        self._blocks = list(blocks)

    def share(self, bins: Tensor) -> tuple[Tensor, ...]:
        """Apply the first product with its ReLU, and that of the shortcut."""
        block = self._blocks[0]
        return torch.addmm(block.bias1, bins, block.weight1).relu_(), torch.addmm(block.bias3, bins, self._shortcut)

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        order = index.view(-1, _SIDE, 2, _SIDE, 2).permute(1, 3, 2, 4, 0).flatten()  # Positions, phases, regions.
        hidden, values = (table.index_select(0, order) for table in shared)  # [49 * M, C]
        values = self._finish_block(self._blocks[0], hidden, values)
        for block in self._blocks[1:]:
            hidden = torch.addmm(block.bias1, values, block.weight1).relu_()
            values = self._finish_block(block, hidden, values.add_(block.bias3))
        return values.view(-1, len(index), values.shape[1]).mean(dim=0)

    def _finish_block(self, block: _Block, hidden: Tensor, residual: Tensor) -> Tensor:
        """Apply the 3×3 and last convolution to ``[49 * M, C]``; overwrites ``residual``."""
        hidden = self._convolve(hidden, block.weight2).add_(block.bias2).relu_()
        return residual.addmm_(hidden, block.weight3).relu_()

    def _convolve(self, values: Tensor, weight: Tensor) -> Tensor:
        """Apply a 3×3 convolution to ``[49 * M, C]``, with equal output shape."""
        products, channels, _ = weight.shape
        transformed = (self._b_t @ values.view(_SIDE**2, -1)).view(products, -1, channels)  # [K, M, C]
        filtered = torch.bmm(transformed, weight)  # [K, M, C]
        return (self._a_t @ filtered.view(products, -1)).view(-1, channels)


class GroupedStage(MergedStage):
    """Res5 head of grouped 1×1 convolutions, see `winograd.prefers_onednn`.

    ``layer4`` is that of `ProductStage`, on the CPU.
    """

    def __init__(self, layer4: nn.Module, regions: int) -> None:
        phases = 4 * regions
        pixels = phases * _SIDE**2

        def fuse(matrices: Tensor, rows: int, bias: Tensor | None = None) -> FusedConv2d:
            conv = pointwise(matrices, bias)
            return FusedConv2d(conv, (1, conv.in_channels, rows, 1), relu=bias is not None)

        b_t, a_t, shortcut, blocks = _decompose(layer4)
        self._shortcut = fuse(shortcut[None], pixels)
        self._blocks = []
        for block in blocks:
            first = fuse(block.weight1[None], pixels, block.bias1)
            second = partial(_convolve_phases, b_t, a_t, fuse(block.weight2, phases), block.bias2)
            third = fuse(block.weight3[None], pixels, block.bias3)
            self._blocks.append((first, second, third))

    def finish(self, shared: tuple[Tensor, ...], index: Tensor) -> Tensor:
        """Compute features, see `LastStage.finish`."""
        order = index.view(-1, _SIDE, 2, _SIDE, 2).permute(2, 4, 0, 1, 3).flatten()
        hidden, values = (_pixels(table.index_select(0, order)) for table in shared)  # [1, C, M * 49, 1]
        return _to_rows(self._run_blocks(hidden, values)).view(4, len(index), _SIDE**2, -1).mean(dim=(0, 2))


def _convolve_phases(b_t: Tensor, a_t: Tensor, products: FusedConv2d, bias: Tensor, values: Tensor) -> Tensor:
    """Apply a 3×3 convolution and a ReLU to ``[1, C, M * 49, 1]``."""
    rows = _to_rows(values).unflatten(0, (-1, _SIDE**2))  # [M, 49, C]
    phases, _, channels = rows.shape
    transformed = torch.bmm(b_t.expand(phases, -1, -1), rows)  # [M, K, C]
    filtered = _to_rows(products(_pixels(transformed.view(phases, -1)))).view(transformed.shape)
    outputs = torch.bmm(a_t.expand(phases, -1, -1), filtered)
    return _pixels(outputs.add_(bias).relu_().view(-1, channels))


def _decompose(layer4: nn.Module) -> tuple[Tensor, Tensor, Tensor, Iterator[_Block]]:
    """Return transforms ``[K, 49]`` and ``[49, K]``, weights of the shortcut, blocks."""
    blocks: list[Any] = list(layer4.children())
    shortcut = _matrix(blocks[0].downsample[0])
    b_t, g, a_t = (torch.from_numpy(np.kron(matrix, matrix)).to(shortcut) for matrix in _phase_matrices())
    return b_t, a_t, shortcut, (_Block.of(block, g) for block in blocks)


@dataclass(frozen=True)
class _Block:
    """Matrices of a bottleneck, ``[inputs, outputs]``."""

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor  # [K, C, C], transformed
    bias2: Tensor
    weight3: Tensor
    bias3: Tensor  # Includes the bias of the shortcut.

    @staticmethod
    def of(block: Any, filters: Tensor) -> _Block:
        """Convert a bottleneck; ``filters``, ``[K, 9]``, transforms its 3×3 filters."""
        first, second, third = block.conv1, block.conv2, block.conv3
        taps = second.weight.permute(2, 3, 1, 0).reshape(filters.shape[1], -1)  # [9, C * C]
        transformed = (filters @ taps).view(len(filters), *second.weight.shape[1::-1])
        bias = third.bias if block.downsample is None else third.bias + block.downsample[0].bias
        return _Block(_matrix(first), first.bias, transformed, second.bias, _matrix(third), bias)


def _pixels(rows: Tensor) -> Tensor:
    """View rows ``[R, C]`` as the pixels of one image, ``[1, C, R, 1]``."""
    return rows.view(1, len(rows), 1, -1).permute(0, 3, 1, 2)


def _to_rows(pixels: Tensor) -> Tensor:
    """Invert `_pixels`."""
    return pixels.permute(0, 2, 3, 1).flatten(0, 2)


def _gather_regions(table: Tensor, index: Tensor) -> Tensor:
    """Gather rows ``[B, C]`` to regions ``[N, C, 14, 14]``, channels last."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1).permute(0, 3, 1, 2)


def _matrix(conv: nn.Conv2d) -> Tensor:
    return conv.weight.flatten(1).t()  # [inputs, outputs]


def _phase_matrices() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``B_t`` ``[11, 7]``, ``G`` ``[11, 3]`` and ``A_t`` ``[7, 11]``.

    A tile depends on the inputs of its outputs and one more on both sides; inputs outside of the phase are zero padding.
    """
    b_ts, gs, a_ts = [], [], []
    start = 0
    for outputs in _TILES:
        b_t, g, a_t = winograd_matrices(outputs)
        around = (start, _SIDE - start - outputs)
        b_ts.append(np.pad(b_t, ((0, 0), around))[:, 1:-1])
        gs.append(g)
        a_ts.append(np.pad(a_t, (around, (0, 0))))
        start += outputs
    return np.concatenate(b_ts), np.concatenate(gs), np.concatenate(a_ts, axis=1)


def distinct_bins(boxes: Tensor, side: int, scale: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the distinct RoI pooling bins of an image's regions.

    ``boxes`` are float32 ``[N, 4]``, x1 y1 x2 y2 in pixels. ``side`` is P, ``scale`` is in cells per pixel.

    Returns:
        int64 ``[B, 4]``: number of rows and columns, first row, first column (zero for empty bins), grouped
        by size; and int64 ``[N, P, P]``, the bin indices of each region.
    """
    lefts, columns = _bins(boxes[:, 0], boxes[:, 2], side, scale, width)
    tops, rows = _bins(boxes[:, 1], boxes[:, 3], side, scale, height)
    high, wide = height + 1, width + 1  # Boxes outside of the image start after the last cell.
    keys = ((rows[:, :, None] * wide + columns[:, None]) * high + tops[:, :, None]) * wide + lefts[:, None]
    keys[(rows[:, :, None] * columns[:, None]) == 0] = 0
    distinct, index = keys.unique(return_inverse=True)
    return torch.stack(torch.unravel_index(distinct, (high, wide, high, wide)), dim=1), index


def pool_bins(maps: Tensor, bins: Tensor) -> Tensor:
    """Max-pool the cells of each bin.

    Args:
        maps: ``[1, C, h, w]`` on the CPU, not negative, so that values are ordered as their bits.
        bins: int64 ``[B, 4]``, from `distinct_bins`.

    Returns:
        ``[B, C]`` in the dtype of the maps; zero for empty bins.
    """
    cells = maps[0].permute(1, 2, 0).contiguous().view(_INTEGERS[maps.dtype])  # [h, w, C]
    width = cells.shape[1]
    cells = cells.flatten(0, 1)
    pooled = cells.new_zeros(len(bins), cells.shape[1])
    sizes, counts = bins[:, :2].unique_consecutive(dim=0, return_counts=True)
    groups = pooled.split(counts.tolist())
    corners = (bins[:, 2] * width + bins[:, 3]).split(counts.tolist())
    for (rows, columns), group, corner in zip(sizes.tolist(), groups, corners, strict=True):
        for i, (down, right) in enumerate(product(range(rows), range(columns))):
            values = cells.index_select(0, corner + (down * width + right))
            torch.maximum(group, values, out=group) if i else group.copy_(values)
    return pooled.view(maps.dtype)


def _bins(starts: Tensor, ends: Tensor, side: int, scale: float, cells: int) -> tuple[Tensor, Tensor]:
    """Return first cell and number of cells of bins along an axis: int64 ``[N, P]``."""
    start, end = ((at.to(torch.float64) * scale + 0.5).floor().to(torch.float32) for at in (starts, ends))  # Round half up.
    size = ((end - start + 1).clamp(min=1) / side)[:, None]
    indices = torch.arange(side, dtype=torch.float32)
    first, last = ((indices * size).floor() + start[:, None]).clamp(0, cells), ((indices + 1) * size).ceil() + start[:, None]
    return first.long(), (last.clamp(0, cells) - first).clamp(min=0).long()

"""Max-pooling of regions on a CPU: each bin once, with the channels innermost in memory, so that they are compared many at once.

Faithful to ``roi_pooling_layer.cpp`` of Fast R-CNN, Caffe's rounding included, as torchvision's ``roi_pool`` is, which goes through
the cells of each channel one by one. The bits are the same: the greatest of some numbers is one of them.

Regions overlap, and those of less than 224 pixels have bins of one or two cells a side, so that many bins are of the same cells: of
the 58,800 bins of 300 proposals, 6,000 to 9,000 were distinct. What is pooled from them, and what the first layers make of
that (see `extractors.regions.bottom_up.last_stage`), is the same for all regions.

Letters in shapes: ``C`` channels, ``h`` and ``w`` cells of a map, ``N`` regions, ``P`` rows and columns of a pooled region, ``K``
distinct bins.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

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

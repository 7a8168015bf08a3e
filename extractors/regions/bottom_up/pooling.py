"""Max-pooling of regions on a CPU, with the channels innermost in memory, so that they are compared many at once.

Faithful to ``roi_pooling_layer.cpp`` of Fast R-CNN, Caffe's rounding included, as torchvision's ``roi_pool`` is, which goes through
the cells of each channel one by one and takes eight times as long. The bits are the same: the greatest of some numbers is one of
them.

Letters in shapes: ``C`` channels, ``h`` and ``w`` cells of a map, ``N`` regions, ``P`` rows and columns of a pooled region.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pool_cells"]

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def pool_cells(maps: Tensor, boxes: Tensor, side: int, scale: float) -> Tensor:
    """Max-pool each region of an image.

    Args:
        maps: ``[1, C, h, w]`` on the CPU, none of them negative, as behind a ReLU: such numbers are in the order of their bits.
        boxes: float32 ``[N, 4]``, x1 y1 x2 y2 in pixels.
        side: P.
        scale: cells for each pixel.

    Returns:
        ``[N, C, P, P]`` in the type of the maps, with the channels innermost in memory. Bins outside of the map are zero.
    """
    cells = maps[0].permute(1, 2, 0).contiguous().view(_INTEGERS[maps.dtype])  # [h, w, C]
    height, width, channels = cells.shape
    lefts, rights = _bins(boxes[:, 0], boxes[:, 2], side, scale, width)
    tops, bottoms = _bins(boxes[:, 1], boxes[:, 3], side, scale, height)
    pooled = cells.new_zeros(len(boxes), side, side, channels)
    for region, left, right, top, bottom in zip(pooled, lefts, rights, tops, bottoms, strict=True):
        first, last = int(left.min()), int(right.max())
        if last <= first or bool((bottom <= top).all()):
            continue
        rows = _greatest(cells[:, first:last], 0, top, bottom)
        region.copy_(_greatest(rows, 1, left - first, right - first))
        region[bottom <= top] = 0
        region[:, right <= left] = 0
    return pooled.view(maps.dtype).permute(0, 3, 1, 2)


def _bins(starts: Tensor, ends: Tensor, side: int, scale: float, cells: int) -> tuple[Tensor, Tensor]:
    """Return the first cell of each bin along an axis, and the one behind the last: int64 ``[N, P]``, equal where there is none."""
    start, end = ((at.to(torch.float64) * scale + 0.5).floor().to(torch.float32) for at in (starts, ends))  # Halves go up.
    size = ((end - start + 1).clamp(min=1) / side)[:, None]
    numbers = torch.arange(side, dtype=torch.float32)
    first, last = (numbers * size).floor() + start[:, None], ((numbers + 1) * size).ceil() + start[:, None]
    return first.clamp(0, cells).long(), last.clamp(0, cells).long()


def _greatest(cells: Tensor, axis: int, first: Tensor, last: Tensor) -> Tensor:
    """Return the greatest of the cells of each bin along an axis; for a bin without cells, any."""
    most = (last - 1).clamp(min=0)
    found = cells.index_select(axis, torch.minimum(first, most))
    for step in range(1, int((last - first).max())):
        torch.maximum(found, cells.index_select(axis, torch.minimum(first + step, most)), out=found)
    return found

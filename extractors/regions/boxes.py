"""Arithmetic of boxes as in Caffe's Faster R-CNN: a box includes its far corner, so a side is one longer than the difference.

The order of the operations is that of ``lib/rpn`` and ``lib/fast_rcnn/bbox_transform.py`` in
github.com/peteanderson80/bottom-up-attention, in float32, because comparisons decide which regions are chosen.

Letters in shapes: ``A`` anchors of a cell, ``N`` and ``M`` boxes. A box is x1, y1, x2, y2 in pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STRIDE = 16
"""Distance of neighbouring cells of the feature map, in pixels of the image."""

_RATIOS = (0.5, 1.0, 2.0)  # height over width
_SCALES = (4, 8, 16, 32)
_MOST_GROWTH = math.log(1000 / 16)


def cell_anchors() -> Tensor:
    """Return the twelve anchors of the cell at 0, 0: three shapes (the outer loop) in four sizes.

    The window of 16 by 16 pixels takes on each ratio with both sides rounded (half to even: 23 by 12, 16 by 16, 11 by 22), then
    each scale, around its centre at 7.5. Source: ``lib/rpn/generate_anchors.py``.

    Returns:
        float32 ``[12, 4]``.
    """
    centre = (STRIDE - 1) / 2
    anchors = []
    for ratio in _RATIOS:
        width = round(math.sqrt(STRIDE * STRIDE / ratio))
        height = round(width * ratio)
        for scale in _SCALES:
            right, down = (width * scale - 1) / 2, (height * scale - 1) / 2
            anchors.append((centre - right, centre - down, centre + right, centre + down))
    return torch.tensor(anchors, dtype=torch.float32)


def anchor_grid(anchors: Tensor, rows: int, columns: int) -> Tensor:
    """Return the anchors of every cell of a feature map.

    Args:
        anchors: ``[A, 4]``, anchors of the cell at 0, 0.
        rows: rows of the map.
        columns: columns of the map.

    Returns:
        ``[rows * columns * A, 4]``: row by row, within a row column by column, within a cell anchor by anchor.
    """
    y, x = torch.meshgrid(
        torch.arange(rows, device=anchors.device) * STRIDE, torch.arange(columns, device=anchors.device) * STRIDE, indexing="ij"
    )
    shifts = torch.stack((x, y, x, y), dim=-1).to(anchors.dtype)  # [rows, columns, 4]
    return (shifts[:, :, None] + anchors).view(-1, 4)


def decode(anchors: Tensor, deltas: Tensor) -> Tensor:
    """Move and stretch boxes.

    As in Caffe, the far corner is not moved back by one pixel, so decoding zeros makes a box one pixel longer. Growth is limited to
    1000 / 16 times, as in MILVLG's port; the original has no limit, but later clips the box to the image, as the port does.

    Args:
        anchors: ``[N, 4]``.
        deltas: ``[..., N, 4]``: shift of the centre as a multiple of the sides, logarithm of the growth of the sides.

    Returns:
        ``[..., N, 4]``.
    """
    sides = anchors[:, 2:] - anchors[:, :2] + 1
    centres = deltas[..., :2] * sides + (anchors[:, :2] + 0.5 * sides)
    halves = 0.5 * (deltas[..., 2:].clamp(max=_MOST_GROWTH).exp() * sides)
    return torch.cat((centres - halves, centres + halves), dim=-1)


def clip(boxes: Tensor, width: int, height: int) -> Tensor:
    """Move corners outside of an image to its outermost pixels, ``width - 1`` and ``height - 1``.

    Args:
        boxes: ``[..., 4]``.
        width: width of the image in pixels.
        height: height of the image in pixels.
    """
    limit = boxes.new_empty(4)  # Filled on its device: a tensor of numbers would be copied there.
    limit[0::2].fill_(width - 1)
    limit[1::2].fill_(height - 1)
    return boxes.clamp(min=0).minimum(limit)


def is_larger(boxes: Tensor, side: float | Tensor) -> Tensor:
    """Tell which boxes have both sides longer than a limit, and their corners in order.

    A side of exactly this length is too short, as in MILVLG's port; the original keeps it.

    Args:
        boxes: ``[..., N, 4]``.
        side: the limit in pixels; of several images ``[..., 1]``.

    Returns:
        bool ``[..., N]``.
    """
    shortest = (boxes[..., 2:] - boxes[..., :2]).amin(dim=-1)
    return (shortest > 0) & (shortest + 1 > side)


def iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of all pairs of boxes and others.

    Args:
        boxes: ``[..., N, 4]``.
        others: ``[..., M, 4]``.

    Returns:
        ``[..., N, M]``, in 0…1.
    """
    shared = _common_length(boxes, others, 0) * _common_length(boxes, others, 1)
    return shared / (_areas(boxes)[..., None] + _areas(others)[..., None, :] - shared)


def _common_length(boxes: Tensor, others: Tensor, axis: int) -> Tensor:
    start = torch.maximum(boxes[..., None, axis], others[..., None, :, axis])
    end = torch.minimum(boxes[..., None, axis + 2], others[..., None, :, axis + 2])
    return (end - start + 1).clamp_(min=0)


def _areas(boxes: Tensor) -> Tensor:
    sides = boxes[..., 2:] - boxes[..., :2] + 1
    return sides[..., 0] * sides[..., 1]

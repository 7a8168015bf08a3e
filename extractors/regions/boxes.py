"""Arithmetic of boxes as Caffe's Faster R-CNN did it: a box holds its far corner, so a side is one longer than the difference.

The order of the operations is that of ``lib/rpn`` and ``lib/fast_rcnn/bbox_transform.py`` in
github.com/peteanderson80/bottom-up-attention, in float32, because the choice of regions hangs on comparisons.

Letters in shapes: ``A`` anchors of a cell, ``N`` and ``M`` boxes. A box is x1, y1, x2, y2 in pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["STRIDE", "anchor_grid", "cell_anchors", "clip", "decode", "iou", "is_larger"]

STRIDE = 16
"""Pixels of the image from one cell of the feature map to the next."""

_RATIOS = (0.5, 1.0, 2.0)  # height over width
_SCALES = (4, 8, 16, 32)
_MOST_GROWTH = math.log(1000 / 16)


def cell_anchors() -> Tensor:
    """The twelve anchors of the cell at 0, 0: three shapes, the outer loop, in four sizes.

    The window of 16 by 16 pixels is given each ratio with both sides rounded (half to even: 23 by 12, 16 by 16, 11 by 22), then
    each scale, around its centre 7.5. Source: ``lib/rpn/generate_anchors.py``.

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
    """The anchors of every cell of a feature map.

    Args:
        anchors: ``[A, 4]``, of the cell at 0, 0.
        rows: of the map.
        columns: of the map.

    Returns:
        ``[rows * columns * A, 4]``: row by row, in a row column by column, in a cell anchor by anchor.
    """
    y, x = torch.meshgrid(
        torch.arange(rows, device=anchors.device) * STRIDE, torch.arange(columns, device=anchors.device) * STRIDE, indexing="ij"
    )
    shifts = torch.stack((x, y, x, y), dim=-1).to(anchors.dtype)  # [rows, columns, 4]
    return (shifts[:, :, None] + anchors).view(-1, 4)


def decode(anchors: Tensor, deltas: Tensor) -> Tensor:
    """Move and stretch boxes.

    The far corner is not moved one pixel back, so decoding zeros makes a box one pixel longer: Caffe's way. Growth is held at
    1000 / 16 times, as in MILVLG's port; the original has no limit, but clips the box to the image later as the port does.

    Args:
        anchors: ``[N, 4]``.
        deltas: ``[N, 4]``: shift of the centre in sides of the anchor, logarithm of the growth of the sides.

    Returns:
        ``[N, 4]``.
    """
    sides = anchors[:, 2:] - anchors[:, :2] + 1
    centres = deltas[:, :2] * sides + (anchors[:, :2] + 0.5 * sides)
    halves = 0.5 * (deltas[:, 2:].clamp(max=_MOST_GROWTH).exp() * sides)
    return torch.cat((centres - halves, centres + halves), dim=1)


def clip(boxes: Tensor, width: int, height: int) -> Tensor:
    """Move corners that lie outside of an image to its outermost pixels, ``width - 1`` and ``height - 1``.

    Args:
        boxes: ``[N, 4]``.
        width: of the image in pixels.
        height: likewise.
    """
    limit = torch.tensor((width - 1, height - 1, width - 1, height - 1), dtype=boxes.dtype, device=boxes.device)
    return boxes.clamp(min=0).minimum(limit)


def is_larger(boxes: Tensor, side: float) -> Tensor:
    """Which boxes have two sides, each longer than so many pixels, and corners in order.

    A side of exactly this length is too short, as in MILVLG's port; the original keeps it.

    Args:
        boxes: ``[N, 4]``.
        side: in pixels.

    Returns:
        bool ``[N]``.
    """
    differences = boxes[:, 2:] - boxes[:, :2]
    return ((differences > 0) & (differences + 1 > side)).all(dim=1)


def iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of each box with each other one.

    Args:
        boxes: ``[N, 4]``.
        others: ``[M, 4]``.

    Returns:
        ``[N, M]``, in 0…1.
    """
    shared = _common_length(boxes, others, 0) * _common_length(boxes, others, 1)
    return shared / (_areas(boxes)[:, None] + _areas(others) - shared)


def _common_length(boxes: Tensor, others: Tensor, axis: int) -> Tensor:
    start = torch.maximum(boxes[:, None, axis], others[:, axis])
    end = torch.minimum(boxes[:, None, axis + 2], others[:, axis + 2])
    return (end - start + 1).clamp_(min=0)


def _areas(boxes: Tensor) -> Tensor:
    sides = boxes[:, 2:] - boxes[:, :2] + 1
    return sides[:, 0] * sides[:, 1]

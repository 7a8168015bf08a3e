"""Box arithmetic of Faster R-CNN.

A box includes its far corner, so a side is one longer than the difference of its corners. The order of operations follows
``lib/rpn`` and ``lib/fast_rcnn/bbox_transform.py`` in github.com/peteanderson80/bottom-up-attention, in float32, because
comparisons decide which regions are chosen.

Shapes: ``A`` anchors of a cell, ``N`` and ``M`` boxes of an image. A box is x1, y1, x2, y2 in pixels.
"""

import math

import torch
from torch import Tensor

STRIDE = 16
"""Pixels of the input per cell of the feature map."""

_RATIOS = (0.5, 1.0, 2.0)  # Height over width.
_SCALES = (4, 8, 16, 32)
_MAX_LOG_GROWTH = math.log(1000 / 16)


def cell_anchors() -> Tensor:
    """Return the twelve anchors of the cell at 0, 0: by ratio, then by scale.

    Each ratio reshapes a window of 16×16 pixels, with sides rounded half to even (23×12, 16×16, 11×22). Each
    scale then enlarges it around its centre at 7.5. Source: ``lib/rpn/generate_anchors.py``.

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
    """Shift anchors ``[A, 4]`` to all cells: ``[rows * columns * A, 4]``, row-major."""
    y, x = torch.meshgrid(
        torch.arange(rows, device=anchors.device) * STRIDE, torch.arange(columns, device=anchors.device) * STRIDE, indexing="ij"
    )
    shifts = torch.stack((x, y, x, y), dim=-1).to(anchors.dtype)  # [rows, columns, 4]
    return (shifts[:, :, None] + anchors).view(-1, 4)


def apply_deltas(anchors: Tensor, deltas: Tensor) -> Tensor:
    """Apply regression deltas to anchors.

    As in Caffe, the far corner is not moved back by one pixel, so zero deltas enlarge a box by one pixel. Growth is limited to
    1000 / 16 times as in MILVLG's port; the original has no limit, but both clip boxes to the image later.

    Args:
        anchors: ``[N, 4]``.
        deltas: ``[..., N, 4]``: shift of the centre relative to the sides, log growth of the sides.

    Returns:
        ``[..., N, 4]``.
    """
    sides = anchors[:, 2:] - anchors[:, :2] + 1
    centres = deltas[..., :2] * sides + (anchors[:, :2] + 0.5 * sides)
    halves = 0.5 * (deltas[..., 2:].clamp(max=_MAX_LOG_GROWTH).exp() * sides)
    return torch.cat((centres - halves, centres + halves), dim=-1)


def clip(boxes: Tensor, width: int, height: int) -> Tensor:
    """Clip boxes ``[..., 4]`` to the pixels 0…width - 1 and 0…height - 1."""
    limit = boxes.new_empty(4)  # Filled on the device, without a copy from the host.
    limit[0::2].fill_(width - 1)
    limit[1::2].fill_(height - 1)
    return boxes.clamp(min=0).minimum(limit)


def is_larger(boxes: Tensor, side: float | Tensor) -> Tensor:
    """Return a mask of boxes with ordered corners and both sides above a limit.

    A side equal to the limit is too short, as in MILVLG's port; the original accepts it.

    Args:
        boxes: ``[..., N, 4]``.
        side: limit in pixels; for several images ``[..., 1]``.

    Returns:
        bool ``[..., N]``.
    """
    shortest = (boxes[..., 2:] - boxes[..., :2]).amin(dim=-1)
    return (shortest > 0) & (shortest + 1 > side)


def iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Compute the IoU of pairs: ``[..., N, 4]``, ``[..., M, 4]`` to ``[..., N, M]``."""
    shared = _common_length(boxes, others, 0) * _common_length(boxes, others, 1)
    return shared / (_areas(boxes)[..., None] + _areas(others)[..., None, :] - shared)


def _common_length(boxes: Tensor, others: Tensor, axis: int) -> Tensor:
    start = torch.maximum(boxes[..., None, axis], others[..., None, :, axis])
    end = torch.minimum(boxes[..., None, axis + 2], others[..., None, :, axis + 2])
    return (end - start + 1).clamp_(min=0)


def _areas(boxes: Tensor) -> Tensor:
    sides = boxes[..., 2:] - boxes[..., :2] + 1
    return sides[..., 0] * sides[..., 1]

"""Box arithmetic of Faster R-CNN, and batched non-maximum suppression (NMS).

A box includes its far corner, so a side is one longer than the difference of its corners. The order of operations follows
``lib/rpn`` and ``lib/fast_rcnn/bbox_transform.py`` in github.com/peteanderson80/bottom-up-attention, in float32, because
comparisons decide which regions are chosen.

NMS equals Caffe's CPU kernel and that of MILVLG's port: an IoU **at or above** the threshold (rounded to float32) suppresses. Their
GPU kernels and torchvision's require an IoU above it. Ties of scores go to the earlier box. The algorithm is a fixed-point
iteration over all boxes, which converges after as many rounds as the longest chain of suppressions. On a GPU convergence is checked
only after several rounds, since the check synchronizes with the host.

Shapes: ``A`` anchors of a cell, ``B`` images, ``N``, ``M`` and ``P`` boxes of an image, ``C`` classes, ``W`` = ceil(P / 62) words
of bits. A box is x1, y1, x2, y2 in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

STRIDE = 16
"""Pixels of the input per cell of the feature map."""

_RATIOS = (0.5, 1.0, 2.0)  # Height over width.
_SCALES = (4, 8, 16, 32)
_MAX_LOG_GROWTH = math.log(1000 / 16)


def cell_anchors() -> Tensor:
    """Return the twelve anchors of the cell at 0, 0: by ratio, then by scale.

    Each ratio reshapes a window of 16×16 pixels, with sides rounded half to even (23×12, 16×16, 11×22). Each scale then enlarges it
    around its centre at 7.5. Source: ``lib/rpn/generate_anchors.py``.

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


_BLOCK = {"cpu": 128, "cuda": 2000}  # Boxes per block; the host checks the number of survivors after each.
_ROUNDS = {"cpu": 1, "cuda": 12}  # Rounds per convergence check.
_WORD = 62  # Bits used of an int64; the sign bit is 0.


def first_true(mask: Tensor, max_count: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the first True values of a mask ``[B, P]``.

    Returns:
        int64 ``[B, min(P, max_count)]``, ascending positions of True values, then arbitrary ones; and int64 ``[B]``, the number of
        True values among them.
    """
    positions = mask.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :max_count]
    return positions, mask.sum(dim=1).clamp(max=max_count)


def nms(boxes: Tensor, valid: Tensor, threshold: float, max_count: int) -> tuple[Tensor, Tensor]:
    """Suppress boxes sorted by score, until enough boxes of each image survive.

    Args:
        boxes: ``[B, P, 4]``, best first.
        valid: bool ``[B, P]``, False for padding at the end.
        threshold: minimum IoU that suppresses.
        max_count: maximum number of surviving boxes.

    Returns:
        Positions and number of the surviving boxes, see `first_true`.
    """
    survives = torch.zeros_like(valid)
    length = _BLOCK[boxes.device.type]
    for start in range(0, boxes.shape[1], length):
        block = slice(start, start + length)
        part, candidates = boxes[:, block], valid[:, block]
        if start:
            counts, sizes = torch.stack((survives.sum(dim=1), valid.sum(dim=1))).tolist()
            if all(count >= max_count or size <= start for count, size in zip(counts, sizes, strict=True)):
                break
            positions, num_survivors = first_true(survives[:, :start], min(max_count, max(counts)))
            survivors = boxes.take_along_dim(positions[:, :, None], dim=1)
            is_survivor = torch.arange(positions.shape[1], device=boxes.device) < num_survivors[:, None]
            candidates = candidates & ~_suppressed(is_survivor, (iou(survivors, part) >= threshold).to(torch.float32))
        covers = (iou(part, part) >= threshold).triu(diagonal=1).to(torch.float32)
        survives[:, block] = _nms_in_block(candidates, covers)
    return first_true(survives, max_count)


def _nms_in_block(candidates: Tensor, covers: Tensor) -> Tensor:
    return _fixed_point(lambda survives: candidates & ~_suppressed(survives, covers), candidates)


def _suppressed(survives: Tensor, covers: Tensor) -> Tensor:
    """Return a mask of suppressed boxes: ``[B, K]`` and ``[B, K, N]`` to ``[B, N]``."""
    return torch.bmm(survives[:, None].to(covers.dtype), covers)[:, 0] > 0


def best_scores_after_nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return each box's best score among the classes in which it survives NMS.

    Args:
        boxes: ``[B, P, 4]``.
        scores: ``[B, P, C]``, not negative except for padding.
        threshold: minimum IoU that suppresses.

    Returns:
        ``[B, P]``; 0 for a box that survives in no class, at most 0 for padding.
    """
    if not scores.numel():
        return scores.new_zeros(scores.shape[:2])
    covers = iou(boxes, boxes) >= threshold
    covers.diagonal(dim1=1, dim2=2).fill_(False)
    by_class = scores.transpose(1, 2).contiguous()
    order = by_class.sort(dim=2, descending=True, stable=True).indices
    return (by_class * _nms_by_class(covers, order)).amax(dim=1)


def _nms_by_class(covers: Tensor, order: Tensor) -> Tensor:
    """Run NMS of several images in all classes by fixed-point iteration.

    Args:
        covers: bool ``[B, P, P]``, symmetric, with False diagonals.
        order: int64 ``[B, C, P]``, boxes from best to worst.

    Returns:
        bool ``[B, C, P]``, whether the box survives in the class.
    """
    count = order.shape[2]
    indices = torch.arange(count, device=order.device)
    rank = torch.empty_like(order).scatter_(2, order, indices.expand_as(order))
    own_bit = _pack_bits(_pad_to_words(indices[:, None] == indices)).t()  # [W, P]
    better = own_bit[:, order].cumsum(dim=3).take_along_dim(rank[None], dim=3)  # [W, B, C, P], including the box
    rivals = _pad_to_words(better & _pack_bits(_pad_to_words(covers)).movedim(2, 0)[:, :, None])

    def step(survives: Tensor) -> Tensor:
        return ~(rivals & _pack_bits(survives).movedim(2, 0)[..., None]).any(dim=0)

    return _fixed_point(step, torch.ones_like(rivals[0], dtype=torch.bool))[..., :count]


def _fixed_point(step: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Repeat a step until it changes nothing."""
    rounds = _ROUNDS[values.device.type]
    while True:
        for _ in range(rounds):
            before, values = values, step(values)
        if torch.equal(before, values):
            return values


def _pad_to_words(values: Tensor) -> Tensor:
    return F.pad(values, (0, -values.shape[-1] % _WORD))


def _pack_bits(bits: Tensor) -> Tensor:
    """Pack bits: bool ``[..., 62 * W]`` to int64 ``[..., W]``."""
    powers = 1 << torch.arange(_WORD, device=bits.device)
    return torch.where(bits.unflatten(-1, (-1, _WORD)), powers, 0).sum(dim=-1)

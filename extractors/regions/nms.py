"""Batched non-maximum suppression (NMS) of boxes.

NMS equals Caffe's CPU kernel and that of MILVLG's port: an IoU **at or above** the threshold (rounded to float32) suppresses. Their
GPU kernels and torchvision's require an IoU above it. Ties of scores go to the earlier box. The algorithm is a fixed-point
iteration over all boxes, which converges after as many rounds as the longest chain of suppressions. On a GPU convergence is checked
only after several rounds, since the check synchronizes with the host.

Shapes: ``B`` images, ``N`` and ``P`` boxes of an image, ``K`` suppressing boxes, ``C`` classes, ``W`` = ceil(P / 62) words.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from extractors.regions.boxes import iou

_BLOCK = {"cpu": 128, "cuda": 2000}  # Boxes per block; the host checks the number of survivors after each.
_ROUNDS = {"cpu": 1, "cuda": 12}  # Rounds per convergence check.
_WORD = 62  # Bits used of an int64; the sign bit is 0.


def first_true(mask: Tensor, max_count: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the first True values of a mask ``[B, P]``.

    Returns:
        int64 ``[B, min(P, max_count)]``, ascending positions of True values, then arbitrary ones; and int64
        ``[B]``, the number of True values among them.
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

"""Arithmetic of boxes as in Caffe's Faster R-CNN, and non-maximum suppression (NMS).

A box includes its far corner, so a side is one longer than the difference. The order of the operations is that of ``lib/rpn`` and
``lib/fast_rcnn/bbox_transform.py`` in github.com/peteanderson80/bottom-up-attention, in float32, because comparisons decide which
regions are chosen.

NMS keeps a box if no kept box of a better score covers it. Going through the boxes from the best score down finds the one answer.
Asking all boxes at once finds it, too, if each round takes the answer of the round before for "kept", and the rounds go on until
nothing changes: after n of them those boxes are right whose fate hangs on a chain of at most n boxes. A round is a few large
steps, which suits a device, and only after several rounds the host looks whether anything has changed, because looking means
waiting.

A box is covered if its intersection over union with a kept box is **at or above** the threshold, as in the CPU kernels of the
original and of MILVLG's port. Their GPU kernels, and torchvision's, require more than the threshold, which matters only where the
two are equal to the last bit. The threshold is rounded to float32 first, as theirs is. Of equal scores the earlier box goes
first.

Letters in shapes: ``A`` anchors of a cell, ``B`` images, ``N``, ``M`` and ``P`` boxes of an image, ``C`` classes, ``W`` =
ceil(P / 62) words of bits. A box is x1, y1, x2, y2 in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

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
    """Return the anchors of every cell of a feature map, given those of the cell at 0, 0, ``[A, 4]``.

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
    """Move corners ``[..., 4]`` outside of an image to its outermost pixels, ``width - 1`` and ``height - 1``."""
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
    """Return the intersection over union of all pairs: ``[..., N, 4]`` and ``[..., M, 4]`` to ``[..., N, M]``, in 0…1."""
    shared = _common_length(boxes, others, 0) * _common_length(boxes, others, 1)
    return shared / (_areas(boxes)[..., None] + _areas(others)[..., None, :] - shared)


def _common_length(boxes: Tensor, others: Tensor, axis: int) -> Tensor:
    start = torch.maximum(boxes[..., None, axis], others[..., None, :, axis])
    end = torch.minimum(boxes[..., None, axis + 2], others[..., None, :, axis + 2])
    return (end - start + 1).clamp_(min=0)


def _areas(boxes: Tensor) -> Tensor:
    sides = boxes[..., 2:] - boxes[..., :2] + 1
    return sides[..., 0] * sides[..., 1]


_BLOCK = {"cpu": 128, "cuda": 2000}  # Boxes between two looks whether enough are kept.
_ROUNDS = {"cpu": 1, "cuda": 12}  # Rounds before the first look whether anything changes.
_WORD = 62  # Number of bits of an int64 that are used; the sign stays 0.


def first_true(chosen: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Find the positions of what is chosen, in a shape that does not depend on how much that is.

    Args:
        chosen: bool ``[B, P]``.
        most: greatest number of positions.

    Returns:
        int64 ``[B, min(P, most)]``, the first positions that are chosen, ascending, and behind them any others; and int64 ``[B]``,
        how many of these are chosen.
    """
    positions = chosen.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
    return positions, chosen.sum(dim=1).clamp(max=most)


def nms(boxes: Tensor, usable: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """Suppress boxes that are sorted by score already, until enough of each image are kept.

    Args:
        boxes: ``[B, P, 4]``, the best first.
        usable: bool ``[B, P]``, False for rows that are no boxes; these stand behind all others.
        threshold: intersection over union from which a box is covered.
        most: greatest number of boxes to keep.

    Returns:
        The positions of the kept boxes and how many these are, as `first_true` returns them.
    """
    kept = torch.zeros_like(usable)
    length = _BLOCK[boxes.device.type]
    for start in range(0, boxes.shape[1], length):
        block = slice(start, start + length)
        part, free = boxes[:, block], usable[:, block]
        if start:
            counts, sizes = torch.stack((kept.sum(dim=1), usable.sum(dim=1))).tolist()
            if all(count >= most or size <= start for count, size in zip(counts, sizes, strict=True)):
                break
            free = free & ~_covered(part, boxes, kept[:, :start], min(most, max(counts)), threshold)
        covers = (iou(part, part) >= threshold).triu(diagonal=1)
        kept[:, block] = _nms_in_block(free, covers.to(torch.float32))
    return first_true(kept, most)


def _covered(boxes: Tensor, others: Tensor, kept: Tensor, most: int, threshold: float) -> Tensor:
    """Tell which boxes the first of the kept others cover: bool ``[B, N]`` for boxes ``[B, N, 4]`` and others ``[B, P, 4]``."""
    positions, counts = first_true(kept, most)
    covers = iou(others.take_along_dim(positions[:, :, None], dim=1), boxes) >= threshold
    return _suppressed(torch.arange(most, device=boxes.device) < counts[:, None], covers.to(torch.float32))


def _nms_in_block(free: Tensor, covers: Tensor) -> Tensor:
    """Keep the free boxes that no kept box before them covers: bool ``[B, N]``; ``covers`` as in `_suppressed`, upper triangles."""
    return _fixed_point(lambda kept: free & ~_suppressed(kept, covers), free)


def _suppressed(kept: Tensor, covers: Tensor) -> Tensor:
    """Tell what the kept boxes cover: bool ``[B, K]`` and ones and zeros ``[B, K, N]``, float32, to bool ``[B, N]``."""
    return torch.bmm(kept[:, None].to(covers.dtype), covers)[:, 0] > 0


def best_scores_after_nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Suppress the same boxes by the scores of every class, and return each box's best score among the classes that keep it.

    Args:
        boxes: ``[B, P, 4]``.
        scores: ``[B, P, C]``, not negative, but in rows that are no boxes.
        threshold: intersection over union from which a box is covered.

    Returns:
        ``[B, P]``; 0 for a box that no class keeps, and not more for a row that is no box.
    """
    if not scores.numel():
        return scores.new_zeros(scores.shape[:2])
    covers = iou(boxes, boxes) >= threshold
    covers.diagonal(dim1=1, dim2=2).fill_(False)
    by_class = scores.transpose(1, 2).contiguous()
    order = by_class.sort(dim=2, descending=True, stable=True).indices
    if boxes.device.type == "cpu":
        kept = torch.stack([_sequential_nms(*of_image) for of_image in zip(covers, order, strict=True)])
    else:
        kept = _parallel_nms(covers, order)
    return (by_class * kept).amax(dim=1)


def _sequential_nms(covers: Tensor, order: Tensor) -> Tensor:
    """Go through the boxes of an image from the best down, in all classes at once: twice as fast as `_parallel_nms` on a CPU.

    At each rank every class looks at its own box and, if that is still free, strikes out the boxes that it covers.

    Args:
        covers: bool ``[P, P]``, symmetric, the diagonal False.
        order: int64 ``[C, P]``, the boxes from best to worst.

    Returns:
        bool ``[C, P]``, whether the class keeps the box.
    """
    classes, count = order.shape
    words = _pack(_padded(covers))  # [P, W]
    struck = words.new_zeros((classes, words.shape[1]))
    boxes = order.t().contiguous()  # [P ranks, C]
    places = torch.arange(classes) * words.shape[1] + boxes // _WORD
    for box, place, bit in zip(boxes, places, boxes % _WORD, strict=True):
        is_free = (struck.view(-1).index_select(0, place) >> bit) & 1 ^ 1
        struck |= words.index_select(0, box) * is_free[:, None]
    return ~_unpack(struck)[:, :count]


def _parallel_nms(covers: Tensor, order: Tensor) -> Tensor:
    """Ask all boxes of all classes and images at once, round by round.

    Args:
        covers: bool ``[B, P, P]``, symmetric, the diagonals False.
        order: int64 ``[B, C, P]``, the boxes from best to worst.

    Returns:
        bool ``[B, C, P]``, whether the class keeps the box.
    """
    count = order.shape[2]
    numbers = torch.arange(count, device=order.device)
    rank = torch.empty_like(order).scatter_(2, order, numbers.expand_as(order))
    own = _pack(_padded(numbers[:, None] == numbers)).t()  # [W, P]
    better = own[:, order].cumsum(dim=3).take_along_dim(rank[None], dim=3)  # [W, B, C, P], with the box itself
    rivals = _padded(better & _pack(_padded(covers)).movedim(2, 0)[:, :, None])

    def ask(kept: Tensor) -> Tensor:
        return ~(rivals & _pack(kept).movedim(2, 0)[..., None]).any(dim=0)

    return _fixed_point(ask, torch.ones_like(rivals[0], dtype=torch.bool))[..., :count]


def _fixed_point(step: Callable[[Tensor], Tensor], kept: Tensor) -> Tensor:
    """Repeat a step until it changes nothing."""
    rounds = _ROUNDS[kept.device.type]
    while True:
        for _ in range(rounds):
            before, kept = kept, step(kept)
        if torch.equal(before, kept):
            return kept


def _padded(values: Tensor) -> Tensor:
    """Append zeros to the last axis, up to a multiple of `_WORD`."""
    return F.pad(values, (0, -values.shape[-1] % _WORD))


def _pack(bits: Tensor) -> Tensor:
    """Pack bits: bool ``[..., 62 * W]`` to int64 ``[..., W]``."""
    powers = 1 << torch.arange(_WORD, device=bits.device)
    return torch.where(bits.unflatten(-1, (-1, _WORD)), powers, 0).sum(dim=-1)


def _unpack(words: Tensor) -> Tensor:
    """Unpack bits: int64 ``[..., W]`` to bool ``[..., 62 * W]``."""
    powers = 1 << torch.arange(_WORD, device=words.device)
    return (words[..., None] & powers).flatten(-2) != 0

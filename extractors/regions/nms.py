"""Non-maximum suppression: a box is kept if no kept box of a better score covers it.

Going through the boxes from the best score down finds the one answer. Asking all boxes at once finds it, too, if each round takes
the answer of the round before for "kept", and the rounds go on until nothing changes: after n of them those boxes are right whose
fate hangs on a chain of at most n boxes. A round is a few large steps, which suits a device, and only after several rounds the
host looks whether anything has changed, because looking means waiting.

A box is covered if its intersection over union with a kept box is **at or above** the threshold, as in the CPU kernels of the
original and of MILVLG's port. Their GPU kernels, and torchvision's, require more than the threshold, which matters only where the
two are equal to the last bit. The threshold is rounded to float32 first, as theirs is. Of equal scores the earlier box goes
first.

Letters in shapes: ``B`` images, ``P`` boxes of an image, ``C`` classes, ``W`` = ceil(P / 62) words of bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from extractors.regions.boxes import iou

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

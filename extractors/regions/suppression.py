"""Greedy non-maximum suppression: go through boxes from the best score down, and keep every box that no kept box covers.

A box is covered if its intersection over union with a kept box is **at or above** the threshold, as in the CPU kernels of the
original and of MILVLG's port. Their GPU kernels, and torchvision's, require more than the threshold, which matters only where the
two are equal to the last bit. The threshold is rounded to float32 first, as theirs is. Of equal scores the earlier box goes
first.

Letters in shapes: ``P`` boxes, ``C`` classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from extractors.regions.boxes import iou

__all__ = ["best_surviving_scores", "keep_best"]

_BLOCK = 128
_WORD = 62  # Number of bits of an int64 that are used; the sign stays 0.


def keep_best(boxes: Tensor, threshold: float, most: int) -> Tensor:
    """Suppress boxes that are sorted by score already, until enough are kept.

    Args:
        boxes: ``[P, 4]``, the best first.
        threshold: intersection over union from which a box is covered.
        most: greatest number of boxes to keep.

    Returns:
        int64 positions of the kept boxes, ascending, at most ``most``.
    """
    kept = torch.zeros(0, dtype=torch.int64, device=boxes.device)
    for start in range(0, len(boxes), _BLOCK):
        block = boxes[start : start + _BLOCK]
        free = ~(iou(boxes[kept], block) >= threshold).any(dim=0)
        candidates = free.nonzero().flatten() + start
        kept = torch.cat((kept, candidates[_keep_all(boxes[candidates], threshold)]))
        if len(kept) >= most:
            break
    return kept[:most]


def _keep_all(boxes: Tensor, threshold: float) -> Tensor:
    """Do the same for few boxes at once: return bool ``[P]``."""
    covers = (iou(boxes, boxes) >= threshold).triu(diagonal=1).cpu().numpy()
    free = torch.ones(len(boxes), dtype=torch.bool).numpy()
    for i in range(len(boxes)):
        if free[i]:
            free &= ~covers[i]
    return torch.from_numpy(free).to(boxes.device)


def best_surviving_scores(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Suppress the same boxes by the scores of every class, and return each box's best score among the classes that keep it.

    All classes share the matrix of overlaps, and one pass over the ranks serves all of them: at each rank every class looks at
    its own box and, if that is still free, strikes out the boxes that it covers. Boxes struck out are bits of whole numbers. The
    result is that of a loop over classes: of two boxes that cover each other the one of higher rank comes first.

    Args:
        boxes: ``[P, 4]``.
        scores: ``[P, C]``, not negative.
        threshold: intersection over union from which a box is covered.

    Returns:
        ``[P]``; 0 for a box that no class keeps.
    """
    count, classes = scores.shape
    if not count or not classes:
        return scores.new_zeros(count)
    covers = (iou(boxes, boxes) >= threshold).fill_diagonal_(False)
    words = _pack(covers)  # [P, words]
    order = scores.t().sort(dim=1, descending=True, stable=True).indices.t().contiguous()  # [P ranks, C]
    struck = words.new_zeros((classes, words.shape[1]))
    position = torch.arange(classes, device=scores.device) * words.shape[1]
    for box in order.unbind():
        word = struck.view(-1)[position + box // _WORD]
        is_free = (word >> (box % _WORD)) & 1 ^ 1
        struck |= words[box] * is_free[:, None]
    return (scores * ~_unpack(struck, count).t()).amax(dim=1)


def _pack(bits: Tensor) -> Tensor:
    """Pack bits: bool ``[N, P]`` to int64 ``[N, ceil(P / _WORD)]``."""
    padded = torch.nn.functional.pad(bits.to(torch.int64), (0, -bits.shape[1] % _WORD)).view(len(bits), -1, _WORD)
    return (padded << torch.arange(_WORD, device=bits.device)).sum(dim=2)


def _unpack(words: Tensor, count: int) -> Tensor:
    """Unpack bits: int64 ``[N, words]`` to bool ``[N, count]``."""
    bits = (words[:, :, None] >> torch.arange(_WORD, device=words.device)) & 1
    return bits.view(len(words), -1)[:, :count].to(torch.bool)

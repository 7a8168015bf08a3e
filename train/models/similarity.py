"""Similarities of all pairs of two sets of embeddings.

Letters in shapes: ``A`` and ``B`` embeddings, ``E`` embedding width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["cosine", "order"]

_NUMBERS_AT_ONCE = {"cpu": 2**19, "cuda": 2**24}
"""Differences held at once, by kind of device. On a CPU they should stay in its caches: of 2^17 to 2^22 this was the fastest, 20
times as fast as all of 128 x 128 x 1024 at once. On a GPU the number of kernels should stay small."""


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosines ``[A, B]`` of embeddings ``[A, E]`` and ``[B, E]`` that have length 1."""
    return a @ b.T


@torch.compiler.disable  # The blocks are a matter of memory, and their number changes with the batch.
def order(a: Tensor, b: Tensor) -> Tensor:
    """How well a is more special than b in every dimension: S(a, b) = -||max(0, b - a)||^2, which is 0 at best.

    Vendrov et al. 2016, equation 2, and Gella et al. 2017, equation 3, where a is an image and b a caption. VSE++ takes the root.
    The A x B x E differences are never held together: a constant few megabytes in the forward pass as in the backward pass, which
    computes them again.

    Args:
        a: ``[A, E]``, not negative if S is to be an order.
        b: ``[B, E]``, likewise.

    Returns:
        ``[A, B]``. It is not symmetric. Where a and b are equal in a dimension, that dimension has no gradient.
    """
    return _Order.apply(a, b)


class _Order(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        scores = a.new_empty(len(a), len(b))
        for rows, columns, excess in _excesses(a, b):
            torch.sum(excess.square_(), dim=2, out=scores[rows, columns])
        return scores.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        d_a, d_b = torch.zeros_like(a), torch.zeros_like(b)
        for rows, columns, excess in _excesses(a, b):
            excess.mul_(2 * d_scores[rows, columns, None])
            d_a[rows] += excess.sum(1)
            d_b[columns] -= excess.sum(0)
        return d_a, d_b


def _excesses(a: Tensor, b: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of max(0, b - a), as rows of a, rows of b, and ``[rows, columns, E]`` that is overwritten by the next block."""
    numbers = _NUMBERS_AT_ONCE[a.device.type]
    width = min(len(b), max(1, numbers // max(1, a.shape[1])))
    height = min(len(a), max(1, numbers // max(1, width * a.shape[1])))
    buffer = a.new_empty(height, width, a.shape[1])
    for top in range(0, len(a), max(1, height)):
        for left in range(0, len(b), max(1, width)):
            rows, columns = slice(top, top + height), slice(left, left + width)
            some, others = a[rows], b[columns]
            yield rows, columns, torch.sub(others, some[:, None], out=buffer[: len(some), : len(others)]).relu_()

"""Similarities of all pairs from two sets of embeddings.

Shapes: ``A`` and ``B`` embeddings, ``E`` embedding width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Differences in memory, by kind of device. A tile fits into the caches of a CPU; a GPU needs few kernels."""

_MIN_NORM = 1e-12
"""Norm up to which a vector counts as zeros, as in ``torch.nn.functional.normalize``."""


def l2_normalize(vectors: Tensor) -> Tensor:
    """Divide vectors ``[..., E]`` by their Euclidean norms; zeros stay zeros.

    Bit for bit ``torch.nn.functional.normalize``, except that zeros have no gradient. Torch multiplies their
    gradient by 10^12, so that clipping erases all others.
    """
    norms = vectors.norm(dim=-1, keepdim=True)
    return vectors / norms.masked_fill(norms <= _MIN_NORM, torch.inf)


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products ``[A, B]`` of ``[A, E]`` and ``[B, E]``."""
    return a @ b.T


def order(a: Tensor, b: Tensor) -> Tensor:
    """Return the order similarity S(a, b) = -||max(0, b - a)||^2, at most 0.

    Vendrov et al. 2016, equation 2, and Gella et al. 2017, equation 3, where a is an image and b a caption.
    VSE++ takes the root. The A x B x E differences are computed in tiles in both passes, unless the pass is
    compiled. For a partial order, a ``[A, E]`` and b ``[B, E]`` are non-negative.

    Returns:
        ``[A, B]``, not symmetric. A dimension in which a and b are equal has no gradient.
    """
    if torch.compiler.is_compiling():
        return -(b - a[:, None]).relu().square().sum(2)
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
    """Yield rows of a, rows of b, and their tile of max(0, b - a).

    The next tile overwrites ``[rows, columns, E]``.
    """
    elements = _TILE_ELEMENTS[a.device.type]
    width = min(len(b), max(1, elements // max(1, a.shape[1])))
    height = min(len(a), max(1, elements // max(1, width * a.shape[1])))
    buffer = a.new_empty(height, width, a.shape[1])
    for top in range(0, len(a), max(1, height)):
        for left in range(0, len(b), max(1, width)):
            rows, columns = slice(top, top + height), slice(left, left + width)
            above, below = a[rows], b[columns]
            yield rows, columns, torch.sub(below, above[:, None], out=buffer[: len(above), : len(below)]).relu_()

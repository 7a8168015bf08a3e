"""The diversity of attention heads (Huang et al. 2019, equation 5).

Letters in shapes: ``B`` rows of the batch, ``K`` heads, ``H`` width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.models.similarity import unit


def diversity_loss(a: Tensor, b: Tensor, *, margin: float) -> Tensor:
    """Return the sum of hinges over the batch: how far different heads are from a distance of the margin.

    The heads are those of one view of the items twice, or of two views, such as an image and its caption. With s the cosine, the
    hinges are ``max(0, margin - (1 - s(a[p, k], b[p, r])))`` for the heads k and r of the row p, r not k.

    The equation has s in place of the distance 1 - s. As printed it would draw heads together, while the text is about "to
    increase the distance (up to a diversity margin)". Within one view both orders of two heads are counted, as the sum says.

    A head of zeros has no direction: its cosines are 0, and it has no gradient.

    Args:
        a: ``[B, K, H]``.
        b: ``[B, K, H]``; row p of both belongs to the same image.
        margin: alpha_D.

    Returns:
        A scalar; zero for a single head.
    """
    heads = a.shape[1]
    with torch.autocast(a.device.type, enabled=False):
        first, second = (unit(heads_of.flatten(0, 1)).unflatten(0, (-1, heads)) for heads_of in (a, b))
        hinges = (margin - 1 + first @ second.transpose(1, 2)).relu()  # [B, K, K]
    return hinges.masked_fill(torch.eye(heads, dtype=torch.bool, device=a.device), 0).sum()

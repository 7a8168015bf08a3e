"""Attention within an image or a sentence, with several heads (Huang et al. 2019, equations 1 and 2).

Letters in shapes: ``N`` images or captions, ``M`` regions or tokens of the one with the most, ``P`` those of all that are there,
``K`` heads, ``H`` width of a region or token, ``C`` width of a context, ``A`` width in which they are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from train.models.retrieval_model import Encoded


class MultiHeadAttention(nn.Module):
    """Pooling of regions or tokens into K vectors: each is their mean, weighted as one head attends to them.

    With g_i the tokens of a sentence, and for the head k a learned context c_k and two learned matrices (equations 1 and 2; the
    same for the regions of an image)::

        a_i^k = softmax over i of tanh(W_c^k c_k)^T tanh(W^k g_i)
        g^k = sum over i of a_i^k g_i

    The result is their concatenation. Where there is no region or token at all, it is zeros.

    Args:
        width: H.
        num_heads: K.
        attention_dim: A, H_attn in the paper.
        context_dim: C, H_c in the paper.
    """

    def __init__(self, width: int, *, num_heads: int, attention_dim: int, context_dim: int) -> None:
        super().__init__()
        self.contexts = nn.Parameter(torch.empty(num_heads, context_dim))
        self.of_contexts = nn.Parameter(torch.empty(num_heads, attention_dim, context_dim))
        self.of_items = nn.Parameter(torch.empty(num_heads, attention_dim, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw contexts uniformly from ±0.1, as the vectors of words are, and each matrix as that of images is (Xavier).

        The paper is silent. So the attention begins near the mean, though the heads differ; with contexts ten times as large it
        would begin near a single region.
        """
        nn.init.uniform_(self.contexts, -0.1, 0.1)
        for matrices in (self.of_contexts, self.of_items):
            for matrix in matrices:
                nn.init.xavier_uniform_(matrix)

    def forward(self, items: Encoded) -> Tensor:
        """Return the heads of ``[N, M, H]``, one after the other, ``[N, K * H]``."""
        return (self.weights(items) @ items.values).flatten(1)

    def weights(self, items: Encoded) -> Tensor:
        """Return how much each head attends to each region or token, ``[N, K, M]``; 0 where there is none."""
        logits = where_present(self._logits, items.values, items.mask, absent=-torch.inf).transpose(1, 2)  # [N, K, M]
        weights = logits.softmax(dim=2)
        return weights if items.mask is None else weights.masked_fill(~items.mask[:, None], 0)

    def _logits(self, items: Tensor) -> Tensor:
        """Return the logits ``[..., K]`` of regions or tokens ``[..., H]``."""
        heads, attention, _ = self.of_items.shape
        queries = (self.of_contexts @ self.contexts[..., None]).squeeze(2).tanh()  # [K, A]
        keys = linear(items, self.of_items.flatten(0, 1)).tanh().unflatten(-1, (heads, attention))  # [..., K, A]
        return torch.einsum("...ka,ka->...k", keys, queries.to(keys.dtype))


def where_present(function: Callable[[Tensor], Tensor], values: Tensor, mask: Tensor | None, *, absent: float = 0.0) -> Tensor:
    """Apply a function of rows to those that are there: what stands in the others changes nothing.

    On a CPU the others take no time. A GPU would have to tell how many there are, which the host would wait for, and a compiled
    graph would end there; then the function is applied to all rows, and its results are replaced.

    Args:
        function: from ``[P, F]`` to ``[P, G]``, or with more dimensions in front; of zeros something finite.
        values: ``[N, M, F]``.
        mask: bool ``[N, M]``, true where there is a row; None if they are all there.
        absent: what the others become.

    Returns:
        ``[N, M, G]``.
    """
    if mask is None:
        return function(values)
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        outside = ~mask[..., None]
        return function(values.masked_fill(outside, 0)).masked_fill(outside, absent)
    rows = mask.flatten().nonzero().squeeze(1)
    result = function(values.flatten(0, 1).index_select(0, rows))  # [P, G]
    everywhere = result.new_full((mask.numel(), result.shape[1]), absent)
    return everywhere.index_copy(0, rows, result).unflatten(0, mask.shape)

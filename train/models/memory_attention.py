"""Attention within an image or a sentence in several steps, each steered by a memory of those before (Nam et al. 2017).

Letters in shapes: ``N`` images or captions, ``M`` regions or tokens of the one with the most, ``K`` steps, ``W`` width of a region
or token, ``A`` width in which they are compared with the memory, ``E`` width of a context vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train.models.dropout import Dropout
from train.models.multi_head_attention import where_present
from train.models.retrieval_model import Encoded


class AttentionSteps(nn.Module):
    """Context vectors of images or sentences: that of their mean, and one for each of K steps of attention.

    With v_n the regions of an image, or the words of a sentence, and ⊙ the product number by number::

        c_0 = f_0(mean over n of v_n)                       m_0 = c_0
        h_n = tanh(W_k v_n) ⊙ tanh(W'_k m_k-1)              a_n = softmax over n of w_k · h_n
        c_k = f_k(sum over n of a_n v_n)                    m_k = m_k-1 + c_k

    The contexts of images are mapped into the space of those of sentences, f_k(x) = tanh(P_k x); those of sentences stay as they
    are. Every step has matrices of its own; there are no biases. Where there is no region or token at all, all contexts are zeros.

    Args:
        width: W.
        embed_dim: E.
        steps: K.
        attention_dim: A.
        mapped: whether contexts are mapped; otherwise E is W.
        dropout: ratio of dropout. Of what enters a matrix: the words of a sentence, what the contexts of an image are mapped from,
            and h.
    """

    def __init__(self, width: int, embed_dim: int, *, steps: int, attention_dim: int, mapped: bool, dropout: float) -> None:
        super().__init__()
        self.maps = nn.ModuleList(_matrix(width, embed_dim) for _ in range(steps + 1)) if mapped else None
        self.of_items = nn.ModuleList(_matrix(width, attention_dim) for _ in range(steps))
        self.of_memories = nn.ModuleList(_matrix(embed_dim, attention_dim) for _ in range(steps))
        self.of_hidden = nn.ModuleList(_matrix(attention_dim, 1) for _ in range(steps))
        self.dropout = Dropout(dropout)

    def forward(self, items: Encoded) -> Tensor:
        """Return the contexts of ``[N, M, W]``, one after the other, ``[N, (K + 1) * E]``."""
        return self._attend(items)[0]

    def weights(self, items: Encoded) -> Tensor:
        """Return how much each step attends to each region or token, ``[N, K, M]``; 0 where there is none."""
        return self._attend(items)[1]

    def _attend(self, items: Encoded) -> tuple[Tensor, Tensor]:
        values = items.values if items.mask is None else items.values.masked_fill(~items.mask[..., None], 0)
        if self.maps is None:
            values = self.dropout(values)
        number = items.present.sum(1, keepdim=True).clamp(min=1)  # [N, 1]
        memory = self._context(0, values.sum(1) / number)
        contexts, weights = [memory], []
        for step, of_items in enumerate(self.of_items):
            keys = where_present(of_items, values, items.mask).tanh()  # [N, M, A]
            hidden = self.dropout(keys * self.of_memories[step](memory).tanh()[:, None])
            logits = self.of_hidden[step](hidden).squeeze(2)  # [N, M]
            shares = logits.masked_fill(~items.present, -torch.inf).softmax(dim=1).masked_fill(~items.present, 0)
            contexts.append(self._context(step + 1, (shares[:, None] @ values).squeeze(1)))
            weights.append(shares)
            memory = memory + contexts[-1]
        return torch.cat(contexts, dim=1), torch.stack(weights, dim=1)

    def _context(self, number: int, pooled: Tensor) -> Tensor:
        """Return the context ``[N, E]`` of means ``[N, W]``."""
        return pooled if self.maps is None else self.maps[number](self.dropout(pooled)).tanh()


def _matrix(width: int, outputs: int) -> nn.Linear:
    """Return a matrix, drawn as that of images is (Xavier)."""
    matrix = nn.Linear(width, outputs, bias=False)
    nn.init.xavier_uniform_(matrix.weight)
    return matrix

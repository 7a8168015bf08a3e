"""Encoders of images and sentences into the joint space.

Letters in shapes: ``B`` images or captions, ``T`` tokens, ``D`` feature width, ``W`` word width, ``E`` joint embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from schemas.vocabulary import UNK
from train.data.packing import PackedCaptions
from train.models.packed_gru import PackedGRU

__all__ = ["ImageEncoder", "SentenceEncoder"]


class ImageEncoder(nn.Linear):
    """Affine map of image features, ``[B, D]`` to ``[B, E]``.

    Args:
        feature_width: D.
        embedding: E.
    """

    def __init__(self, feature_width: int, embedding: int) -> None:
        super().__init__(feature_width, embedding)

    def reset_parameters(self) -> None:
        """Draw weights uniformly from ±sqrt(6 / (D + E)) and set the bias to 0.

        This is Xavier initialization, as in VSE++ (``model.py``, ``EncoderImagePrecomp``).
        """
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class SentenceEncoder(nn.Module):
    """Word embeddings and a GRU with E units, whose final state represents the sentence.

    Args:
        vocabulary_size: number of token ids.
        word_width: W.
        embedding: E.
        ids: the token ids that have a word vector, ascending; all others are read as ``<unk>``. None means every id.
    """

    def __init__(self, vocabulary_size: int, word_width: int, embedding: int, *, ids: Sequence[int] | None = None) -> None:
        super().__init__()
        self.rows: Tensor | None
        self.register_buffer("rows", None if ids is None else _rows(vocabulary_size, ids), persistent=False)
        self.words = nn.Embedding(vocabulary_size if ids is None else len(ids), word_width)
        self.gru = PackedGRU(word_width, embedding)
        # VSE++ (`model.py`, `EncoderText`).
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, captions: PackedCaptions) -> Tensor:
        """Return ``[B, E]``, the state of each caption after its last token, in the order in which they were packed."""
        ids = captions.tokens if self.rows is None else self.rows[captions.tokens]
        return self.gru(self.words(ids), captions)


def _rows(vocabulary_size: int, ids: Sequence[int]) -> Tensor:
    """Return the row of each token id in a table of ``ids`` only, int64 ``[vocabulary_size]``."""
    if UNK not in ids:
        raise ValueError(f"the ids of a language must have <unk> ({UNK}) among them")
    rows = torch.full((vocabulary_size,), list(ids).index(UNK))
    rows[torch.tensor(ids)] = torch.arange(len(ids))
    return rows

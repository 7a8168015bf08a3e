"""Dual attention networks for matching (m-DAN): the kind of model ``dan``.

Nam, Ha, Kim (2017): Dual Attention Networks for Multimodal Reasoning and Matching (arXiv 1611.00471); in detail as in the
reimplementation github.com/JunweiLiang/DualAttentionNetwork (``model.py``), which had the first author's advice and reaches the
paper's recalls. Where dropout takes place is simpler here, see `AttentionSteps`.

Letters in shapes: ``N`` images or captions of a batch, ``A`` and ``B`` those that are compared, ``M`` regions or tokens of the one
with the most, ``R`` regions, ``D`` feature width, ``T`` tokens, ``H`` width of a context vector, ``K`` steps, ``E`` = (K + 1) * H
width of an embedding; of `AttentionSteps`, ``W`` width of a region or token, ``A`` width in which they are compared with the
memory, ``E`` width of a context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from train.config.models import DanConfig
from train.data.batches import CaptionBatch
from train.models.encoders import (
    BidirectionalLSTM,
    SentenceEncoderModel,
    SentenceEncoders,
    weights_of_heads,
    where_present,
    widen_bfloat16,
)
from train.models.retrieval_model import AttentionWeights, Dimensions, Encoded, ImageBatch


class Dropout(nn.Module):
    """Zeros in place of some numbers while training; the others grow, so that their mean stays what it is.

    The seed of the next mask is drawn with the initial weights, grows by one with each mask, and stands in checkpoints, as
    ``next_seed``: a training that goes on from one draws the masks that it would have drawn. It is a number of the host, whatever
    the device of the model, so that nobody waits for a GPU to read it.

    Args:
        ratio: the share of the numbers that become zeros, 0 to less than 1; without one there is no state.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.next_seed = torch.randint(2**31, ()) if ratio else None

    def forward(self, values: Tensor) -> Tensor:
        """Return values, some of them zeros in training mode."""
        if self.next_seed is None or not self.training:
            return values
        draw = _draw_as_one if torch.compiler.is_compiling() else _draw
        return values * draw(values.detach(), self.next_seed, self.ratio) / (1 - self.ratio)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.next_seed is not None:
            destination[f"{prefix}next_seed"] = self.next_seed.clone()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        name = f"{prefix}next_seed"
        if self.next_seed is not None and name not in state_dict:
            missing.append(name)
        elif self.next_seed is not None:
            self.next_seed = state_dict[name].to("cpu", torch.int64, copy=True)
            state_dict = {other: value for other, value in state_dict.items() if other != name}
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *rest)


def _draw(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    """Draw which values are kept, a bool for each, and let the seed grow by one."""
    generator = torch.Generator(values.device).manual_seed(int(next_seed))
    next_seed += 1
    return torch.rand(values.shape, generator=generator, device=values.device) >= ratio


@torch.library.custom_op("imagepivot::draw", mutates_args={"next_seed"})
def _draw_as_one(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    """Do the same as one operation: a compiled graph would end at a generator."""
    return _draw(values, next_seed, ratio)


@_draw_as_one.register_fake
def _(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.bool)


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


class Dan(SentenceEncoderModel):
    """Images and sentences attend to themselves, step by step; an embedding is the context vectors of all steps.

    The similarity of an image and a sentence is the sum over the steps of the inner products of their contexts, which is the inner
    product of their embeddings. Neither depends on the other, so that each item is embedded once. A word is the sum of the states
    of both directions of an LSTM. Each language has a table of words, an LSTM and an attention of its own.
    """

    similarity = "inner-product"

    def __init__(self, config: DanConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.width = (config.attention_steps + 1) * config.embed_dim
        self.attention = _attention(dimensions.feature_shape[1], config, mapped=True)
        self.sentences = SentenceEncoders(
            dimensions,
            config.word_dim,
            lambda: BidirectionalLSTM(config.word_dim, config.embed_dim),
            lambda: _attention(config.embed_dim, config, mapped=False),
        )

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Return embeddings ``[N, E]`` of images with the features ``[N, R, D]``."""
        return Encoded(widen_bfloat16(self.attention(Encoded(images.features, images.mask))))

    def pool_states(self, read: Encoded, language: str) -> Encoded:
        """Return embeddings ``[N, E]`` of captions that were read, in their order."""
        return Encoded(widen_bfloat16(self.sentences.of(language).pooling(_words(read))))

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights:
        """Return how much each step attends to the regions of an image, and to the tokens of a caption."""
        regions, words = Encoded(images.features, images.mask), _words(self.token_states(captions, language))
        return weights_of_heads(self.attention, regions, self.sentences.of(language).pooling, words)


def _attention(width: int, config: DanConfig, *, mapped: bool) -> AttentionSteps:
    return AttentionSteps(
        width,
        config.embed_dim,
        steps=config.attention_steps,
        attention_dim=config.attention_dim,
        mapped=mapped,
        dropout=config.dropout,
    )


def _words(read: Encoded) -> Encoded:
    """Return the words of captions ``[N, T, H]``, of states that are the means of both directions."""
    return Encoded(2 * read.values, read.mask)

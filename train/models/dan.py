"""Dual attention networks for matching (m-DAN): the model kind ``dan``.

Nam, Ha, Kim (2017): Dual Attention Networks for Multimodal Reasoning and Matching (arXiv 1611.00471). Details follow the
reimplementation github.com/JunweiLiang/DualAttentionNetwork (``model.py``), which reaches the paper's recalls. Differences:

* The placement of dropout is simpler, see `AttentionSteps`.
* Matrices begin with Xavier's weights, not normal ones, and c_0 of an image has no bias.
* The mean of a sentence is over its own words, as in the paper, not over the longest sentence of the batch.

Shapes: ``N`` images or captions, ``M`` regions or tokens, ``R`` regions, ``D`` feature width, ``T`` tokens,
``H`` width of a context vector, ``K`` steps, ``E`` = (K + 1) * H embedding width. In `AttentionSteps`, ``W``
is the width of a region or token, ``A`` that of the attention space, ``E`` that of a context vector.
"""

from typing import Any

import torch
from torch import Tensor, nn

from train.config.models import DanConfig
from train.data.batches import CaptionBatch
from train.models.encoders import AttentionPoolingModel, SentenceEncoders, apply_where_present
from train.models.retrieval_model import Dimensions, Encoded


class Dropout(nn.Module):
    """Dropout with a resumable random state.

    The seed of the next mask is sampled with the initial weights, and grows by one with each mask. Checkpoints store it as
    ``next_seed``, so that a resumed run samples the same masks. It stays on the CPU: reading it from a GPU would synchronise.

    Args:
        ratio: share of the values that become zeros, 0 to less than 1; with 0 the module has no state.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.next_seed = torch.randint(2**31, ()) if ratio else None  # Not a buffer, which DDP would broadcast.

    def forward(self, values: Tensor) -> Tensor:
        """Zero some values in training mode, and scale the others by 1 / (1 - ratio)."""
        if self.next_seed is None or not self.training:
            return values
        sample = _sample_mask_op if torch.compiler.is_compiling() else _sample_mask
        return values * sample(values.detach(), self.next_seed, self.ratio) / (1 - self.ratio)

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


def _sample_mask(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    """Sample a bool mask of the kept values, and increment the seed."""
    generator = torch.Generator(values.device).manual_seed(int(next_seed))
    next_seed += 1
    return torch.rand(values.shape, generator=generator, device=values.device) >= ratio


@torch.library.custom_op("imagepivot::draw", mutates_args={"next_seed"})
def _sample_mask_op(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    """Run `_sample_mask` as one operation: a generator would break a compiled graph."""
    return _sample_mask(values, next_seed, ratio)


@_sample_mask_op.register_fake
def _(values: Tensor, next_seed: Tensor, ratio: float) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.bool)


class AttentionSteps(nn.Module):
    """Context vectors of images or sentences from K attention steps.

    With the regions v_n of an image, or the words of a sentence, and ⊙ the element-wise product::

        c_0 = f_0(mean over n of v_n)                       m_0 = c_0
        h_n = tanh(W_k v_n) ⊙ tanh(W'_k m_k-1)              a_n = softmax over n of w_k · h_n
        c_k = f_k(sum over n of a_n v_n)                    m_k = m_k-1 + c_k

    Contexts of images are mapped into the space of those of sentences, f_k(x) = tanh(P_k x); for sentences f_k is the identity.
    Each step has its own matrices, without biases. Without regions or tokens, all contexts are zeros.

    Dropout zeros words of a sentence, inputs of P_k, and h.

    Args:
        width: W.
        config: hyper-parameters, of which ``embed_dim`` is E.
        mapped: map the contexts; otherwise E is W.
    """

    def __init__(self, width: int, config: DanConfig, *, mapped: bool) -> None:
        super().__init__()
        steps, attention_dim, embed_dim = config.attention_steps, config.attention_dim, config.embed_dim
        self.maps = nn.ModuleList(_linear(width, embed_dim) for _ in range(steps + 1)) if mapped else None
        self.of_items = nn.ModuleList(_linear(width, attention_dim) for _ in range(steps))
        self.of_memories = nn.ModuleList(_linear(embed_dim, attention_dim) for _ in range(steps))
        self.of_hidden = nn.ModuleList(_linear(attention_dim, 1) for _ in range(steps))
        self.dropout = Dropout(config.dropout)

    def forward(self, items: Encoded) -> Tensor:
        """Return the concatenated contexts of ``[N, M, W]``, ``[N, (K + 1) * E]``."""
        return self._attend(items)[0]

    def weights(self, items: Encoded) -> Tensor:
        """Return the attention weights of each step, ``[N, K, M]``; 0 outside the mask."""
        return self._attend(items)[1]

    def _attend(self, items: Encoded) -> tuple[Tensor, Tensor]:
        values = items.values if items.mask is None else items.values.masked_fill(~items.mask[..., None], 0)
        if self.maps is None:
            values = self.dropout(values)
        outside = ~items.mask_or_ones
        counts = items.mask_or_ones.sum(1, keepdim=True).clamp(min=1)  # [N, 1]
        memory = self._context(0, values.sum(1) / counts)
        contexts, weights = [memory], []
        for step, project in enumerate(self.of_items):
            keys = apply_where_present(project, values, items.mask).tanh()  # [N, M, A]
            hidden = self.dropout(keys * self.of_memories[step](memory).tanh()[:, None])
            logits = self.of_hidden[step](hidden).squeeze(2)  # [N, M]
            weights.append(logits.masked_fill(outside, -torch.inf).softmax(dim=1).masked_fill(outside, 0))
            contexts.append(self._context(step + 1, (weights[-1][:, None] @ values).squeeze(1)))
            memory = memory + contexts[-1]
        return torch.cat(contexts, dim=1), torch.stack(weights, dim=1)

    def _context(self, index: int, pooled: Tensor) -> Tensor:
        """Return the context ``[N, E]`` of pooled vectors ``[N, W]``."""
        return pooled if self.maps is None else self.maps[index](self.dropout(pooled)).tanh()


def _linear(width: int, outputs: int) -> nn.Linear:
    """Build a linear layer without bias, initialized by Xavier."""
    matrix = nn.Linear(width, outputs, bias=False)
    nn.init.xavier_uniform_(matrix.weight)
    return matrix


class Dan(AttentionPoolingModel):
    """Images and sentences pooled by `AttentionSteps` into concatenated contexts.

    The similarity of an image and a sentence is the inner product of their embeddings: the sum of those of their contexts over the
    steps. A word is the sum of the states of both directions of an LSTM. Each language has its own sentence encoder.
    """

    similarity = "inner-product"

    def __init__(self, config: DanConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.width = (config.attention_steps + 1) * config.embed_dim
        self.attention = AttentionSteps(dimensions.feature_shape[1], config, mapped=True)
        self.sentences = SentenceEncoders(
            config, dimensions, "bilstm", lambda: AttentionSteps(config.embed_dim, config, mapped=False)
        )

    def token_states(self, captions: CaptionBatch, language: str) -> Encoded:
        """Return the sums of both directions of the LSTM, ``[N, T, H]``."""
        means = super().token_states(captions, language)
        return Encoded(2 * means.values, means.mask)

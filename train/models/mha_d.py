"""Multi-head attention with diversity (Huang et al. 2019): the kind of model ``mha-d``.

Letters in shapes: ``N`` images or captions of a batch, ``A`` and ``B`` those that are compared, ``M`` regions or tokens of the one
with the most, ``R`` regions, ``D`` feature width, ``H`` width of a region or token in the joint space, ``K`` heads, ``E`` = K * H
width of an embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from train.config.models import MhaDConfig
from train.data.batches import CaptionBatch
from train.models.encoders import (
    BidirectionalLSTM,
    ImageEncoder,
    SentenceEncoderModel,
    SentenceEncoders,
    weights_of_heads,
    where_present,
    widen_bfloat16,
)
from train.models.retrieval_model import AttentionWeights, Dimensions, Encoded, ImageBatch
from train.models.similarity import unit


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


class MhaD(SentenceEncoderModel):
    """Regions and words in one space, pooled by heads that attend within an image or a sentence; an embedding is all heads.

    An affine map takes the features of an image into the joint space, and a bidirectional LSTM for each language the words of a
    sentence; images and each language have an attention of their own. All embeddings have length 1, but for an image without
    regions, which is zeros and has no gradient. The diversity of the heads (equations 5 and 6) is a term of the objective, see
    `train.losses.diversity_loss`.

    Where the paper is silent: the map of regions has no activation, as in SCAN (``model.py``, ``EncoderImagePrecomp``); a token is
    the mean of both directions of the LSTM, H units each, as there; the matrices of the attention have no biases, as in equation 1.
    """

    similarity = "cosine"

    def __init__(self, config: MhaDConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.width = config.num_heads * config.embed_dim
        self.heads = config.num_heads
        sizes = {"num_heads": config.num_heads, "attention_dim": config.attention_dim, "context_dim": config.context_dim}
        self.regions = ImageEncoder(dimensions.feature_shape[1], config.embed_dim)
        self.attention = MultiHeadAttention(config.embed_dim, **sizes)
        self.sentences = SentenceEncoders(
            dimensions,
            config.word_dim,
            lambda: BidirectionalLSTM(config.word_dim, config.embed_dim),
            lambda: MultiHeadAttention(config.embed_dim, **sizes),
        )

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Return embeddings ``[N, E]`` of images with the features ``[N, R, D]``."""
        return _embedding(self.attention(self._regions(images)))

    def pool_states(self, read: Encoded, language: str) -> Encoded:
        """Return embeddings ``[N, E]`` of captions that were read, in their order."""
        return _embedding(self.sentences.of(language).pooling(read))

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights:
        """Return how much each head attends to the regions of an image, and to the tokens of a caption."""
        regions, words = self._regions(images), self.token_states(captions, language)
        return weights_of_heads(self.attention, regions, self.sentences.of(language).pooling, words)

    def _regions(self, images: ImageBatch) -> Encoded:
        """Return the regions of images in the joint space, ``[N, R, H]``."""
        return Encoded(where_present(self.regions, images.features, images.mask), images.mask)


def _embedding(heads: Tensor) -> Encoded:
    """Place concatenated heads ``[N, E]`` on the unit sphere; bfloat16 becomes float32."""
    return Encoded(unit(widen_bfloat16(heads)))

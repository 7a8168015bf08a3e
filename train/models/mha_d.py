"""Multi-head attention with diversity (Huang et al. 2019): kind ``mha-d``.

Shapes: ``N`` images or captions, ``M`` regions or tokens, ``R`` regions, ``D`` feature width, ``H`` width of a region or token in
the joint space, ``K`` heads, ``A`` width of the attention space, ``E`` = K * H embedding width.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from train.config.models import MhaDConfig
from train.models.encoders import AttentionPoolingModel, ImageEncoder, SentenceEncoders, apply_where_present, widen_bfloat16
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch
from train.models.similarity import l2_normalize


class MultiHeadAttention(nn.Module):
    """Attention pooling of regions or tokens into K vectors, one per head.

    With the tokens g_i of a sentence, or the regions of an image, and for head k a learned context c_k and
    two learned matrices (equations 1 and 2)::

        a_i^k = softmax over i of tanh(W_c^k c_k)^T tanh(W^k g_i)
        g^k = sum over i of a_i^k g_i

    The result is the concatenation of the heads; zeros without regions or tokens.
    """

    def __init__(self, config: MhaDConfig) -> None:
        super().__init__()
        heads, attention_dim = config.num_heads, config.attention_dim
        self.contexts = nn.Parameter(torch.empty(heads, config.context_dim))
        self.of_contexts = nn.Parameter(torch.empty(heads, attention_dim, config.context_dim))
        self.of_items = nn.Parameter(torch.empty(heads, attention_dim, config.embed_dim))
        # The paper does not say how to initialize. This attention starts near the mean, with different heads.
        nn.init.uniform_(self.contexts, -0.1, 0.1)
        for matrices in (self.of_contexts, self.of_items):
            for matrix in matrices:
                nn.init.xavier_uniform_(matrix)

    def forward(self, items: Encoded) -> Tensor:
        """Return the concatenated heads of ``[N, M, H]``, ``[N, K * H]``."""
        return (self.weights(items) @ items.values).flatten(1)

    def weights(self, items: Encoded) -> Tensor:
        """Return the attention weights of each head, ``[N, K, M]``; 0 outside the mask."""
        logits = apply_where_present(self._logits, items.values, items.mask, absent=-torch.inf).transpose(1, 2)  # [N, K, M]
        weights = logits.softmax(dim=2)
        return weights if items.mask is None else weights.masked_fill(~items.mask[:, None], 0)

    def _logits(self, items: Tensor) -> Tensor:
        """Return the logits ``[..., K]`` of regions or tokens ``[..., H]``."""
        heads, attention_dim, _ = self.of_items.shape
        queries = (self.of_contexts @ self.contexts[..., None]).squeeze(2).tanh()  # [K, A]
        keys = linear(items, self.of_items.flatten(0, 1)).tanh().unflatten(-1, (heads, attention_dim))  # [..., K, A]
        return torch.einsum("...ka,ka->...k", keys, queries.to(keys.dtype))


class MhaD(AttentionPoolingModel):
    """Regions and words in one space, pooled by `MultiHeadAttention`.

    An affine map encodes regions, and one bidirectional LSTM per language encodes words. Images and each
    language have their own attention. Embeddings are normalized, see `l2_normalize`. The diversity of the
    heads (equations 5 and 6) is a term of the objective, see `train.losses.diversity_loss`.

    Choices that the paper leaves open: regions have no activation, and a token is the mean of both directions of the LSTM, H units
    each, as in SCAN (``model.py``); the matrices of the attention have no biases, as in equation 1.
    """

    similarity = "cosine"

    def __init__(self, config: MhaDConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.width = config.num_heads * config.embed_dim
        self.heads = config.num_heads
        self.regions = ImageEncoder(dimensions.feature_shape[1], config.embed_dim)
        self.attention = MultiHeadAttention(config)
        self.sentences = SentenceEncoders(config, dimensions, "bilstm", lambda: MultiHeadAttention(config))

    def _regions(self, images: ImageBatch) -> Encoded:
        """Return the regions of images in the joint space, ``[N, R, H]``."""
        return Encoded(apply_where_present(self.regions, images.features, images.mask), images.mask)

    def _embedding(self, pooled: Tensor) -> Encoded:
        return Encoded(l2_normalize(widen_bfloat16(pooled)))

"""Stacked cross attention (SCAN) of regions and words: the model kind ``scan``.

Lee, Chen, Hua, Hu, He (2018): Stacked Cross Attention for Image-Text Matching (arXiv 1803.08024), section
3.1, and their code (github.com/kuanghuei/SCAN, ``model.py``). Queries attend to contexts: words to regions,
or regions to words. With unit vectors q_t of a query and v_k of a context, and s_kt = <v_k, q_t>:

1. s_kt passes a leaky ReLU with ``negative_slope``, and is divided by its norm over t;
2. a_kt is the softmax over k, with inverse temperature lambda_1;
3. the relevance r_t of q_t is its cosine with sum_k a_kt v_k;
4. the score of the pair is the LogSumExp of its relevances, log(sum_t exp(lambda_2 r_t)) / lambda_2, or their mean.

The cosine is independent of the denominator of the softmax, and follows from s and the Gram matrix G = V V^T of a context:
<q_t, sum_k a_k v_k> = sum_k a_k s_kt and |sum_k a_k v_k|^2 = a^T G a. Attended vectors of width E are never computed.

Gradients are computed only for pairs with a nonzero score gradient: for the hardest negatives, three in a row
of a batch. A CPU processes the queries of a context as a tile. A GPU would launch too many small kernels for
that, and gathers query and context of hundreds of pairs instead.

Shapes: ``C`` contexts, ``K`` vectors of a context, ``Q`` queries, ``T`` vectors of a query, ``E`` their
width; ``A`` contexts and ``B`` queries of a tile. For P gathered pairs, ``A`` = P and ``B`` = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import leaky_relu

from schemas.process.devices import upload
from train.config.models import ScanConfig
from train.data.batches import CaptionBatch
from train.models.encoders import ImageEncoder, SentenceEncoderModel, SentenceEncoders
from train.models.retrieval_model import AttentionWeights, Dimensions, Encoded, ImageBatch
from train.models.similarity import l2_normalize

_TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""Products in a tile, by kind of device."""

_TILE_QUERIES = 64

_COPIED_ELEMENTS = 2**24
"""Elements of queries transposed for tiles in one step: 64 MiB in float32."""

_DENSE_SHARE = 1 / 8
"""Share of pairs with a gradient above which the backward pass computes whole tiles."""

_GATHERED_ELEMENTS = 2**25
"""Elements of queries and contexts gathered by pair in the backward pass on a GPU: 128 MiB in float32, in about four copies."""

_MIN_SQUARED_NORM = 1e-30
"""Squared norm up to which a vector counts as zeros: its cosine is 0 and has no gradient."""

_MAX_EXPONENT = 20.0


@torch.compiler.disable  # The number and shapes of tiles change with each batch.
def cross_attention(queries: Encoded, contexts: Encoded, config: ScanConfig) -> Tensor:
    """Return the scores of all queries and contexts, ``[Q, C]``.

    The Q x C x T x K products are computed in tiles, so that memory is bounded, and computed again in the
    backward pass. Values outside the masks have no effect.

    Args:
        queries: unit vectors or zeros, ``[Q, T, E]``.
        contexts: unit vectors or zeros, ``[C, K, E]``.
        config: hyper-parameters; the side that attends and the encoders have no effect.
    """
    scores: Tensor = _CrossAttention.apply(queries.values, queries.mask, contexts.values, contexts.mask, config)
    return scores


@torch.no_grad()
def attention_of_pair(query: Encoded, context: Encoded, config: ScanConfig) -> Tensor:
    """Return the weights a_kt of a query ``[1, T, E]`` over a context ``[1, K, E]``.

    Returns:
        ``[T, K]`` for the vectors inside the masks; each row sums to 1.
    """
    q, v = (item.values[:, item.mask_or_ones[0]] for item in (query, context))
    weights = _Attention((v @ q.mT)[..., None], v @ v.mT, None, None, config).weights[0, :, :, 0]  # [K, T]
    return (weights / weights.sum(0)).T


class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        query_mask: Tensor | None,
        contexts: Tensor,
        context_mask: Tensor | None,
        config: ScanConfig,
    ) -> Tensor:
        query_mask, context_mask = (None if mask is None else mask.cpu() for mask in (query_mask, context_mask))
        ctx.save_for_backward(queries, contexts)
        ctx.config, ctx.masks = config, (query_mask, context_mask)
        scores = queries.new_zeros(len(queries), len(contexts))
        query_chunks = _chunks(queries, query_mask, _TILE_QUERIES)
        block_size = max(1, _COPIED_ELEMENTS // max(1, _TILE_QUERIES * queries.shape[1] * queries.shape[2]))
        while block := list(islice(query_chunks, block_size)):
            columns = [chunk.vectors.transpose(0, 1).flatten(0, 1) for chunk in block]  # [T * B, E] each, contiguous.
            for context in _chunks(contexts, context_mask, _contexts_per_tile(contexts, queries, query_mask)):
                gram = context.vectors @ context.vectors.mT
                for query, column in zip(block, columns, strict=True):
                    attention = _attend(query, column, context, gram, config)
                    scores[query.rows[:, None], context.rows] = attention.scores().T
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        (queries, contexts), (query_mask, context_mask) = ctx.saved_tensors, ctx.masks
        d_queries, d_contexts = torch.zeros_like(queries), torch.zeros_like(contexts)
        nonzero = (d_scores != 0).cpu()
        is_dense = int(nonzero.sum()) > _DENSE_SHARE * nonzero.numel()
        with torch.autocast(queries.device.type, enabled=False):
            if queries.device.type != "cpu" and not is_dense:
                sides = (queries, query_mask, d_queries), (contexts, context_mask, d_contexts)
                _add_pair_gradients(*sides, d_scores, nonzero.nonzero(), ctx.config)
                return d_queries, None, d_contexts, None, None
            height = _contexts_per_tile(contexts, queries, query_mask) if is_dense else 1
            for context in _chunks(contexts, context_mask, height):
                gram = context.vectors @ context.vectors.mT
                d_context, d_gram = torch.zeros_like(context.vectors), torch.zeros_like(gram)
                rows = nonzero[:, context.cpu_rows].any(1).nonzero().flatten()
                for query in _chunks(queries, query_mask, _TILE_QUERIES, rows):
                    columns = query.vectors.transpose(0, 1).flatten(0, 1)
                    attention = _attend(query, columns, context, gram, ctx.config)
                    d_products, d_tile_gram = attention.gradients(d_scores[query.rows[:, None], context.rows].T)
                    d_products = d_products.flatten(2).flatten(0, 1)  # [A * K, T * B]
                    d_gram += d_tile_gram
                    d_context += (d_products @ columns).view_as(d_context)
                    d_columns = d_products.T @ context.vectors.flatten(0, 1)
                    query.add(d_queries, d_columns.view(-1, len(query), queries.shape[2]).transpose(0, 1))
                context.add(d_contexts, d_context + 2 * d_gram @ context.vectors)
        return d_queries, None, d_contexts, None, None


_Side: TypeAlias = tuple[Tensor, Tensor | None, Tensor]
"""All queries or contexts ``[N, M, E]``, their CPU mask, and their gradients."""


def _add_pair_gradients(queries: _Side, contexts: _Side, d_scores: Tensor, pairs: Tensor, config: ScanConfig) -> None:
    """Add the gradients of pairs (query, context), int64 ``[P, 2]`` on the CPU."""
    _, max_size, width = queries[0].shape
    block_size = max(1, _GATHERED_ELEMENTS // max(1, (max_size + contexts[0].shape[1]) * width))
    for block in pairs.split(block_size) if len(pairs) else ():
        rows = upload(block, d_scores.device)
        query = _Chunk.gather(*queries[:2], block[:, 0], rows[:, 0])
        context = _Chunk.gather(*contexts[:2], block[:, 1], rows[:, 1])
        attention = _Attention(
            torch.bmm(context.vectors, query.vectors.mT)[..., None],
            torch.bmm(context.vectors, context.vectors.mT),
            None if query.mask is None else query.mask[..., None],
            context.mask,
            config,
        )
        d_products, d_gram = attention.gradients(d_scores[rows[:, 0], rows[:, 1], None])
        d_products = d_products.squeeze(3)  # [P, K, T]
        query.add(queries[2], torch.bmm(d_products.mT, context.vectors), is_repeated=True)
        d_context = torch.bmm(d_products, query.vectors).baddbmm_(d_gram, context.vectors, alpha=2)
        context.add(contexts[2], d_context, is_repeated=True)


@dataclass(frozen=True)
class _Chunk:
    """Some queries or contexts.

    Attributes:
        cpu_rows: int64 ``[n]``, their row indices, on the CPU.
        rows: the row indices on the device of the vectors.
        vectors: ``[n, M, E]``, zeros outside the mask; M is the largest size in the chunk.
        mask: bool ``[n, M]``; None without padding.
    """

    cpu_rows: Tensor
    rows: Tensor
    vectors: Tensor
    mask: Tensor | None

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def gather(cls, values: Tensor, mask: Tensor | None, cpu_rows: Tensor, rows: Tensor) -> _Chunk:
        """Gather one or more rows; the mask is on the CPU."""
        if mask is None:
            return cls(cpu_rows, rows, values[rows], None)
        chosen = mask[cpu_rows]
        chosen = chosen[:, : _sizes(chosen).max()]
        vectors = values[rows, : chosen.shape[1]]
        if chosen.all():
            return cls(cpu_rows, rows, vectors, None)
        chosen = upload(chosen, values.device)
        return cls(cpu_rows, rows, vectors.masked_fill(~chosen[..., None], 0), chosen)

    def add(self, total: Tensor, gradients: Tensor, *, is_repeated: bool = False) -> None:
        """Add gradients ``[n, M, E]`` to those of all queries or contexts.

        Rows that may be repeated are added in a reproducible order.
        """
        if self.mask is not None:
            gradients = gradients.masked_fill(~self.mask[..., None], 0)
        if is_repeated:
            total[:, : gradients.shape[1]].index_put_((self.rows,), gradients, accumulate=True)
        else:
            total[self.rows, : gradients.shape[1]] += gradients


def _chunks(values: Tensor, mask: Tensor | None, length: int, rows: Tensor | None = None) -> Iterator[_Chunk]:
    """Yield chunks of some rows (by default all), sorted by size to reduce padding.

    Mask and rows are on the CPU, so that shapes are known without synchronising.
    """
    rows = torch.arange(len(values)) if rows is None else rows
    if mask is not None:
        rows = rows[_sizes(mask[rows]).argsort(stable=True)]
    for chunk in rows.split(length) if len(rows) else ():
        yield _Chunk.gather(values, mask, chunk, upload(chunk, values.device))


def _sizes(mask: Tensor) -> Tensor:
    """Return the position after the last vector of each row; a row may have gaps."""
    return (mask * torch.arange(1, mask.shape[1] + 1)).amax(1) if mask.shape[1] else torch.zeros(len(mask), dtype=torch.int64)


def _contexts_per_tile(contexts: Tensor, queries: Tensor, mask: Tensor | None) -> int:
    mean_size = queries.shape[1] if mask is None else int(mask.sum()) / max(1, len(mask))
    elements = contexts.shape[1] * mean_size * min(_TILE_QUERIES, len(queries))
    return max(1, int(_TILE_ELEMENTS[contexts.device.type] / max(1, elements)))


def _attend(query: _Chunk, columns: Tensor, context: _Chunk, gram: Tensor, config: ScanConfig) -> _Attention:
    """Return the attention of queries, also as ``[T * B, E]``, over contexts."""
    products = (context.vectors.flatten(0, 1) @ columns.T).view(*gram.shape[:2], -1, len(query))
    return _Attention(products, gram, None if query.mask is None else query.mask.T[None], context.mask, config)


class _Attention:
    """Attention of a tile; with queries last, sums are over contiguous rows.

    Args:
        products: ``[A, K, T, B]``.
        gram: inner products of the vectors of each context, ``[A, K, K]``.
        query_mask: bool ``[1, T, B]`` or ``[A, T, B]``; None without padding.
        context_mask: bool ``[A, K]``; None without padding.
    """

    def __init__(
        self, products: Tensor, gram: Tensor, query_mask: Tensor | None, context_mask: Tensor | None, config: ScanConfig
    ) -> None:
        self.query_mask, self.config, self.products = query_mask, config, products
        exponents = leaky_relu(products, config.negative_slope)
        scratch = exponents * exponents  # Used three times: an allocation takes longer than the computation.
        self.scale = _inverse_root(scratch.sum(2, keepdim=True))  # [A, K, 1, B]
        exponents *= config.lambda_softmax * self.scale
        if context_mask is not None:
            exponents.masked_fill_(~context_mask[..., None, None], -torch.inf)
        if config.lambda_softmax > _MAX_EXPONENT:
            exponents -= exponents.amax(1, keepdim=True).clamp_min(-config.lambda_softmax)
        self.weights = exponents.exp_()  # The softmax without its denominator.
        self.attended = torch.bmm(gram, self.weights.flatten(2)).view_as(products)  # Products of v_k with the attended vectors.
        self.along = torch.mul(self.weights, products, out=scratch).sum(1)  # [A, T, B]
        self.inverse = _inverse_root(torch.mul(self.weights, self.attended, out=scratch).sum(1))  # [A, T, B]
        self.relevance = self.along * self.inverse  # [A, T, B]

    def scores(self) -> Tensor:
        """Return the scores, ``[A, B]``."""
        if self.config.pooling == "avg":
            return self.relevance.sum(1) / self._counts()  # Padding has the relevance 0.
        return self._mask_padding(self.relevance * self.config.lambda_lse).logsumexp(1) / self.config.lambda_lse

    def gradients(self, d_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of products ``[A, K, T, B]`` and Gram matrices ``[A, K, K]``."""
        if self.config.pooling == "avg":
            d_relevance = (d_scores / self._counts())[:, None].expand_as(self.relevance)
        else:
            d_relevance = d_scores[:, None] * self._mask_padding(self.relevance * self.config.lambda_lse).softmax(1)
        d_along = (d_relevance * self.inverse)[:, None]  # [A, 1, T, B]
        d_square = (d_relevance * self.relevance * self.inverse.square() / -2)[:, None]
        d_gram = torch.bmm((self.weights * d_square).flatten(2), self.weights.flatten(2).mT)
        normalized = leaky_relu(self.products, self.config.negative_slope) * self.scale
        d_weights = d_along * self.products + 2 * d_square * self.attended
        d_normalized = self.config.lambda_softmax * self.weights * d_weights
        d_clipped = self.scale * (d_normalized - normalized * (d_normalized * normalized).sum(2, keepdim=True))
        slope = (self.products > 0) + self.config.negative_slope * (self.products <= 0)
        return d_along * self.weights + slope * d_clipped, d_gram

    def _counts(self) -> Tensor | int:
        """Return the sizes of queries, at least 1: ``[1, B]``, ``[A, B]``, or a number."""
        return max(1, self.products.shape[2]) if self.query_mask is None else self.query_mask.sum(1).clamp_min(1)

    def _mask_padding(self, values: Tensor) -> Tensor:
        """Set values ``[A, T, B]`` of padding to -inf."""
        return values if self.query_mask is None else values.masked_fill(~self.query_mask, -torch.inf)


def _inverse_root(squares: Tensor) -> Tensor:
    return squares.rsqrt().masked_fill(~(squares > _MIN_SQUARED_NORM), 0)


class Scan(SentenceEncoderModel):
    """Regions and words in one space, compared by stacked cross attention.

    All vectors are normalized (``l2norm`` in ``model.py``), see `l2_normalize`. ``<start>`` and ``<end>``
    count as words, as in the released code (``data.py``).
    """

    vectors = False

    def __init__(self, config: ScanConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.width = config.embed_dim
        self.similarity = f"{config.attention}-{config.pooling}"
        self._config = config
        self._words_attend = config.attention == "t2i"
        self.images = ImageEncoder(dimensions.feature_shape[1], config.embed_dim)
        self.sentences = SentenceEncoders(config, dimensions, config.text_encoder)

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Encode features ``[B, R, D]`` as unit vectors ``[B, R, E]``."""
        features = images.features
        if images.mask is not None:
            features = features.masked_fill(~images.mask[..., None], 0)
        return Encoded(l2_normalize(self.images(features).float()), images.mask)

    def pool_states(self, states: Encoded, language: str) -> Encoded:
        """Return the unit vectors ``[B, T, E]`` of words, in the order of the captions."""
        return Encoded(l2_normalize(states.values.float()), states.mask)

    def _compare(self, a: Encoded, b: Encoded) -> Tensor:
        """Return the scores of regions ``a`` and words ``b``."""
        return cross_attention(b, a, self._config).T if self._words_attend else cross_attention(a, b, self._config)

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights:
        """Return the attention weights between words and regions."""
        regions, words = self.encode_images(images), self.encode_captions(captions, language)
        if self._words_attend:
            return AttentionWeights(pairs=attention_of_pair(words, regions, self._config))
        return AttentionWeights(pairs=attention_of_pair(regions, words, self._config).T, words_attend=False)

"""Stacked cross attention of regions and words in any number of languages: the kind of model ``scan``.

Lee, Chen, Hua, Hu, He (2018): Stacked Cross Attention for Image-Text Matching (arXiv 1803.08024), section 3.1, and their code
(github.com/kuanghuei/SCAN, ``model.py``). Regions attend to words, or words to regions; whichever attends is a query here, and what
it attends to the context. With unit vectors q_t of a query and v_k of a context, and s_kt = <v_k, q_t>:

1. s_kt is clipped at zero, or multiplied by a small ``negative_slope`` there, and divided by its norm over the t of the query;
2. a_kt is the softmax of lambda_1 times that, over the k of the context;
3. the relevance of q_t is its cosine with sum_k a_kt v_k;
4. the score of the pair is the LogSumExp of its relevances, log(sum_t exp(lambda_2 r_t)) / lambda_2, or their mean.

Two facts save most of the work, and change nothing: the cosine does not see the denominator of the softmax, and it follows from s
and the products G = V V^T of a context's vectors, <q_t, sum_k a_k v_k> = sum_k a_k s_kt and |sum_k a_k v_k|^2 = a^T G a, so that
no attended vector of width E is ever formed. Beyond the products s, a pair of 36 regions and 14 words then costs 4 % as many
multiply-adds. A gradient is computed only for pairs whose score has one: with the hardest negatives, three in a row of a batch. A
CPU takes the queries that a context needs as a tile; a GPU, which would wait for the launches of so many small tiles, takes a copy
of query and context for each of hundreds of pairs at once.

Letters in shapes: ``C`` contexts, ``K`` vectors of a context, ``Q`` queries, ``T`` vectors of a query, ``E`` their width; ``A``
contexts and ``B`` queries of a tile; of P pairs that are taken as they are, ``A`` = P and ``B`` = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import leaky_relu

from train.config.models import ScanConfig
from train.data.batches import CaptionBatch
from train.devices import upload
from train.models.encoders import TEXT_ENCODERS, ImageEncoder, SentenceEncoderModel, SentenceEncoders
from train.models.retrieval_model import AttentionWeights, Dimensions, Encoded, ImageBatch
from train.models.similarity import unit

_NUMBERS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}
"""Number of products in a tile, by kind of device. On a CPU one thread is fastest with 2^18 to 2^20; with more of them, several
threads wait less for each other, most of all where other processes use the cores, too."""

_QUERIES_OF_A_TILE = 64

_COPIED_AT_ONCE = 2**24
"""Number of numbers of the queries that are brought into the order of the tiles at once: 64 MiB in float32."""

_DENSE = 1 / 8
"""Share of pairs with a gradient from which tiles are computed whole in the backward pass."""

_GATHERED_AT_ONCE = 2**25
"""Number of numbers of queries and contexts that are brought together pair by pair in the backward pass, on a GPU: 128 MiB in
float32, of which there are some four copies."""

_SHORTEST = 1e-30
"""Square of a norm up to which there is no direction: the cosine is 0 then, and has no gradient."""

_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class CrossAttention:
    """The choices of stacked cross attention.

    Attributes:
        lambda_softmax: inverse temperature of the softmax, lambda_1.
        lambda_lse: inverse temperature of the LogSumExp, lambda_2; None takes the mean of the relevances instead.
        negative_slope: factor of negative products: 0 in the paper's equations, 0.1 in the released code.
    """

    lambda_softmax: float
    lambda_lse: float | None
    negative_slope: float = 0.1


@torch.compiler.disable  # The tiles only save memory, and their number and shapes change with each batch.
def cross_attention(queries: Encoded, contexts: Encoded, choices: CrossAttention) -> Tensor:
    """Return how relevant contexts are to queries, ``[Q, C]``.

    The Q x C x T x K products are never held together: both passes use some megabytes besides a copy of a bounded part of the
    queries, however many there are, and the backward pass computes them again. What the masks leave out never counts.

    ``queries`` ``[Q, T, E]`` and ``contexts`` ``[C, K, E]`` are unit vectors, or zeros.
    """
    scores: Tensor = _CrossAttention.apply(queries.values, queries.mask, contexts.values, contexts.mask, choices)
    return scores


@torch.no_grad()
def attention_of_pair(query: Encoded, context: Encoded, choices: CrossAttention) -> Tensor:
    """Return how much each vector of a query attends to each of a context, the a_kt by which it is scored.

    Both hold one item: ``[1, T, E]`` and ``[1, K, E]``.

    Returns:
        ``[T, K]``, without what the masks leave out; each row sums to 1.
    """
    (queries,), (contexts,) = (_chunks(one.values[:, one.present[0]], None, 1) for one in (query, context))
    products = _products(contexts, queries.vectors[0], 1)
    gram = contexts.vectors @ contexts.vectors.mT
    weights = _Attention(products, gram, queries.presence, contexts.present, choices).weights[0, :, :, 0]  # [K, T]
    return (weights / weights.sum(0)).T


class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        query_mask: Tensor | None,
        contexts: Tensor,
        context_mask: Tensor | None,
        choices: CrossAttention,
    ) -> Tensor:
        query_mask, context_mask = (None if mask is None else mask.cpu() for mask in (query_mask, context_mask))
        ctx.save_for_backward(queries, contexts)
        ctx.choices, ctx.masks = choices, (query_mask, context_mask)
        scores = queries.new_zeros(len(queries), len(contexts))
        query_chunks = _chunks(queries, query_mask, _QUERIES_OF_A_TILE)
        copied = max(1, _COPIED_AT_ONCE // max(1, _QUERIES_OF_A_TILE * queries.shape[1] * queries.shape[2]))
        while block := list(islice(query_chunks, copied)):
            columns = [chunk.vectors.transpose(0, 1).flatten(0, 1) for chunk in block]  # [T * B, E] each, contiguous.
            for context in _chunks(contexts, context_mask, _contexts_of_a_tile(contexts, queries, query_mask)):
                gram = context.vectors @ context.vectors.mT
                for query, column in zip(block, columns, strict=True):
                    products = _products(context, column, len(query))
                    attention = _Attention(products, gram, query.presence, context.present, choices)
                    scores[query.rows[:, None], context.rows] = attention.scores().T
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        (queries, contexts), (query_mask, context_mask) = ctx.saved_tensors, ctx.masks
        d_queries, d_contexts = torch.zeros_like(queries), torch.zeros_like(contexts)
        given = (d_scores != 0).cpu()
        dense = int(given.sum()) > _DENSE * given.numel()
        with torch.autocast(queries.device.type, enabled=False):
            if queries.device.type != "cpu" and not dense:
                vectors = _Both(queries, query_mask, d_queries), _Both(contexts, context_mask, d_contexts)
                _add_gradients_of_pairs(*vectors, d_scores, given.nonzero(), ctx.choices)
                return d_queries, None, d_contexts, None, None
            height = _contexts_of_a_tile(contexts, queries, query_mask) if dense else 1
            for context in _chunks(contexts, context_mask, height):
                gram = context.vectors @ context.vectors.mT
                d_context, d_gram = torch.zeros_like(context.vectors), torch.zeros_like(gram)
                wanted = given[:, context.numbers].any(1).nonzero().flatten()
                for query in _chunks(queries, query_mask, _QUERIES_OF_A_TILE, wanted):
                    columns = query.vectors.transpose(0, 1).flatten(0, 1)
                    products = _products(context, columns, len(query))
                    attention = _Attention(products, gram, query.presence, context.present, ctx.choices)
                    d_products, d_gram_here = attention.gradients(d_scores[query.rows[:, None], context.rows].T)
                    d_products = d_products.flatten(2).flatten(0, 1)  # [A * K, T * B]
                    d_gram += d_gram_here
                    d_context += (d_products @ columns).view_as(d_context)
                    d_columns = d_products.T @ context.vectors.flatten(0, 1)
                    query.add(d_queries, d_columns.view(-1, len(query), queries.shape[2]).transpose(0, 1))
                context.add(d_contexts, d_context + 2 * d_gram @ context.vectors)
        return d_queries, None, d_contexts, None, None


class _Both(NamedTuple):
    """All queries, or all contexts, ``[N, longest, E]``, their mask on the CPU, and their gradients."""

    values: Tensor
    mask: Tensor | None
    gradients: Tensor

    def of(self, rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the vectors ``[P, longest of them, E]`` of rows, zeros where there is none, and where there is one.

        The rows are given on the CPU and on the device, int64 ``[P]``.
        """
        if self.mask is None:
            return self.values[there], None
        mask = self.mask[rows]
        present = upload(mask[:, : _ends(mask).max()], self.values.device)
        return self.values[there, : present.shape[1]].masked_fill(~present[..., None], 0), present

    def add(self, there: Tensor, gradients: Tensor, present: Tensor | None) -> None:
        """Add up gradients of rows, some of which are there several times: in an order that does not change from run to run."""
        if present is not None:
            gradients = gradients.masked_fill(~present[..., None], 0)
        self.gradients[:, : gradients.shape[1]].index_put_((there,), gradients, accumulate=True)


def _add_gradients_of_pairs(queries: _Both, contexts: _Both, d_scores: Tensor, pairs: Tensor, choices: CrossAttention) -> None:
    """Add the gradients of pairs, int64 ``[P, 2]`` on the CPU, of a query and a context each."""
    _, longest, width = queries.values.shape
    together = max(1, _GATHERED_AT_ONCE // max(1, (longest + contexts.values.shape[1]) * width))
    for some in pairs.split(together) if len(pairs) else ():
        there = upload(some, d_scores.device)
        (query, query_present), (context, context_present) = (
            both.of(some[:, side], there[:, side]) for side, both in enumerate((queries, contexts))
        )
        attention = _Attention(
            torch.bmm(context, query.mT)[..., None],
            torch.bmm(context, context.mT),
            None if query_present is None else query_present[..., None],
            context_present,
            choices,
        )
        d_products, d_gram = attention.gradients(d_scores[there[:, 0], there[:, 1], None])
        d_products = d_products.squeeze(3)  # [P, K, T]
        queries.add(there[:, 0], torch.bmm(d_products.mT, context), query_present)
        d_context = torch.bmm(d_products, query).baddbmm_(d_gram, context, alpha=2)
        contexts.add(there[:, 1], d_context, context_present)


@dataclass(frozen=True)
class _Chunk:
    """Some queries or contexts with about as many vectors each.

    Attributes:
        numbers: int64 ``[n]``, which they are, on the CPU.
        rows: the same on the device of the vectors.
        vectors: ``[n, longest, E]``, zeros where there is none.
        present: bool ``[n, longest]``, where there is one; None if everywhere.
    """

    numbers: Tensor
    rows: Tensor
    vectors: Tensor
    present: Tensor | None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def presence(self) -> Tensor | None:
        """The same for queries of a tile, as `_Attention` takes it: ``[1, longest, n]``."""
        return None if self.present is None else self.present.T[None]

    def add(self, total: Tensor, gradients: Tensor) -> None:
        """Add gradients ``[n, longest, E]`` to those of all queries or contexts."""
        if self.present is not None:
            gradients = gradients.masked_fill(~self.present[..., None], 0)
        total[self.rows, : gradients.shape[1]] += gradients  # No row is there twice.


def _chunks(values: Tensor, mask: Tensor | None, size: int, wanted: Tensor | None = None) -> Iterator[_Chunk]:
    """Yield chunks of the rows that are wanted, all if None; those of a chunk have about as many vectors, for little padding.

    The mask and what is wanted are on the CPU, where their sizes are known without waiting for a GPU.
    """
    rows = torch.arange(len(values)) if wanted is None else wanted
    device = values.device
    if mask is None:
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            there = upload(some, device)
            yield _Chunk(some, there, values[start : start + size] if wanted is None else values[there], None)
        return
    ends, order = _ends(mask[rows]).sort(stable=True)
    rows, longest = rows[order], ends.tolist()
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        end = longest[start : start + size][-1]
        present, there = mask[some, :end], upload(some, device)
        if bool(present.all()):
            yield _Chunk(some, there, values[there, :end], None)
        else:
            present = upload(present, device)
            yield _Chunk(some, there, values[there, :end].masked_fill(~present[..., None], 0), present)


def _ends(mask: Tensor) -> Tensor:
    """Return the place after the last vector of each row: those before need not all be there."""
    return (mask * torch.arange(1, mask.shape[1] + 1)).amax(1) if mask.shape[1] else torch.zeros(len(mask), dtype=torch.int64)


def _contexts_of_a_tile(contexts: Tensor, queries: Tensor, mask: Tensor | None) -> int:
    vectors = queries.shape[1] if mask is None else int(mask.sum()) / max(1, len(mask))  # Of a query, on average.
    numbers = contexts.shape[1] * vectors * min(_QUERIES_OF_A_TILE, len(queries))
    return max(1, int(_NUMBERS_AT_ONCE[contexts.device.type] / max(1, numbers)))


def _products(context: _Chunk, columns: Tensor, queries: int) -> Tensor:
    """Return the products ``[A, K, T, B]`` of the vectors of contexts and those of queries, ``[T * B, E]``."""
    products = context.vectors.flatten(0, 1) @ columns.T
    return products.view(len(context), context.vectors.shape[1], -1, queries)


class _Attention:
    """A tile. Queries come last in its arrays, so that sums over K and T run along whole rows of memory.

    Args:
        products: ``[A, K, T, B]``.
        gram: products of the vectors of each context, ``[A, K, K]``.
        presence: bool ``[1, T, B]``, or ``[A, T, B]``, where queries have a vector; None if everywhere.
        present: bool ``[A, K]``, likewise of contexts.
        choices: those of the attention.
    """

    def __init__(
        self, products: Tensor, gram: Tensor, presence: Tensor | None, present: Tensor | None, choices: CrossAttention
    ) -> None:
        self.presence, self.choices, self.products = presence, choices, products
        exponents = leaky_relu(products, choices.negative_slope)
        scratch = exponents * exponents  # A fresh array costs more than what is computed into it.
        self.scale = _inverse_root(scratch.sum(2, keepdim=True))  # [A, K, 1, B]
        exponents *= choices.lambda_softmax * self.scale
        if present is not None:
            exponents.masked_fill_(~present[..., None, None], -torch.inf)
        if choices.lambda_softmax > _LARGEST_EXPONENT:
            exponents -= exponents.amax(1, keepdim=True).clamp_min(-choices.lambda_softmax)
        self.weights = exponents.exp_()  # The softmax but for its denominator.
        self.attended = torch.bmm(gram, self.weights.flatten(2)).view_as(products)  # Products of v_k with the attended vectors.
        self.along = torch.mul(self.weights, products, out=scratch).sum(1)  # [A, T, B]
        self.inverse = _inverse_root(torch.mul(self.weights, self.attended, out=scratch).sum(1))  # [A, T, B]
        self.relevance = self.along * self.inverse  # [A, T, B]

    def scores(self) -> Tensor:
        """Return the scores, ``[A, B]``."""
        temperature = self.choices.lambda_lse
        if temperature is None:
            return self.relevance.sum(1) / self._counts()  # Those of absent vectors are 0.
        return (self._outside(self.relevance * temperature, -torch.inf)).logsumexp(1) / temperature

    def gradients(self, d_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the products, ``[A, K, T, B]``, and of their own ones, ``[A, K, K]``, by those of scores."""
        temperature = self.choices.lambda_lse
        if temperature is None:
            d_relevance = (d_scores / self._counts())[:, None].expand_as(self.relevance)
        else:
            d_relevance = d_scores[:, None] * self._outside(self.relevance * temperature, -torch.inf).softmax(1)
        d_along = (d_relevance * self.inverse)[:, None]  # [A, 1, T, B]
        d_square = (d_relevance * self.relevance * self.inverse.square() / -2)[:, None]
        d_gram = torch.bmm((self.weights * d_square).flatten(2), self.weights.flatten(2).mT)
        normalized = leaky_relu(self.products, self.choices.negative_slope) * self.scale
        d_weights = d_along * self.products + 2 * d_square * self.attended
        d_normalized = self.choices.lambda_softmax * self.weights * d_weights
        d_clipped = self.scale * (d_normalized - normalized * (d_normalized * normalized).sum(2, keepdim=True))
        slope = (self.products > 0) + self.choices.negative_slope * (self.products <= 0)
        return d_along * self.weights + slope * d_clipped, d_gram

    def _counts(self) -> Tensor | int:
        """Return the number of vectors of each query, at least 1: ``[1, B]``, ``[A, B]``, or the same for all."""
        return max(1, self.products.shape[2]) if self.presence is None else self.presence.sum(1).clamp_min(1)

    def _outside(self, of_vectors: Tensor, value: float) -> Tensor:
        """Return values ``[A, T, B]`` with another one where a query has no vector."""
        return of_vectors if self.presence is None else of_vectors.masked_fill(~self.presence, value)


def _inverse_root(squares: Tensor) -> Tensor:
    """Return 1 / sqrt of squared norms, 0 where there is no direction."""
    return squares.rsqrt().masked_fill(~(squares > _SHORTEST), 0)


class Scan(SentenceEncoderModel):
    """Images as regions and captions as words, each a vector in one space; words attend to regions, or regions to words.

    All vectors have length 1 (``l2norm`` in ``model.py``), but for vectors of zeros, which stay zeros and have no gradient.
    ``<start>`` and ``<end>`` are words like any other, as in the released code (``data.py``).
    """

    vectors = False

    def __init__(self, config: ScanConfig, dimensions: Dimensions) -> None:
        super().__init__(config, dimensions)
        self.width = config.embed_dim
        self.similarity = f"{config.attention}-{config.pooling}"
        self._words_attend = config.attention == "t2i"
        self._attention = CrossAttention(
            config.lambda_softmax, config.lambda_lse if config.pooling == "lse" else None, config.negative_slope
        )
        self.images = ImageEncoder(dimensions.feature_shape[1], config.embed_dim)
        self.sentences = SentenceEncoders(
            dimensions,
            config.word_dim,
            lambda: TEXT_ENCODERS[config.text_encoder](config.word_dim, config.embed_dim),
            shared=config.shared_encoder,
        )

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Map features ``[B, R, D]`` to unit vectors ``[B, R, E]``."""
        features = images.features
        if images.mask is not None:
            features = features.masked_fill(~images.mask[..., None], 0)
        return Encoded(unit(self.images(features).float()), images.mask)

    def pool_states(self, read: Encoded, language: str) -> Encoded:
        """Return unit vectors ``[B, T, E]`` of the words of captions that were read, in their order."""
        return Encoded(unit(read.values.float()), read.mask)

    def _compare(self, a: Encoded, b: Encoded) -> Tensor:
        """Return scores ``[A, C]``; ``a`` has the part of the images, with regions, and ``b`` that of the captions, with words."""
        return cross_attention(b, a, self._attention).T if self._words_attend else cross_attention(a, b, self._attention)

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights:
        """Return how much the words of a caption attend to the regions of an image, or these to those."""
        regions, words = self.encode_images(images), self.encode_captions(captions, language)
        if self._words_attend:
            return AttentionWeights(pairs=attention_of_pair(words, regions, self._attention))
        return AttentionWeights(pairs=attention_of_pair(regions, words, self._attention).T, words_attend=False)

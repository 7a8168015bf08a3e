"""Encoders of images and sentences into the joint space.

A sentence passes through three stages::

    token ids --word embedding--> vectors --text encoder--> states --pooling--> one vector
              `WordEmbedding`               `TEXT_ENCODERS`           `pool`, or an attention

`RetrievalModel.token_states` returns the states, and is never compiled; `RetrievalModel.pool_states` is the
pooling, and can be compiled. In checkpoints the text encoder is the submodule ``reader``.

Shapes: ``B`` images or captions, ``R`` regions, ``T`` tokens of the longest caption, ``P`` tokens of all,
``D`` feature width, ``W`` width of a word vector, ``E`` width of the joint space.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from schemas.errors import UsageError
from schemas.process.devices import upload
from schemas.vocabulary import PAD, UNK
from train.config.models import ModelConfig
from train.data.batches import CaptionBatch
from train.data.word_vectors import WordVectors
from train.models.packed_rnn import bilstm_over_trie, build_trie, gru_over_trie
from train.models.retrieval_model import AttentionWeights, Dimensions, Encoded, ImageBatch, RetrievalModel
from train.models.similarity import inner_product


class ImageEncoder(nn.Linear):
    """Affine map of image features, ``[B, D]`` to ``[B, E]``."""

    def reset_parameters(self) -> None:
        """Sample weights uniformly from ±sqrt(6 / (D + E)) and set the bias to 0.

        This is Xavier initialization, as in VSE++ (``model.py``, ``EncoderImagePrecomp``).
        """
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class WordEmbedding(nn.Embedding):
    """Learned word vectors, from token ids to ``[..., W]``.

    Args:
        ids: token ids with a vector, ascending; all others get the vector of ``<unk>``. None means all ids.
    """

    def __init__(self, vocabulary_size: int, width: int, *, ids: Sequence[int] | None = None) -> None:
        super().__init__(vocabulary_size if ids is None else len(ids), width)
        self.ids = range(vocabulary_size) if ids is None else tuple(ids)
        rows = None
        if ids is not None:
            rows = torch.full((vocabulary_size,), list(ids).index(UNK))
            rows[torch.tensor(ids)] = torch.arange(len(ids))
        self.rows: Tensor | None
        self.register_buffer("rows", rows, persistent=False)
        # VSE++ (`model.py`, `EncoderText`).
        nn.init.uniform_(self.weight, -0.1, 0.1)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of token ids."""
        return super().forward(token_ids if self.rows is None else self.rows[token_ids])

    def prepare(self, captions: CaptionBatch) -> tuple[nn.Embedding, CaptionBatch]:
        """Return the inputs of a text encoder: this embedding and the captions."""
        return self, captions


class PrecomputedTokens(nn.Module):
    """Token vectors in the captions, e.g. of BERT, instead of a `WordEmbedding`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_place", torch.empty(0), persistent=False)  # On the device of the model.
        self._place: Tensor

    def prepare(self, captions: CaptionBatch) -> tuple[nn.Embedding, CaptionBatch]:
        """Return the vectors of a batch, and its captions with positions as token ids.

        Raises:
            ValueError: the captions have no vectors.
        """
        vectors = upload(torch.from_numpy(captions.token_vectors()), self._place.device)
        offsets = np.concatenate([[0], np.cumsum(captions.lengths)])
        positions = CaptionBatch(np.arange(len(vectors)), offsets, np.arange(len(captions)))
        return nn.Embedding.from_pretrained(vectors), positions


class FinalStateGRU(nn.Module):
    """Text encoder that returns the state after the last token, ``[B, E]``."""

    def __init__(self, word_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(word_dim, hidden_size, batch_first=True)

    def forward(self, words: nn.Embedding, captions: CaptionBatch) -> Encoded:
        """Encode captions."""
        if uses_packed_rnn(words.weight.device):
            trie = build_trie(captions)
            return Encoded(gru_over_trie(self.gru, words(trie.tokens), trie))
        if not len(captions):
            return Encoded(words.weight.new_zeros(0, self.gru.hidden_size))
        sequence, positions = _pack(words, captions)
        (last,) = self.gru(sequence)[1]
        return Encoded(last.index_select(0, positions))


class BidirectionalLSTM(nn.Module):
    """Text encoder that averages the states of both directions, ``[B, T, E]``."""

    def __init__(self, word_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(word_dim, hidden_size, batch_first=True, bidirectional=True)

    def forward(self, words: nn.Embedding, captions: CaptionBatch) -> Encoded:
        """Encode captions."""
        run = bilstm_over_trie if uses_packed_rnn(words.weight.device) else _run_torch
        return _average_directions(run, self.lstm, words, captions)


class BidirectionalGRU(nn.Module):
    """The GRU counterpart of `BidirectionalLSTM` (Lee et al. 2018, section 3.2)."""

    def __init__(self, word_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(word_dim, hidden_size, batch_first=True, bidirectional=True)

    def forward(self, words: nn.Embedding, captions: CaptionBatch) -> Encoded:
        """Encode captions."""
        return _average_directions(_run_torch, self.gru, words, captions)


TEXT_ENCODERS = {"gru": FinalStateGRU, "bilstm": BidirectionalLSTM, "bigru": BidirectionalGRU}


def orthogonalize(text_encoder: nn.Module) -> None:
    """Initialize a recurrent text encoder with orthogonal matrices.

    As in github.com/ivendrov/order-embedding (``layers.py``, ``utils.py``), each gate has an orthogonal
    recurrent matrix. Input weights are uniform in ±0.1, and biases are 0.
    """
    for name, parameter in text_encoder.named_parameters():
        if "weight_hh" in name:
            for gate in parameter.data.split(parameter.shape[1]):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            nn.init.uniform_(parameter, -0.1, 0.1)
        else:
            nn.init.zeros_(parameter)


def pool(encoded: Encoded, pooling: Literal["mean", "max"] = "mean") -> Tensor:
    """Return the mean, the maximum, or the only vector of each item, ``[B, E]``."""
    if encoded.values.dim() == 2:
        return encoded.values
    outside = ~encoded.mask_or_ones[..., None]
    if pooling == "mean":
        return encoded.values.masked_fill(outside, 0).sum(1) / encoded.mask_or_ones.sum(1, keepdim=True)
    return encoded.values.masked_fill(outside, -torch.inf).amax(1)


def apply_where_present(
    function: Callable[[Tensor], Tensor], values: Tensor, mask: Tensor | None, *, absent: float = 0.0
) -> Tensor:
    """Apply a function to the rows inside a mask; values outside it have no effect.

    On a CPU, rows outside the mask are skipped. On a GPU, counting them would synchronise with the host, and a graph break would
    end a compiled graph: the function is applied to all rows, and the results outside the mask are replaced.

    Args:
        function: from ``[..., F]`` to ``[..., G]``; finite for zeros.
        values: ``[N, M, F]``.
        mask: bool ``[N, M]``, true for present rows; None if all are present.
        absent: result outside the mask.

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
    padded = result.new_full((mask.numel(), result.shape[1]), absent)
    return padded.index_copy(0, rows, result).unflatten(0, mask.shape)


class SentenceEncoder(nn.Module):
    """Word embedding, text encoder, and pooling.

    Args:
        reader: one of `TEXT_ENCODERS`.
        pooling: from the states ``[B, T, E]`` or ``[B, E]`` to a vector per caption, e.g. `pool`.
    """

    def __init__(
        self, words: WordEmbedding | PrecomputedTokens, reader: nn.Module, pooling: Callable[[Encoded], Tensor] = pool
    ) -> None:
        super().__init__()
        self.words = words
        self.reader = reader
        self.pooling = pooling

    @torch.compiler.disable  # The numbers of tokens and time steps change with each batch, which would be compiled each time.
    def states(self, captions: CaptionBatch) -> Encoded:
        """Return the states of the text encoder, in the order of the captions."""
        states: Encoded = self.reader(*self.words.prepare(captions))
        return states


class SentenceEncoders(nn.ModuleList):
    """The sentence encoders of a model: one for each language, or one for all.

    ``config`` is the section of a kind in this package, and ``text_encoder`` a key of `TEXT_ENCODERS`. By
    default, ``hidden_size`` is the width of the joint space.
    """

    def __init__(
        self,
        config: Any,
        dimensions: Dimensions,
        text_encoder: str,
        build_pooling: Callable[[], Callable[[Encoded], Tensor]] = lambda: pool,
        *,
        hidden_size: int = 0,
    ) -> None:
        self.languages = dimensions.languages
        self.shared = config.mixes_languages
        build_reader = partial(TEXT_ENCODERS[text_encoder], config.word_dim, hidden_size or config.embed_dim)

        def build_words(language: str) -> WordEmbedding | PrecomputedTokens:
            if dimensions.token_width:
                return PrecomputedTokens()
            return WordEmbedding(dimensions.vocabulary_size, config.word_dim, ids=dimensions.language_ids.get(language))

        super().__init__(
            SentenceEncoder(build_words(language), build_reader(), build_pooling())
            for language in self.languages[: 1 if self.shared else None]
        )

    def of(self, language: str) -> SentenceEncoder:
        """Return the encoder of a language.

        Raises:
            ValueError: the language is unknown.
        """
        if language not in self.languages:
            raise ValueError(f"language is {language!r}, expected one of {self.languages}")
        encoder = self[0 if self.shared else self.languages.index(language)]
        assert isinstance(encoder, SentenceEncoder)
        return encoder


def uses_packed_rnn(device: torch.device) -> bool:
    """Return whether `train.models.packed_rnn` replaces torch on a device.

    It is faster on a CPU (``tests/benchmarks/bench_training.py``). On a GPU, cuDNN runs all time steps in one kernel.
    """
    return device.type == "cpu"


def _run_torch(network: nn.LSTM | nn.GRU, words: nn.Embedding, captions: CaptionBatch) -> tuple[Tensor, ...]:
    """Run a bidirectional network of torch in place of `bilstm_over_trie`."""
    sequence, positions = _pack(words, captions)
    states, _ = pad_packed_sequence(network(sequence)[0], batch_first=True)  # [B, T, 2E]
    return states.index_select(0, positions).chunk(2, dim=2)


def _pack(words: nn.Embedding, captions: CaptionBatch) -> tuple[PackedSequence, Tensor]:
    """Pack word vectors; also return the position of each caption, int64 ``[B]``."""
    device = words.weight.device
    vectors = words(upload(torch.from_numpy(captions.padded(PAD)), device))  # [B, T, W]
    # Sorted on the CPU: torch would copy the order back from the GPU, which synchronises.
    lengths, order = torch.from_numpy(captions.lengths).sort(descending=True)
    sequence = pack_padded_sequence(vectors.index_select(0, upload(order, device)), lengths, batch_first=True)
    return sequence, upload(order.argsort(), device)


def _average_directions(
    run: Callable[..., tuple[Tensor, ...]], network: nn.LSTM | nn.GRU, words: nn.Embedding, captions: CaptionBatch
) -> Encoded:
    """Return the mean states of both directions, as in SCAN (``model.py``)."""
    if not len(captions):
        return Encoded(words.weight.new_zeros(0, 1, network.hidden_size))
    forward, backward = run(network, words, captions)  # [B, T, E]
    lengths = upload(torch.from_numpy(captions.lengths), forward.device)
    return Encoded((forward + backward) / 2, torch.arange(forward.shape[1], device=forward.device) < lengths[:, None])


def embedding_parameters(model: nn.Module, vocabulary_size: int) -> dict[str, Sequence[int]]:
    """Return the token id of each row of the word embeddings, by parameter name.

    Word embeddings are each `WordEmbedding`, and torch's own embeddings with as many rows as tokens.
    """
    ids_by_name: dict[str, Sequence[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, WordEmbedding):
            ids_by_name[f"{name}.weight"] = module.ids
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.num_embeddings == vocabulary_size:
            ids_by_name[f"{name}.weight"] = range(vocabulary_size)
    return ids_by_name


def load_pretrained_embeddings(model: RetrievalModel, words: WordVectors, counts: Sequence[Mapping[str, int]]) -> str:
    """Replace the random vectors of words that have pretrained ones.

    Returns:
        A sentence about the replaced vectors.

    Raises:
        UsageError: the model has no word embedding of this width.
    """
    replaced = []
    for name, ids in embedding_parameters(model, len(counts)).items():
        weight = model.get_parameter(name)
        if weight.shape[1] != words.width:
            raise UsageError(
                f"{name} has word vectors of width {weight.shape[1]}, but {words.location!r} has width "
                f"{words.width}: choose other vectors, or another width"
            )
        by_module = model.modules_by_language().items()
        languages = next((languages for module, languages in by_module if name.startswith(f"{module}.")), model.languages)
        token_ids, vectors = words.of_languages(languages, counts)
        _, positions, rows = np.intersect1d(token_ids, ids, assume_unique=True, return_indices=True)
        with torch.no_grad():
            weight[torch.from_numpy(rows)] = torch.from_numpy(vectors[positions]).to(weight)
        replaced.append(f"{len(rows):,} of {len(ids):,} in {', '.join(languages)}")
    if not replaced:
        raise UsageError("the model has no word embedding to load word vectors into: leave --word-vectors out")
    return f"word vectors loaded from {words.location!r}: {'; '.join(replaced)}; the others are random"


def freeze_word_embeddings(model: nn.Module, vocabulary_size: int) -> None:
    """Exclude word embeddings from training."""
    for name in embedding_parameters(model, vocabulary_size):
        model.get_parameter(name).requires_grad_(False)


class SentenceEncoderModel(RetrievalModel):
    """A model with `SentenceEncoders`.

    Raises:
        UsageError: the model does not accept image features of this shape.
    """

    sentences: SentenceEncoders

    def __init__(self, config: ModelConfig, dimensions: Dimensions) -> None:
        super().__init__()
        config.check_features(dimensions.feature_shape)
        self.languages = dimensions.languages

    def token_states(self, captions: CaptionBatch, language: str) -> Encoded:
        """Return the states of the text encoder: ``[B, T, H]``, or the last, ``[B, H]``."""
        return self.sentences.of(language).states(captions)

    def pool_states(self, states: Encoded, language: str) -> Encoded:
        """Return the embeddings ``[B, E]`` of captions, in their order."""
        return self._embedding(self.sentences.of(language).pooling(states))

    def _embedding(self, pooled: Tensor) -> Encoded:
        return Encoded(widen_bfloat16(pooled))

    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        """Encode captions in one language, in their order."""
        return self.pool_states(self.token_states(captions, language), language)

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return the scores of all pairs, ``[A, B]``; by default inner products.

        Autocast is off: bfloat16 rounding is nearly as large as the margins of the losses.
        """
        with torch.autocast(a.values.device.type, enabled=False):
            return self._compare(a, b)

    def _compare(self, a: Encoded, b: Encoded) -> Tensor:
        return inner_product(a.values, b.values)

    def modules_by_language(self) -> Mapping[str, Sequence[str]]:
        """Return the languages of each sentence encoder."""
        if self.sentences.shared:
            return {"sentences.0": self.languages}
        return {f"sentences.{index}": (language,) for index, language in enumerate(self.languages)}


def widen_bfloat16(values: Tensor) -> Tensor:
    """Convert bfloat16 to float32; other types stay."""
    return values.float() if values.dtype == torch.bfloat16 else values


class AttentionPoolingModel(SentenceEncoderModel):
    """A model that pools regions and tokens by attention, with ``weights`` of heads."""

    attention: nn.Module

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Return embeddings ``[B, E]`` of images with the features ``[B, R, D]``."""
        return self._embedding(self.attention(self._regions(images)))

    def attention_weights(self, images: ImageBatch, captions: CaptionBatch, language: str) -> AttentionWeights:
        """Return the attention weights of each head over regions and tokens."""
        regions, words = self._regions(images), self.token_states(captions, language)
        image_heads: Any = self.attention
        word_heads: Any = self.sentences.of(language).pooling
        return AttentionWeights(
            regions=image_heads.weights(regions)[0, :, regions.mask_or_ones[0]],
            words=word_heads.weights(words)[0, :, words.mask_or_ones[0]],
        )

    def _regions(self, images: ImageBatch) -> Encoded:
        return Encoded(images.features, images.mask)

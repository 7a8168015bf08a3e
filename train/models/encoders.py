"""Encoders of images and sentences into the joint space, and models with such encoders.

A sentence encoder is composed: a table of word vectors, a reader that goes through them, and a pooling that makes one vector of
what it returns.

Letters in shapes: ``B`` images or captions, ``T`` tokens of the longest caption, ``P`` tokens of all, ``D`` feature width, ``W``
word width, ``E`` joint embedding width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from schemas.errors import UsageError
from schemas.vocabulary import PAD, UNK
from train.config.models import ModelConfig
from train.data.batches import CaptionBatch
from train.data.word_vectors import WordVectors
from train.devices import upload
from train.models.packed_rnn import bilstm_over_trie, build_trie, gru_over_trie
from train.models.retrieval_model import AttentionWeights, Dimensions, Encoded, RetrievalModel
from train.models.similarity import inner_product


class ImageEncoder(nn.Linear):
    """Affine map of image features, ``[B, D]`` to ``[B, E]``."""

    def __init__(self, feature_width: int, embedding: int) -> None:
        super().__init__(feature_width, embedding)

    def reset_parameters(self) -> None:
        """Draw weights uniformly from ±sqrt(6 / (D + E)) and set the bias to 0.

        This is Xavier initialization, as in VSE++ (``model.py``, ``EncoderImagePrecomp``).
        """
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class WordEmbedding(nn.Embedding):
    """A learned vector for each word, from token ids to ``[..., W]``.

    Args:
        vocabulary_size: number of token ids.
        width: W.
        ids: the token ids that have a vector, ascending; all others are read as ``<unk>``. None means every id.
    """

    def __init__(self, vocabulary_size: int, width: int, *, ids: Sequence[int] | None = None) -> None:
        super().__init__(vocabulary_size if ids is None else len(ids), width)
        self.ids = range(vocabulary_size) if ids is None else tuple(ids)
        self.rows: Tensor | None
        self.register_buffer("rows", None if ids is None else _rows(vocabulary_size, ids), persistent=False)
        # VSE++ (`model.py`, `EncoderText`).
        nn.init.uniform_(self.weight, -0.1, 0.1)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of token ids."""
        return super().forward(token_ids if self.rows is None else self.rows[token_ids])

    def prepare(self, captions: CaptionBatch) -> tuple[WordEmbedding, CaptionBatch]:
        """Return what a reader reads: this table, and the captions."""
        return self, captions


@dataclass(frozen=True)
class PrecomputedEmbeddings:
    """The given vectors of the tokens of a batch, ``[P, W]``, in the place of a `WordEmbedding`: an id is the number of a token."""

    weight: Tensor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of tokens."""
        return self.weight[token_ids]


class PrecomputedTokens(nn.Module):
    """Vectors of tokens that captions bring along, such as those of BERT, in the place of a `WordEmbedding`; nothing is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_place", torch.empty(0), persistent=False)  # Says which device the model is on.
        self._place: Tensor

    def prepare(self, captions: CaptionBatch) -> tuple[PrecomputedEmbeddings, CaptionBatch]:
        """Return what a reader reads: the vectors of a batch, and its captions with the number of each token as its id.

        Raises:
            ValueError: the captions have no vectors.
        """
        vectors = upload(torch.from_numpy(captions.token_vectors()), self._place.device)
        offsets = np.concatenate([[0], np.cumsum(captions.lengths)])
        return PrecomputedEmbeddings(vectors), CaptionBatch(np.arange(len(vectors)), offsets, np.arange(len(captions)))


Words: TypeAlias = WordEmbedding | PrecomputedEmbeddings
"""From token ids to their vectors ``[..., W]``, which are in ``weight``."""


def words_of(dimensions: Dimensions, width: int, ids: Sequence[int] | None = None) -> WordEmbedding | PrecomputedTokens:
    """Return the words of a new sentence encoder: given ones where the data has vectors of tokens, otherwise a new table."""
    return PrecomputedTokens() if dimensions.token_width else WordEmbedding(dimensions.vocabulary_size, width, ids=ids)


class FinalStateGRU(nn.Module):
    """Reader whose result is its state after the last token, ``[B, E]``. Prefixes that captions share are read once."""

    def __init__(self, word_width: int, units: int) -> None:
        super().__init__()
        self.gru = nn.GRU(word_width, units, batch_first=True)

    def forward(self, words: Words, captions: CaptionBatch) -> Encoded:
        """Read captions."""
        if uses_packed_rnn(words.weight.device):
            packed = build_trie(captions)
            return Encoded(gru_over_trie(self.gru, words(packed.tokens), packed))
        return Encoded(read_last_with_torch(self.gru, words, captions))


class BidirectionalLSTM(nn.Module):
    """Reader whose result is a state for each token, ``[B, T, E]``: the mean of both directions', as in SCAN (``model.py``)."""

    def __init__(self, word_width: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(word_width, units, batch_first=True, bidirectional=True)

    def forward(self, words: Words, captions: CaptionBatch) -> Encoded:
        """Read captions."""
        read = bilstm_over_trie if uses_packed_rnn(words.weight.device) else read_with_torch
        return _both_ways(read, self.lstm, words, captions)


class BidirectionalGRU(nn.Module):
    """Reader with the result of a `BidirectionalLSTM`, of a GRU: that of SCAN (Lee et al. 2018, section 3.2)."""

    def __init__(self, word_width: int, units: int) -> None:
        super().__init__()
        self.gru = nn.GRU(word_width, units, batch_first=True, bidirectional=True)

    def forward(self, words: Words, captions: CaptionBatch) -> Encoded:
        """Read captions."""
        return _both_ways(read_with_torch, self.gru, words, captions)


TEXT_ENCODERS = {"gru": FinalStateGRU, "bilstm": BidirectionalLSTM, "bigru": BidirectionalGRU}


def orthogonalize(reader: nn.Module) -> None:
    """Draw new weights of a recurrent reader whose parameters have torch's names.

    The recurrent weights of each gate become an orthogonal matrix, the weights of the words are drawn uniformly from ±0.1, and the
    biases are 0, as in github.com/ivendrov/order-embedding (``layers.py``, ``utils.py``). An orthogonal matrix keeps the length of
    what it multiplies, so that neither states nor gradients vanish over the words of a sentence.
    """
    for name, parameter in reader.named_parameters():
        if "weight_hh" in name:
            for gate in parameter.data.split(parameter.shape[1]):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            nn.init.uniform_(parameter, -0.1, 0.1)
        else:
            nn.init.zeros_(parameter)


def pooled(encoded: Encoded, pooling: Literal["mean", "max"] = "mean") -> Tensor:
    """Return one vector ``[B, E]`` for each item: the mean or the greatest value of its vectors, or the only one that it has."""
    if encoded.values.dim() == 2:
        return encoded.values
    outside = ~encoded.present[..., None]
    if pooling == "mean":
        return encoded.values.masked_fill(outside, 0).sum(1) / encoded.present.sum(1, keepdim=True)
    return encoded.values.masked_fill(outside, -torch.inf).amax(1)


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


class SentenceEncoder(nn.Module):
    """Words, a reader, and a pooling.

    Args:
        words: vectors of words.
        reader: one of `TEXT_ENCODERS`.
        pooling: what makes one vector of a reader's states ``[B, T, E]``, or takes the only one ``[B, E]``: `pooled` with a choice,
            or a module.
    """

    def __init__(
        self, words: WordEmbedding | PrecomputedTokens, reader: nn.Module, pooling: Callable[[Encoded], Tensor] = pooled
    ) -> None:
        super().__init__()
        self.words = words
        self.reader = reader
        self.pooling = pooling

    @torch.compiler.disable  # The number of tokens, and that of time steps, changes with each batch: each would be compiled anew.
    def states(self, captions: CaptionBatch) -> Encoded:
        """Return what the reader does, in the order of the captions."""
        states: Encoded = self.reader(*self.words.prepare(captions))
        return states

    def forward(self, captions: CaptionBatch) -> Tensor:
        """Return a vector for each caption, in their order."""
        return self.pooling(self.states(captions))


class SentenceEncoders(nn.ModuleList):
    """The sentence encoders of a model: one for each language, or one for all.

    Args:
        dimensions: languages, size of the vocabulary, and the ids that have a vector.
        word_width: W.
        reader: makes a new reader.
        pooling: makes the pooling of a new encoder.
        shared: whether one encoder reads all languages.
    """

    def __init__(
        self,
        dimensions: Dimensions,
        word_width: int,
        reader: Callable[[], nn.Module],
        pooling: Callable[[], Callable[[Encoded], Tensor]] = lambda: pooled,
        *,
        shared: bool = False,
    ) -> None:
        self.languages = dimensions.languages
        self.shared = shared
        ids_of_encoders = [dimensions.language_ids.get(language) for language in self.languages[: 1 if shared else None]]
        super().__init__(SentenceEncoder(words_of(dimensions, word_width, ids), reader(), pooling()) for ids in ids_of_encoders)

    def of(self, language: str) -> SentenceEncoder:
        """Return the encoder that reads a language.

        Raises:
            ValueError: none does.
        """
        if language not in self.languages:
            raise ValueError(f"language is {language!r}, expected one of {self.languages}")
        encoder = self[0 if self.shared else self.languages.index(language)]
        assert isinstance(encoder, SentenceEncoder)
        return encoder

    def by_language(self, name: str) -> Mapping[str, Sequence[str]]:
        """Return the languages of each encoder, for `RetrievalModel.modules_by_language`."""
        if self.shared:
            return {f"{name}.0": self.languages}
        return {f"{name}.{number}": (language,) for number, language in enumerate(self.languages)}


def uses_packed_rnn(device: torch.device) -> bool:
    """Return whether GRU and LSTM of `train.models.packed_rnn` read on a device; torch's do on the others.

    On a CPU ours are faster (``tests/benchmarks/bench_training.py``). On a GPU torch's are cuDNN's, one operation for all time
    steps, of which ours start some twenty each, forward and backward. Both have the same parameters.
    """
    return device.type == "cpu"


def read_with_torch(network: nn.LSTM | nn.GRU, words: Words, captions: CaptionBatch) -> tuple[Tensor, ...]:
    """Read captions, one or more, with torch's own network; arguments and result as of `bilstm_over_trie`."""
    sequence, back = _sequence(words, captions)
    states, _ = pad_packed_sequence(network(sequence)[0], batch_first=True)  # [B, T, 2E]
    return states.index_select(0, back).chunk(2, dim=2)


def read_last_with_torch(gru: nn.GRU, words: Words, captions: CaptionBatch) -> Tensor:
    """Read captions with torch's own GRU of one direction, and return the state of each after its last token, ``[B, E]``."""
    if not len(captions):
        return words.weight.new_zeros(0, gru.hidden_size)
    sequence, back = _sequence(words, captions)
    (last,) = gru(sequence)[1]
    return last.index_select(0, back)


def _sequence(words: Words, captions: CaptionBatch) -> tuple[PackedSequence, Tensor]:
    """Return the vectors of the words of captions, the longest first, and int64 ``[B]``, the place of each caption there."""
    device = words.weight.device
    vectors = words(upload(torch.from_numpy(captions.padded(PAD)), device))  # [B, T, W]
    # Sorted here, since torch would read the order back from the GPU, and wait for it.
    lengths, order = torch.from_numpy(captions.lengths).sort(descending=True)
    sequence = pack_padded_sequence(vectors.index_select(0, upload(order, device)), lengths, batch_first=True)
    return sequence, upload(order.argsort(), device)


def _both_ways(
    read: Callable[..., tuple[Tensor, ...]], network: nn.LSTM | nn.GRU, words: Words, captions: CaptionBatch
) -> Encoded:
    """Return the mean of the states of both directions for each token."""
    if not len(captions):
        return Encoded(words.weight.new_zeros(0, 1, network.hidden_size))
    forward, backward = read(network, words, captions)  # [B, T, E]
    lengths = upload(torch.from_numpy(captions.lengths), forward.device)
    return Encoded((forward + backward) / 2, torch.arange(forward.shape[1], device=forward.device) < lengths[:, None])


def _rows(vocabulary_size: int, ids: Sequence[int]) -> Tensor:
    """Return the row of each token id in a table of ``ids`` only, int64 ``[vocabulary_size]``."""
    if UNK not in ids:
        raise ValueError(f"the ids of a language must have <unk> ({UNK}) among them")
    rows = torch.full((vocabulary_size,), list(ids).index(UNK))
    rows[torch.tensor(ids)] = torch.arange(len(ids))
    return rows


def embedding_parameters(model: nn.Module, vocabulary_size: int) -> dict[str, Sequence[int]]:
    """Return, by parameter, the token id of each row of the tables of word vectors.

    These are each `WordEmbedding`, and torch's own embeddings that have as many rows as there are tokens.
    """
    tables: dict[str, Sequence[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, WordEmbedding):
            tables[f"{name}.weight"] = module.ids
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.num_embeddings == vocabulary_size:
            tables[f"{name}.weight"] = range(vocabulary_size)
    return tables


def load_pretrained_embeddings(model: RetrievalModel, words: WordVectors, counts: Sequence[Mapping[str, int]]) -> str:
    """Replace the drawn vectors of words by pretrained ones; a word that has none stays as drawn.

    Returns:
        What was replaced, in one sentence.

    Raises:
        UsageError: the model has no table of such words.
    """
    parameters = dict(model.named_parameters())
    said = []
    for name, ids in embedding_parameters(model, len(counts)).items():
        weight = parameters[name]
        if weight.shape[1] != words.width:
            raise UsageError(
                f"{name} has {weight.shape[1]} numbers a word, but the vectors in {words.location!r} have {words.width}: choose "
                "other vectors, or another width"
            )
        languages = _languages_of(model, name)
        rows_of = {number: row for row, number in enumerate(ids)}
        numbers, vectors = words.of_languages(languages, counts)
        known = [place for place, number in enumerate(numbers.tolist()) if number in rows_of]
        rows = torch.tensor([rows_of[numbers[place]] for place in known], dtype=torch.int64, device=weight.device)
        with torch.no_grad():
            weight[rows] = torch.from_numpy(vectors[known]).to(weight)
        said.append(f"{len(known):,} of {len(rows_of):,} in {', '.join(languages)}")
    if not said:
        raise UsageError("the model has no table of words, so that it cannot begin with word vectors: leave --word-vectors out")
    return f"began with the vectors of words in {words.location!r}: {'; '.join(said)}; the others as drawn"


def freeze_word_embeddings(model: nn.Module, vocabulary_size: int) -> None:
    """Keep the tables of words as they are: training changes them no more."""
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    for name in embedding_parameters(model, vocabulary_size):
        parameters[name].requires_grad_(False)


def _languages_of(model: RetrievalModel, name: str) -> Sequence[str]:
    """Return the languages whose words a parameter holds."""
    for module, languages in model.modules_by_language().items():
        if name.startswith(f"{module}."):
            return tuple(languages)
    return model.languages


class SentenceEncoderModel(RetrievalModel):
    """A model that reads captions, and then makes of the states of the reader what it compares.

    Raises:
        UsageError: the model takes no images with features of this shape.
    """

    sentences: SentenceEncoders

    def __init__(self, config: ModelConfig, dimensions: Dimensions) -> None:
        super().__init__()
        config.check_features(dimensions.feature_shape)
        self.languages = dimensions.languages

    def token_states(self, captions: CaptionBatch, language: str) -> Encoded:
        """Return the states of the reader, ``[B, T, H]``, or ``[B, H]`` where there is only the last one."""
        return self.sentences.of(language).states(captions)

    @abstractmethod
    def pool_states(self, read: Encoded, language: str) -> Encoded:
        """Encode captions in one language from their states, in their order."""

    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        """Encode captions in one language, in their order."""
        return self.pool_states(self.token_states(captions, language), language)

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return the scores of all pairs; by default the inner products of embeddings ``[A, E]`` and ``[B, E]``, ``[A, B]``.

        Always computed in float32 or better: the margins of the losses are not far above the rounding of bfloat16.
        """
        with torch.autocast(a.values.device.type, enabled=False):
            return self._compare(a, b)

    def _compare(self, a: Encoded, b: Encoded) -> Tensor:
        return inner_product(a.values, b.values)

    def modules_by_language(self) -> Mapping[str, Sequence[str]]:
        """Return the languages of each sentence encoder."""
        return self.sentences.by_language("sentences")


def widen_bfloat16(values: Tensor) -> Tensor:
    """Return float32 values in place of bfloat16."""
    return values.float() if values.dtype == torch.bfloat16 else values


def weights_of_heads(image_heads: Any, regions: Encoded, word_heads: Any, words: Encoded) -> AttentionWeights:
    """Return how much the heads of an image attend to its regions, and those of a caption to its words."""
    return AttentionWeights(
        regions=image_heads.weights(regions)[0, :, regions.present[0]],
        words=word_heads.weights(words)[0, :, words.present[0]],
    )

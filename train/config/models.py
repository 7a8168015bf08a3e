"""The section ``model`` of a configuration: a kind of model, and its choices; and the checks of single values in all sections.

Each kind has a dataclass of its own, which the key ``kind`` selects. `train.models.catalogue` holds what is built from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, TypeAlias, get_args, get_origin

from schemas.conversion import Tagged, hints_of
from schemas.errors import UsageError


def require(condition: bool, message: str) -> None:
    """Raise a `UsageError` where a condition does not hold."""
    if not condition:
        raise UsageError(message)


def check_choices(section: str, values: Any) -> None:
    """Check that each value of a section whose annotation is a `Literal` is one of its choices."""
    cls: Any = type(values)
    for key, hint in hints_of(cls).items():
        value, choices = getattr(values, key), get_args(hint)
        if get_origin(hint) is Literal:
            require(value in choices, f"{section}.{key} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def positive(section: str, values: Any, *keys: str) -> None:
    """Check that values of a section are finite and more than 0."""
    for key in keys:
        value = getattr(values, key)
        require(0 < value < math.inf, f"{section}.{key} is {value}, expected more than 0")


def not_negative(section: str, values: Any, *keys: str) -> None:
    """Check that values of a section are finite and not less than 0."""
    for key in keys:
        value = getattr(values, key)
        require(0 <= value < math.inf, f"{section}.{key} is {value}, expected 0 or more")


ENTRY_POINTS = "imagepivot.models"
"""Group of entry points by which other distributions add kinds of models: name of the kind, and the module that registers it."""


@dataclass(frozen=True)
class ModelConfig(Tagged):
    """The section ``model`` of some kind. Extended by frozen dataclasses that set ``kind`` and add their keys."""

    kind: ClassVar[str]

    @property
    def mixes_languages(self) -> bool:
        """Whether one encoder reads captions in all languages, so that a batch may mix them."""
        return True

    @property
    def pretrained_width(self) -> int:
        """Width of the pretrained word vectors that the model begins with; 0 if it draws all, as by default."""
        return 0

    @property
    def token_width(self) -> int:
        """Width of the given vectors of tokens that the model reads in place of words; 0 if it has its own, as by default."""
        return 0

    @property
    def frozen_words(self) -> bool:
        """Whether training leaves the vectors of words as they are."""
        return False

    def check_features(self, shape: tuple[int, ...]) -> None:
        """Check that the model takes features of a shape, before any are read; by default it may be any.

        Args:
            shape: shape of an image's features: ``[D]``, or ``[R, D]`` where an image has several.

        Raises:
            UsageError: it does not.
        """

    def check_compile(self) -> None:
        """Check that compiling such a model gains something, before any data is read; by default it may.

        Raises:
            UsageError: it does not.
        """

    @classmethod
    def choose(cls, table: Mapping[str, Any], prefix: str) -> tuple[type[Any], Mapping[str, Any]]:
        """Return the dataclass of the kind that a table names, ``vse`` if it names none, and the rest of the table.

        Raises:
            UsageError: there is no such kind.
        """
        kind = table.get("kind", VseConfig.kind)
        return _section(kind, f"{prefix}kind"), {key: value for key, value in table.items() if key != "kind"}


WordStart: TypeAlias = Literal["random", "finetuned", "frozen", "precomputed"]


class _Words(ModelConfig):
    """Keys and checks of the kinds of this package: word embeddings, and one or several vectors of an image.

    Attributes:
        word_dim: width of the word embeddings.
        word_vectors: initial word embeddings: ``random``; or pretrained where a word has a vector, and ``finetuned`` like the
            others, or all ``frozen``. ``precomputed`` replaces them by given vectors of tokens, such as those of BERT.
    """

    embed_dim: int
    word_dim: int
    word_vectors: WordStart
    takes_regions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choices("model", self)
        positive("model", self, "embed_dim", "word_dim")

    @property
    def mixes_languages(self) -> bool:
        return getattr(self, "shared_encoder", False)

    def check_features(self, shape: tuple[int, ...]) -> None:
        if self.takes_regions and len(shape) != 2:
            raise UsageError(
                f"the features of an image have the shape {list(shape)}, but a model of the kind {self.kind!r} attends to several "
                "features of an image, [R, D]: give regions, for example of 'faster-rcnn-36', the separate crops of "
                "'vgg19-10crop', or the cells of a grid; models of the kind 'vse' take one vector per image"
            )
        if not self.takes_regions and len(shape) != 1:
            raise UsageError(
                f"the features of an image have the shape {list(shape)}, but a model of the kind {self.kind!r} takes one vector "
                "per image: give such features, for example of 'resnet50-pool', or choose a kind that attends to several, such as "
                "'mha-d'"
            )

    @property
    def pretrained_width(self) -> int:
        return self.word_dim if self.word_vectors in ("finetuned", "frozen") else 0

    @property
    def token_width(self) -> int:
        return self.word_dim if self.word_vectors == "precomputed" else 0

    @property
    def frozen_words(self) -> bool:
        return self.word_vectors == "frozen"


@dataclass(frozen=True)
class VseConfig(_Words):
    """A vector for each image and each sentence, in one space (Kiros et al. 2015, and the papers of the presets).

    Attributes:
        embed_dim: width of the joint space, and number of GRU units.
        shared_encoder: one text encoder over the joint vocabulary for all languages (Kádár et al. 2018); otherwise one per
            language (Gella et al. 2017).
        similarity: ``cosine``, or ``order`` (Vendrov et al. 2016).
        text_encoder: ``gru``, whose last state is the sentence; or ``bilstm`` or ``bigru``, an LSTM or GRU in both directions with
            a state for each word.
        pooling: what becomes of the states of a ``bilstm`` or ``bigru``: their ``mean``, or the ``max`` of each number.
        initialization: initial weights of the text encoder: ``torch`` draws all uniformly from ±1/sqrt(embed_dim); ``orthogonal``
            makes the recurrent weights of each gate an orthogonal matrix, draws those of the words from ±0.1 and sets the biases to
            0 (github.com/ivendrov/order-embedding). Word vectors and the map of images start alike in both.
    """

    kind: ClassVar[str] = "vse"
    takes_regions: ClassVar[bool] = False

    embed_dim: int = 1024
    word_dim: int = 300
    word_vectors: WordStart = "random"
    shared_encoder: bool = True
    similarity: Literal["cosine", "order"] = "cosine"
    text_encoder: Literal["gru", "bilstm", "bigru"] = "gru"
    pooling: Literal["mean", "max"] = "mean"
    initialization: Literal["torch", "orthogonal"] = "torch"


@dataclass(frozen=True)
class MhaDConfig(_Words):
    """Heads that attend to the regions of an image and to the words of a sentence, whose encoder is one per language (MHA-D).

    An image or sentence is its K heads, one after the other: a vector of K times H numbers (Huang et al. 2019).

    Attributes:
        embed_dim: H, width of a region and of a word in the joint space, and of each direction of the LSTM.
        num_heads: K, the number of heads.
        attention_dim: H_attn, width in which contexts are compared with regions and words.
        context_dim: H_c, width of the contexts.
    """

    kind: ClassVar[str] = "mha-d"

    embed_dim: int = 512
    word_dim: int = 300
    word_vectors: WordStart = "random"
    num_heads: int = 3
    attention_dim: int = 512
    context_dim: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("model", self, "num_heads", "attention_dim", "context_dim")


@dataclass(frozen=True)
class ScanConfig(_Words):
    """Stacked cross attention between the regions of an image and the words of a caption (Lee et al. 2018).

    Attributes:
        embed_dim: width of regions and words in the joint space, and number of units of the text encoder in each direction.
        shared_encoder: one text encoder over the joint vocabulary for all languages; otherwise one per language.
        text_encoder: a GRU or LSTM in both directions: ``bigru`` or ``bilstm``.
        attention: ``t2i``, words attend to regions (text-image in the paper); or ``i2t``, regions attend to words (image-text).
        pooling: how the relevances of the words, or regions, become a score: ``lse``, LogSumExp; or ``avg``, their mean.
        lambda_softmax: inverse temperature of the attention, the paper's lambda_1.
        lambda_lse: inverse temperature of the LogSumExp, the paper's lambda_2; of no effect with ``avg``.
        negative_slope: factor of negative similarities before they are normalized: 0 in the paper, 0.1 in the released code.
    """

    kind: ClassVar[str] = "scan"

    embed_dim: int = 1024
    word_dim: int = 300
    word_vectors: WordStart = "random"
    shared_encoder: bool = True
    text_encoder: Literal["bigru", "bilstm"] = "bigru"
    attention: Literal["t2i", "i2t"] = "t2i"
    pooling: Literal["lse", "avg"] = "avg"
    lambda_softmax: float = 9.0
    lambda_lse: float = 6.0
    negative_slope: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("model", self, "lambda_softmax", "lambda_lse")
        not_negative("model", self, "negative_slope")

    def check_compile(self) -> None:
        """Refuse: the attention is computed in tiles whose number depends on values, so that no graph covers most of a step."""
        raise UsageError(
            f"--compile gains nothing with a model of the kind {self.kind!r}: its attention between regions and words, most of a "
            "step, is computed in tiles that no compiled graph covers. Leave --compile out"
        )


@dataclass(frozen=True)
class DanConfig(_Words):
    """Attention within an image and within a sentence, in steps that a memory steers (Nam et al. 2017, m-DAN).

    An image or sentence is its context vectors, one after the other: a vector of (K + 1) times H numbers. Each language has a
    sentence encoder of its own.

    Attributes:
        embed_dim: H, width of a context vector and of a word, and of each direction of the LSTM.
        attention_steps: K, the number of steps of attention.
        attention_dim: width in which memories are compared with regions and words.
        dropout: ratio of dropout; 0 means none.
    """

    kind: ClassVar[str] = "dan"

    embed_dim: int = 512
    word_dim: int = 512
    word_vectors: WordStart = "random"
    attention_steps: int = 2
    attention_dim: int = 512
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("model", self, "attention_steps", "attention_dim")
        require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}, expected 0 to less than 1")


@dataclass(frozen=True)
class MlmmeConfig(_Words):
    """A GRU for each language, and one map of all sentences into the space of the images (Calixto et al. 2017, MLMME).

    Attributes:
        embed_dim: width of the joint space.
        hidden_size: number of GRU units.
        scoring: ``dot``, the cosine; or ``general``, a learned bilinear form for every two views, the images and each language.
    """

    kind: ClassVar[str] = "mlmme"
    takes_regions: ClassVar[bool] = False

    embed_dim: int = 2048
    word_dim: int = 620
    word_vectors: WordStart = "random"
    hidden_size: int = 1024
    scoring: Literal["dot", "general"] = "dot"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("model", self, "hidden_size")


_SECTIONS: dict[str, type[ModelConfig]] = {
    section.kind: section for section in (VseConfig, MhaDConfig, ScanConfig, DanConfig, MlmmeConfig)
}


def register_section(section: type[ModelConfig]) -> None:
    """Make a kind of model known, by the dataclass of its section.

    Raises:
        UsageError: there is another kind of this name.
    """
    known = _SECTIONS.setdefault(section.kind, section)
    if (known.__module__, known.__qualname__) != (section.__module__, section.__qualname__):
        raise UsageError(f"there is a kind of model named {section.kind!r} already: choose another name")
    _SECTIONS[section.kind] = section  # The same one again, where its module was loaded again.


def model_kinds() -> tuple[str, ...]:
    """Return the kinds of models that are known, sorted, those of other distributions included."""
    return tuple(sorted({*_SECTIONS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))}))


def _section(kind: Any, key: str) -> type[ModelConfig]:
    if kind not in _SECTIONS:
        for entry in entry_points(group=ENTRY_POINTS):
            if entry.name == kind:
                entry.load()
    if kind not in _SECTIONS:
        raise UsageError(
            f"{key} is {kind!r}, expected one of {', '.join(map(repr, model_kinds()))}; a kind of your own must be registered "
            "before (imagepivot.register_model)"
        )
    return _SECTIONS[kind]

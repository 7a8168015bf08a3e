"""Model configurations, one dataclass per ``kind``, and checks of values.

`train.models.catalogue` builds the models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

from schemas.conversion import Tagged, convert, hints_of
from schemas.errors import UsageError

ENTRY_POINTS = "imagepivot.models"
"""Entry-point group for model kinds of other distributions: the kind, and the module that registers it."""


def require(condition: bool, message: str) -> None:
    """Raise a `UsageError` if a condition is false."""
    if not condition:
        raise UsageError(message)


class UnknownKindError(UsageError):
    """A model kind is unknown to this process: its module is not imported."""


def positive(section: str, values: Any, *keys: str) -> None:
    """Check that values of a section are positive."""
    for key in keys:
        value = getattr(values, key)
        require(value > 0, f"{section}.{key} is {value}, expected more than 0")


def not_negative(section: str, values: Any, *keys: str) -> None:
    """Check that values of a section are not negative."""
    for key in keys:
        value = getattr(values, key)
        require(value >= 0, f"{section}.{key} is {value}, expected 0 or more")


@dataclass(frozen=True)
class ModelConfig(Tagged):
    """Base class of the section ``model``: frozen dataclasses with a ``kind``.

    Examples:
        >>> @dataclass(frozen=True)
        ... class Linear(imagepivot.ModelConfig):
        ...     kind: ClassVar[str] = "linear"
        ...     width: int = 64
    """

    kind: ClassVar[str]

    @property
    def mixes_languages(self) -> bool:
        """True for a shared encoder of all languages, so that a batch may mix them."""
        return True

    @property
    def pretrained_width(self) -> int:
        """Width of the pretrained word vectors; 0 without them."""
        return 0

    @property
    def token_width(self) -> int:
        """Width of the precomputed token vectors; 0 without them."""
        return 0

    @property
    def frozen_words(self) -> bool:
        """True to exclude word embeddings from training."""
        return False

    def check_features(self, shape: tuple[int, ...]) -> None:
        """Check the shape of an image's features, ``[D]`` or ``[R, D]``; by default any.

        Raises:
            UsageError: the model does not support it.
        """

    def check_compile(self) -> None:
        """Check that the model supports ``--compile``; by default it does.

        Raises:
            UsageError: it does not.
        """

    @classmethod
    def choose(cls, table: Mapping[str, Any], prefix: str) -> tuple[type[Any], Mapping[str, Any]]:
        """Return the dataclass of a table's kind, and the table without ``kind``.

        Raises:
            UsageError: the kind is not text.
            UnknownKindError: the kind is unknown.
        """
        kind = convert(table.get("kind", VseConfig.kind), str, f"{prefix}kind")
        if kind not in _SECTIONS:
            for entry in entry_points(group=ENTRY_POINTS):
                if entry.name == kind:
                    entry.load()
        if kind not in _SECTIONS:
            raise UnknownKindError(
                f"{prefix}kind is {kind!r}, expected one of {', '.join(map(repr, model_kinds()))}: import the module that "
                "registers it by imagepivot.register_model, on the command line with --import MODULE"
            )
        return _SECTIONS[kind], {key: value for key, value in table.items() if key != "kind"}


@dataclass(frozen=True)
class _Words(ModelConfig):
    """Keys and checks of the kinds in this package.

    Attributes:
        embed_dim: width of the joint space.
        word_dim: width of the word embeddings.
        word_vectors: initial word embeddings: ``random``; or pretrained word vectors, ``finetuned`` or
            ``frozen``; or ``precomputed`` token vectors, such as those of BERT, in place of word embeddings.
    """

    takes_regions: ClassVar[bool] = True

    embed_dim: int = 512
    word_dim: int = 300
    word_vectors: Literal["random", "finetuned", "frozen", "precomputed"] = "random"

    def __post_init__(self) -> None:
        cls: Any = type(self)
        positive("model", self, *(key for key, hint in hints_of(cls).items() if hint is int))

    @property
    def mixes_languages(self) -> bool:
        return getattr(self, "shared_encoder", False)

    def check_features(self, shape: tuple[int, ...]) -> None:
        if self.takes_regions and len(shape) != 2:
            raise UsageError(
                f"the features of an image have the shape {list(shape)}, but a model of the kind {self.kind!r} attends to several "
                "features of an image, [R, D]: give regions, e.g. of 'faster-rcnn-36', the separate crops of 'vgg19-10crop', or "
                "the cells of a grid; models of the kind 'vse' take one vector per image"
            )
        if not self.takes_regions and len(shape) != 1:
            raise UsageError(
                f"the features of an image have the shape {list(shape)}, but a model of the kind {self.kind!r} takes one vector "
                "per image: give such features, e.g. of 'resnet50-pool', or choose a kind that attends to several, e.g. 'mha-d'"
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
    """Joint embedding with one vector per image and sentence (Kiros et al. 2015).

    Attributes:
        embed_dim: width of the joint space, and hidden size of the text encoder.
        shared_encoder: one text encoder over the joint vocabulary for all languages (Kádár et al. 2018);
            otherwise one per language (Gella et al. 2017).
        similarity: ``cosine``, or ``order`` (Vendrov et al. 2016).
        text_encoder: ``gru``, with its last state; or a bidirectional ``bilstm`` or ``bigru``, with a state per word.
        pooling: pooling of the states of a ``bilstm`` or ``bigru``: ``mean`` or ``max``.
        initialization: initial weights of the text encoder: ``torch``, uniform in ±1/sqrt(embed_dim); or ``orthogonal`` recurrent
            weights per gate, input weights uniform in ±0.1 and zero biases (github.com/ivendrov/order-embedding).
    """

    kind: ClassVar[str] = "vse"
    takes_regions: ClassVar[bool] = False

    embed_dim: int = 1024
    shared_encoder: bool = True
    similarity: Literal["cosine", "order"] = "cosine"
    text_encoder: Literal["gru", "bilstm", "bigru"] = "gru"
    pooling: Literal["mean", "max"] = "mean"
    initialization: Literal["torch", "orthogonal"] = "torch"


@dataclass(frozen=True)
class MhaDConfig(_Words):
    """Multi-head attention with diversity, MHA-D (Huang et al. 2019).

    It attends to regions and words, with one text encoder per language.

    Attributes:
        embed_dim: H, width of regions and words in the joint space, and hidden size of the LSTM. An embedding
            has K times H elements.
        num_heads: K, the number of heads.
        attention_dim: H_attn, width of the attention space.
        context_dim: H_c, width of the contexts.
    """

    kind: ClassVar[str] = "mha-d"

    num_heads: int = 3
    attention_dim: int = 512
    context_dim: int = 512


@dataclass(frozen=True)
class ScanConfig(_Words):
    """Stacked cross attention of regions and words, SCAN (Lee et al. 2018).

    Attributes:
        embed_dim: width of regions and words in the joint space, and hidden size of the text encoder.
        shared_encoder: one text encoder over the joint vocabulary for all languages; otherwise one per language.
        text_encoder: a bidirectional GRU or LSTM: ``bigru`` or ``bilstm``.
        attention: ``t2i``, words attend to regions (text-image in the paper); or ``i2t``, regions attend to words (image-text).
        pooling: pooling of the relevances of words, or regions: ``lse``, LogSumExp; or ``avg``, mean.
        lambda_softmax: inverse temperature of the attention, the paper's lambda_1.
        lambda_lse: inverse temperature of the LogSumExp, the paper's lambda_2; unused with ``avg``.
        negative_slope: slope of the leaky ReLU of the similarities: 0 in the paper, 0.1 in the released code.
    """

    kind: ClassVar[str] = "scan"

    embed_dim: int = 1024
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
        """Reject ``--compile``: the attention is computed in tiles."""
        raise UsageError(
            f"--compile gains nothing with a model of the kind {self.kind!r}: its attention, most of a "
            "step, is computed in tiles that cannot be compiled. Leave --compile out"
        )


@dataclass(frozen=True)
class DanConfig(_Words):
    """Dual attention network for matching, m-DAN (Nam et al. 2017).

    It has attention steps with a memory, and one text encoder per language.

    Attributes:
        embed_dim: H, width of context vectors and words, and hidden size of the LSTM. Embeddings have (K + 1) * H elements.
        attention_steps: K, the number of attention steps.
        attention_dim: width of the attention space.
        dropout: dropout ratio; 0 means none.
    """

    kind: ClassVar[str] = "dan"

    word_dim: int = 512
    attention_steps: int = 2
    attention_dim: int = 512
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}, expected 0 to less than 1")


@dataclass(frozen=True)
class MlmmeConfig(_Words):
    """Multilingual multi-modal embedding, MLMME (Calixto et al. 2017).

    It has a GRU per language and one projection.

    Attributes:
        embed_dim: width of the joint space.
        hidden_size: hidden size of the GRUs.
        scoring: ``dot``, the cosine; or ``general``, a learned bilinear form for every two views, the images and each language.
    """

    kind: ClassVar[str] = "mlmme"
    takes_regions: ClassVar[bool] = False

    embed_dim: int = 2048
    word_dim: int = 620
    hidden_size: int = 1024
    scoring: Literal["dot", "general"] = "dot"


_SECTIONS: dict[str, type[ModelConfig]] = {
    section.kind: section for section in (VseConfig, MhaDConfig, ScanConfig, DanConfig, MlmmeConfig)
}


def register_section(section: type[ModelConfig]) -> None:
    """Register the section of a model kind.

    Raises:
        UsageError: the name belongs to another kind.
    """
    registered = _SECTIONS.setdefault(section.kind, section)
    if (registered.__module__, registered.__qualname__) != (section.__module__, section.__qualname__):
        raise UsageError(f"model kind {section.kind!r} exists already: choose another name")
    _SECTIONS[section.kind] = section  # Its module may have been reloaded.


def model_kinds() -> tuple[str, ...]:
    """Return all model kinds, sorted, including those of other distributions."""
    return tuple(sorted({*_SECTIONS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))}))

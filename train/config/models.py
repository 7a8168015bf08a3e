"""The section ``model`` of a configuration: a kind of model, and its choices.

Each kind has a dataclass of its own, which the key ``kind`` selects. `train.models.catalogue` holds what is built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

from schemas.errors import UsageError
from train.config.checks import one_of, positive
from train.config.strict_toml import Tagged

__all__ = ["ENTRY_POINTS", "ModelConfig", "VseConfig", "model_kinds", "register_section"]

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

    def check_features(self, shape: tuple[int, ...]) -> None:
        """Check that the model takes features of a shape, before any are read; by default it may be any.

        Args:
            shape: shape of an image's features: ``[D]``, or ``[R, D]`` where an image has several.

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


@dataclass(frozen=True)
class VseConfig(ModelConfig):
    """A vector for each image and each sentence, in one space (Kiros et al. 2015, and the papers of the presets).

    Attributes:
        embedding: width of the joint space, and number of GRU units.
        words: width of the word embeddings.
        shared: one sentence encoder over the joint vocabulary for all languages (Kádár et al. 2018); otherwise one per language
            (Gella et al. 2017).
        similarity: ``cosine``, or ``order`` (Vendrov et al. 2016).
        reader: what reads the words of a sentence: ``gru``, whose last state is the sentence; or ``bilstm``, an LSTM in both
            directions with a state for each word.
        pooling: what becomes of the states of a ``bilstm``: their ``mean``, or the ``max`` of each number.
        initialization: initial weights of the reader: ``torch`` draws them all uniformly from ±1/sqrt(units); ``orthogonal`` makes
            the recurrent weights of each gate an orthogonal matrix, draws those of the words from ±0.1 and sets the biases to 0
            (github.com/ivendrov/order-embedding). Word vectors and the map of images start alike in both.
    """

    kind: ClassVar[str] = "vse"

    embedding: int = 1024
    words: int = 300
    shared: bool = True
    similarity: Literal["cosine", "order"] = "cosine"
    reader: Literal["gru", "bilstm"] = "gru"
    pooling: Literal["mean", "max"] = "mean"
    initialization: Literal["torch", "orthogonal"] = "torch"

    def __post_init__(self) -> None:
        positive("model", self, "embedding", "words")
        one_of("model", self, "similarity", ("cosine", "order"))
        one_of("model", self, "reader", ("gru", "bilstm"))
        one_of("model", self, "pooling", ("mean", "max"))
        one_of("model", self, "initialization", ("torch", "orthogonal"))

    @property
    def mixes_languages(self) -> bool:
        """Whether there is one sentence encoder for all languages."""
        return self.shared

    def check_features(self, shape: tuple[int, ...]) -> None:
        """Check that an image has one feature."""
        if len(shape) != 1:
            raise UsageError(
                f"the features of an image have the shape {list(shape)}, but a model of the kind {self.kind!r} takes one vector "
                "per image: give such features, for example of 'resnet50-pool'"
            )


_SECTIONS: dict[str, type[ModelConfig]] = {VseConfig.kind: VseConfig}


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

"""Typed ``parameters`` of a manifest, one frozen dataclass per kind.

``to_json`` returns the JSON values of manifest and fingerprint. ``from_json`` raises a `DatasetError` for a
value of another type. Unknown values are None.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from schemas.conversion import alternatives_of, hints_of, stored_values
from schemas.errors import DatasetError
from schemas.features import FeatureSpec


class _Stated:
    """Base of dataclasses that store all fields except None."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields except None as JSON values."""
        return {name: _json_values(value) for name, value in vars(self).items() if value is not None}


class _Parameters(_Stated):
    """Base of parameters stored under their field names."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Read the values of a manifest.

        Raises:
            DatasetError: a value has another type, or the feature is missing.
        """
        kinds = ((name, kind) for name, hint in hints_of(cls).items() for kind in alternatives_of(hint))  # type: ignore[arg-type]
        nested = {name: kind for name, kind in kinds if hasattr(kind, "from_json")}
        own = {name: kind.from_json(value) for name, kind in nested.items() if (value := _object(stored, name)) is not None}
        if "feature" in nested and "feature" not in own:
            raise DatasetError("the manifest does not specify the feature: write the dataset again")
        return cls(**own, **stored_values(cls, stored, but=nested))


@dataclass(frozen=True)
class TextRecipe(_Stated):
    """Text recipe from raw text to tokens.

    Attributes:
        normalize: whether punctuation was normalized.
        tokenizer: ``moses`` or ``whitespace``.
        escape: whether the tokenizer escaped special characters; None if not applicable.
        moses_commit: commit of Moses that the text equals; None without Moses.
        sacremoses: version of sacremoses; None without Moses.
    """

    recipe: str
    lowercase: bool | None = None
    normalize: bool | None = None
    tokenizer: str | None = None
    truecase: bool | None = None
    escape: bool | None = None
    moses_commit: str | None = None
    sacremoses: str | None = None

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self | None:
        """Read a recipe; None if not stored."""
        return cls(**stored_values(cls, stored)) if "recipe" in stored else None


@dataclass(frozen=True)
class CaptionsParameters(_Stated):
    """Parameters of kind ``captions``. Selections are sorted; empty selects all.

    Attributes:
        train_splits: splits that truecasers were trained on; None without a truecaser.
        source: parameters of the source, e.g. ``default_language``.
    """

    text: TextRecipe | None
    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    train_splits: tuple[str, ...] | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return recipe, source and selection as one JSON object."""
        stored = super().to_json()
        return {**stored.pop("text", {}), **stored.pop("source"), **stored}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Read stored values."""
        own = stored_values(cls, stored, but=("text", "source"))
        source = {name: value for name, value in stored.items() if name not in own and name not in hints_of(TextRecipe)}
        return cls(text=TextRecipe.from_json(stored), source=source, **own)


@dataclass(frozen=True)
class VocabularyParameters(_Parameters):
    """Parameters of kind ``vocabulary``. Selections are sorted; empty selects all.

    Attributes:
        count_scope: ``language`` (the count within at least one language) or ``joint`` (the count of all together).
    """

    min_count: int = 1
    count_scope: str = "joint"
    splits: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedParameters(_Parameters):
    """Parameters of kind ``encoded``.

    Attributes:
        max_length: maximum number of tokens per caption.
        vocabulary_size: number of tokens in the vocabulary, specials included.
    """

    max_length: int | None = None
    vocabulary_size: int | None = None
    text: TextRecipe | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all values."""
        text = self.text.to_json() if self.text else {}
        return {"max_length": self.max_length, "vocabulary_size": self.vocabulary_size, "text": text}


@dataclass(frozen=True)
class EmbeddingModel(_Parameters):
    """Trained model behind embeddings.

    Attributes:
        weights_sha256: SHA-256 of its parameters, those of both encoders.
        similarity: name of the similarity that compares its embeddings.
        languages: languages of the text encoder; None for embeddings of images.
        untrained: features of random weights that the model was trained on; None if trained.
        modules: SHA-256 of the user's modules by name; None without ``--import``.
        encoder: parameters of a pretrained text encoder: configuration, tokenizer, prefix, ...; None for a run's.
    """

    weights_sha256: str = ""
    similarity: str = ""
    languages: tuple[str, ...] | None = None
    untrained: tuple[str, ...] | None = None
    modules: Mapping[str, str] | None = None
    encoder: Mapping[str, Any] | None = None


def untrained_remark(names: Iterable[str]) -> str:
    """Return a sentence about features of random weights, or an empty string.

    >>> untrained_remark(["resnet50-pool (random:0)"])
    'untrained: the weights of resnet50-pool (random:0) are random, the features mean nothing'
    """
    features = ", ".join(dict.fromkeys(names))
    return f"untrained: the weights of {features} are random, the features mean nothing" if features else ""


@dataclass(frozen=True)
class FeaturesParameters(_Parameters):
    """Parameters of kind ``features``, ``regions`` or ``embeddings``.

    Attributes:
        extractor: parameters that determine extracted features: weights, transform, precision, ...
        extractor_fingerprint: SHA-256 of it.
        imported: format, name and type of imported files, ...
        model: model behind embeddings.
        selection: embedded ``splits`` and ``languages``, sorted; None for all.
        space: name that the user gave to the joint space of several checkpoints; None for the checkpoint's own.
    """

    feature: FeatureSpec
    extractor: Mapping[str, Any] | None = None
    extractor_fingerprint: str | None = None
    imported: Mapping[str, Any] | None = None
    model: EmbeddingModel | None = None
    selection: Mapping[str, tuple[str, ...]] | None = None
    space: str | None = None

    @property
    def checkpoint(self) -> str | None:
        """SHA-256 of the parameters of a joint model, both encoders; else None."""
        return self.model.weights_sha256 if self.model is not None else (self.extractor or {}).get("checkpoint")

    @property
    def untrained(self) -> tuple[str, ...]:
        """Features of random weights, e.g. ``resnet50-pool (random:0)``.

        Embeddings name the features that their model was trained on.
        """
        if self.model is not None:
            return self.model.untrained or ()
        extractor = self.extractor or {}
        if not extractor.get("untrained"):
            return ()
        return (f"{self.feature.name} ({(_object(extractor, 'weights') or {}).get('name', 'random')})",)

    @property
    def transform(self) -> Mapping[str, Any] | None:
        """Preprocessing of the extractor; None if unknown."""
        return _object(self.extractor or {}, "transform")


@dataclass(frozen=True)
class WordVectorsParameters(_Parameters):
    """Parameters of kind ``word-vectors``.

    Its inputs are the vocabulary, then a file for each of the sorted languages. ``lookup`` describes the lookup in the files.
    """

    feature: FeatureSpec
    languages: tuple[str, ...] = ()
    lookup: str = ""


@dataclass(frozen=True)
class TokenFeaturesParameters(_Parameters):
    """Parameters of kind ``token-features``. Its input is a dataset of captions.

    Attributes:
        model: parameters that determine the values: weights, tokenizer, pooling of sub-words, ...
        model_fingerprint: SHA-256 of model and feature.
        max_length: maximum number of tokens per caption.
    """

    feature: FeatureSpec
    model: Mapping[str, Any] = field(default_factory=dict)
    model_fingerprint: str = ""
    max_length: int | None = None


def feature_of(stored: Mapping[str, Any]) -> FeatureSpec | None:
    """Return the feature in stored parameters; None for a kind without vectors.

    Raises:
        DatasetError: the feature is invalid.
    """
    feature = _object(stored, "feature")
    return None if feature is None else FeatureSpec.from_json(feature)


def _object(stored: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = stored.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise DatasetError(f"{name} is {value!r}, expected an object")
    return value


def _json_values(content: Any) -> Any:
    if hasattr(content, "to_json"):
        return content.to_json()
    if isinstance(content, Mapping):
        return {name: _json_values(value) for name, value in content.items()}
    return list(content) if isinstance(content, tuple) else content

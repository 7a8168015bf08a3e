"""What datasets say about themselves, typed: the ``parameters`` of a manifest, for producers and consumers alike.

One frozen dataclass per kind. ``to_json`` gives the plain values that a manifest stores and a fingerprint is made of, and
``from_json`` reads those of any format version, and raises a `DatasetError` for a value of another type. A value that a dataset
does not state is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from schemas.conversion import hints_of, stored_values
from schemas.errors import DatasetError
from schemas.features import FeatureSpec


class _Stated:
    """Base of dataclasses whose fields are stored where they are not None."""

    def to_json(self) -> dict[str, Any]:
        """Return the values that are stated, as plain JSON values."""
        return {name: _plain(value) for name, value in vars(self).items() if value is not None}


class _Parameters(_Stated):
    """Base of parameters whose fields are stored under their names; a field ``feature`` must be stored."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Read what a manifest stores.

        Raises:
            DatasetError: a value is of another type, or it does not say how wide the vectors are.
        """
        own = {"feature": feature_of(stored)} if "feature" in cls.__annotations__ else {}
        if None in own.values():
            raise DatasetError("the manifest does not say how wide the vectors are: make the dataset again")
        return cls(**own, **stored_values(cls, stored, but=own))


@dataclass(frozen=True)
class TextRecipe(_Stated):
    """How text became tokens.

    Attributes:
        normalize: whether punctuation was normalized.
        tokenizer: ``moses`` or ``whitespace``.
        escape: whether the tokenizer escaped special characters; None where it cannot.
        moses_commit: the commit of Moses that the text is equal to; None where nothing of Moses was applied.
        sacremoses: version of the library whose rules were applied; likewise.
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
    def from_json(cls, stored: Mapping[str, Any]) -> TextRecipe | None:
        """Read a recipe; None where nothing says which one it was."""
        return cls(**stored_values(cls, stored)) if "recipe" in stored else None


@dataclass(frozen=True)
class CaptionsParameters:
    """Parameters of a dataset of kind ``captions``. What was selected is sorted; empty selects all.

    Attributes:
        train_splits: the splits that truecasers were learned from; None where none was learned.
        source: what the source of the captions states of itself, e.g. ``default_language``.
    """

    text: TextRecipe | None
    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    train_splits: tuple[str, ...] | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return recipe, source and selection side by side, as a manifest stores them."""
        selection = {"languages": list(self.languages), "portions": list(self.portions), "splits": list(self.splits)}
        learned = {} if self.train_splits is None else {"train_splits": list(self.train_splits)}
        return {**(self.text.to_json() if self.text else {}), **self.source, **selection, **learned}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> CaptionsParameters:
        """Read stored values."""
        own = stored_values(cls, stored, but=("text", "source"))
        source = {name: value for name, value in stored.items() if name not in own and name not in hints_of(TextRecipe)}
        return cls(text=TextRecipe.from_json(stored), source=source, **own)


@dataclass(frozen=True)
class VocabularyParameters(_Parameters):
    """Parameters of a dataset of kind ``vocabulary``. What was counted is sorted; empty for all languages or portions.

    Attributes:
        min_count: a token was kept when its count reached this.
        count_scope: ``language`` (the count within at least one language) or ``joint`` (the count of all together).
    """

    min_count: int = 1
    count_scope: str = "joint"
    splits: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedParameters:
    """Parameters of a dataset of kind ``encoded``.

    Attributes:
        max_length: most tokens of a caption that were kept.
        vocabulary_size: number of tokens in the vocabulary, specials included.
        text: how the text of the captions became tokens.
    """

    max_length: int | None = None
    vocabulary_size: int | None = None
    text: TextRecipe | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all values."""
        text = self.text.to_json() if self.text else {}
        return {"max_length": self.max_length, "vocabulary_size": self.vocabulary_size, "text": text}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> EncodedParameters:
        """Read stored values."""
        values = stored_values(cls, stored, but=("text",))
        return cls(**values, text=TextRecipe.from_json(_object(stored, "text") or {}))


@dataclass(frozen=True)
class EmbeddingModel(_Stated):
    """The trained model that made embeddings.

    Attributes:
        weights_sha256: SHA-256 of its parameters.
        similarity: name of the similarity that compares its embeddings.
        languages: the languages that it reads; None for embeddings of images.
    """

    weights_sha256: str
    similarity: str
    languages: tuple[str, ...] | None = None

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> EmbeddingModel:
        """Read stored values."""
        return cls(**{"weights_sha256": "", "similarity": "", **stored_values(cls, stored)})


@dataclass(frozen=True)
class FeaturesParameters(_Stated):
    """Parameters of a dataset of kind ``features``, ``regions`` or ``embeddings``.

    Attributes:
        feature: name, shape and type of the vectors.
        extractor: everything that decides the values of extracted features: weights, transform, precision, ...
        extractor_fingerprint: SHA-256 of it.
        imported: what is known of features that another tool made: format, name and type of the files, ...
        model: the model that made embeddings.
        selection: what was embedded, by ``splits`` and ``languages``, sorted; everything if None.
    """

    feature: FeatureSpec
    extractor: Mapping[str, Any] | None = None
    extractor_fingerprint: str | None = None
    imported: Mapping[str, Any] | None = None
    model: EmbeddingModel | None = None
    selection: Mapping[str, tuple[str, ...]] | None = None

    @property
    def untrained(self) -> bool:
        """Whether the extractor's weights are random."""
        return bool((self.extractor or {}).get("untrained"))

    @property
    def transform(self) -> Mapping[str, Any] | None:
        """How images became the pixels that the extractor saw; None where it is not stated."""
        return _object(self.extractor or {}, "transform")

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> FeaturesParameters:
        """Read what a manifest stores.

        Raises:
            DatasetError: it does not say what the feature is.
        """
        feature = feature_of(stored)
        if feature is None:
            raise DatasetError("the manifest does not say what the feature is: make the dataset again")
        model = _object(stored, "model")
        values = stored_values(cls, stored, but=("feature", "model"))
        return cls(**values, feature=feature, model=EmbeddingModel.from_json(model) if model is not None else None)


@dataclass(frozen=True)
class WordVectorsParameters(_Parameters):
    """Parameters of a dataset of kind ``word-vectors``. Its inputs are the vocabulary, then a file for each language.

    Attributes:
        feature: name, width and type of the vectors.
        languages: the languages, sorted.
        lookup: how tokens were looked up in the files, in words.
    """

    feature: FeatureSpec
    languages: tuple[str, ...] = ()
    lookup: str = ""


@dataclass(frozen=True)
class TokenFeaturesParameters(_Parameters):
    """Parameters of a dataset of kind ``token-features``. Its input is a dataset of captions.

    Attributes:
        feature: name, width and type of the vectors.
        model: everything that decides the values: weights, tokenizer, how tokens get the vectors of their sub-words, ...
        model_fingerprint: SHA-256 of it and of the feature.
        max_length: number of tokens after which a caption is cut.
    """

    feature: FeatureSpec
    model: Mapping[str, Any] = field(default_factory=dict)
    model_fingerprint: str = ""
    max_length: int | None = None


def feature_of(stored: Mapping[str, Any]) -> FeatureSpec | None:
    """Return the feature that stored parameters name; None for a kind without vectors.

    Raises:
        DatasetError: what they name is no feature.
    """
    feature = _object(stored, "feature")
    return None if feature is None else FeatureSpec.from_json(feature)


def _object(stored: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = stored.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise DatasetError(f"{name} is {value!r}, expected an object")
    return value


def _plain(content: Any) -> Any:
    if hasattr(content, "to_json"):
        return content.to_json()
    if isinstance(content, Mapping):
        return {name: _plain(value) for name, value in content.items()}
    return list(content) if isinstance(content, tuple) else content

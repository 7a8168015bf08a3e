"""The data to train or evaluate on: captions and features of one split, checked and joined before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError
from schemas.fingerprints import sha256_of_bytes
from schemas.keys import normalization_hint
from schemas.parameters import VocabularyParameters
from schemas.vocabulary import Vocabulary
from train.data.captions import Captions, disjoint_halves, half_of_images, one_caption_per_image, read_captions
from train.data.features import ImageFeatures, extractor_fingerprint, missing_images, read_features
from train.data.token_features import open_token_features, token_fingerprints, with_token_features

TEST_SPLITS = ("test_2016", "test_2016_flickr")
"""Names of the test split of 2016 in Multi30K: the first for its comparable captions, the second for its translations."""

_NAMED = 5


@dataclass(frozen=True)
class MissingFeatures:
    """Images of a split that have no features, and whose captions were left out.

    Attributes:
        split: the split.
        images: number of images left out.
        captions: number of their captions.
        first: the first five of their ids.
        sha256: SHA-256 of all their ids, one per line.
        hint: why they seem to lack features, if ids differ in Unicode normalization; not part of `to_dict`.
    """

    split: str
    images: int
    captions: int
    first: tuple[str, ...]
    sha256: str
    hint: str = ""

    @classmethod
    def of(cls, split: str, image_ids: Sequence[str], captions: int, features: Dataset) -> MissingFeatures:
        """Describe images that lack features."""
        digest = sha256_of_bytes("".join(f"{image_id}\n" for image_id in image_ids).encode())
        hint = normalization_hint(image_ids, features.image_ids())
        return cls(split, len(image_ids), captions, tuple(image_ids[:_NAMED]), digest, hint)

    @property
    def names(self) -> str:
        """The first ids, for messages."""
        return ", ".join(self.first) + (", ..." if self.images > len(self.first) else "")

    @property
    def remark(self) -> str:
        """What was left out, in one sentence."""
        counts = f"{self.captions:,} captions of {self.images:,} images without features"
        return f"left out of split {self.split!r}: {counts}: {self.names}{self.hint and f': {self.hint}'}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "hint"} | {"first": list(self.first)}


@dataclass(frozen=True)
class SplitData:
    """Captions and the features of their images.

    Attributes:
        captions: captions of one split or several; each of ``image_ids`` has at least one.
        features: features of the images, in the order of ``captions.image_ids``.
        vocabulary: the vocabulary that the captions were encoded with; None if it was not requested.
        fingerprints: fingerprints of the sources: ``captions``, ``features``, ``vocabulary`` and ``extractor``, and with vectors of
            tokens ``token_features`` and ``token_model``.
        missing_features: the images that lack features and were left out; None if there are none.
    """

    captions: Captions
    features: ImageFeatures
    vocabulary: Vocabulary | None
    fingerprints: Mapping[str, str]
    missing_features: MissingFeatures | None = None


def open_data(
    captions: str,
    features: str,
    vocabulary: str | None = None,
    *,
    split: str | Sequence[str],
    languages: Sequence[str] | None = None,
    portions: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    captions_per_image: Literal["all", "one"] = "all",
    images: Literal["all", "half", "disjoint"] = "all",
    seed: int = 0,
    l2: bool = False,
    memory_map: str | os.PathLike[str] | None = None,
    expected: Mapping[str, str] | None = None,
    allow_missing_features: bool = False,
    token_features: str = "",
    token_width: int = 0,
) -> SplitData:
    """Read the captions of a split, or of several, and the features of their images.

    Everything is checked before the features are read.

    Args:
        captions: folder of the encoded captions.
        features: folder of the features.
        vocabulary: folder of the vocabulary that the captions must have been encoded with.
        split: the split, or several.
        languages: as in `read_captions`.
        portions: as in `read_captions`.
        captions_per_image: ``one`` draws one caption for each image and language.
        images: ``half`` keeps a random half of the images; ``disjoint`` gives each of two languages a separate half.
        seed: seed for random draws.
        l2: divide each feature by its Euclidean norm.
        memory_map: as in `read_features`.
        expected: fingerprints that the data must have, for example those of a run.
        allow_missing_features: leave out the captions of images that lack features; ``SplitData.missing_features`` says which.
            Random draws come before, so that they are the same as with all features.
        token_features: folder of the vectors of tokens, for a model that reads them in place of words; empty for others.
        token_width: their width.

    Raises:
        DatasetError: a dataset is missing or of the wrong kind; the captions were encoded with another vocabulary; a fingerprint
            is not the expected one; there are no such captions; images lack features, or all images of some captions do.
        UsageError: the arguments do not fit together.
    """
    encoded = open_dataset(captions, kind="encoded")
    extracted = open_dataset(features)
    fingerprints = {
        "captions": encoded.fingerprint,
        "features": extracted.fingerprint,
        "vocabulary": _vocabulary_of(encoded),
        "extractor": extractor_fingerprint(extracted),
    }
    tokens = open_token_features(token_features, encoded, width=token_width) if token_features else None
    if tokens is not None:
        fingerprints |= token_fingerprints(tokens)
    check_fingerprints(fingerprints, expected or {}, captions=captions, features=features)
    words = None if vocabulary is None else _open_vocabulary(vocabulary, encoded)
    chosen = read_captions(encoded, split=split, languages=languages, portions=portions)
    if words is not None:
        _check_languages(words, chosen)
    if captions_per_image == "one":
        chosen = one_caption_per_image(chosen, seed)
    if images != "all":
        chosen = (half_of_images if images == "half" else disjoint_halves)(chosen, seed)
    chosen = chosen.compact()
    missing_features, chosen = leave_out_missing(chosen, extracted, allow_missing_features=allow_missing_features)
    if tokens is not None:
        chosen = with_token_features(chosen, tokens, memory_map=memory_map)
    return SplitData(
        captions=chosen,
        features=read_features(extracted, chosen.image_ids, l2=l2, memory_map=memory_map),
        vocabulary=None if words is None else words.vocabulary(),
        fingerprints=fingerprints,
        missing_features=missing_features,
    )


def check_fingerprints(actual: Mapping[str, str], expected: Mapping[str, str], *, captions: str, features: str) -> None:
    """Compare the fingerprints of data with those that it must have.

    A name that ``expected`` lacks may have any fingerprint.

    Raises:
        DatasetError: a fingerprint differs.
    """
    meanings = {
        "vocabulary": f"{captions!r} was encoded with another vocabulary, whose ids stand for other tokens: encode the captions "
        "with the vocabulary of the model",
        "extractor": f"{features!r} was made by another extractor, or with other weights or settings, and the model cannot read "
        "its features: extract them in the same way as those that it was trained on",
        "captions": f"{captions!r} is not the dataset of encoded captions that was used before: give that one",
        "features": f"{features!r} is not the dataset of features that was used before: give that one",
        "token_features": "these are not the vectors of tokens that were used before: give those",
        "token_model": "the vectors of tokens were made by another model, or with other settings, and this one cannot read them: "
        "make them in the same way as those that it was trained on",
    }
    for name, fingerprint in expected.items():
        if actual[name] != fingerprint:
            raise DatasetError(f"{meanings[name]} (fingerprint {actual[name][:12]}..., expected {fingerprint[:12]}...)")


def _vocabulary_of(encoded: Dataset) -> str:
    """Return the fingerprint of the vocabulary that captions were encoded with."""
    fingerprint = encoded.manifest.input_fingerprint("vocabulary")
    if fingerprint is None:
        raise DatasetError(
            f"the manifest of {encoded.folder.location!r} does not name the vocabulary that made it: encode the captions again"
        )
    return fingerprint


def _open_vocabulary(path: str, encoded: Dataset) -> Dataset:
    dataset = open_dataset(path, kind="vocabulary")
    if dataset.fingerprint != _vocabulary_of(encoded):
        raise DatasetError(
            f"{encoded.folder.location!r} was encoded with another vocabulary (fingerprint {_vocabulary_of(encoded)[:12]}...) than "
            f"{path!r} ({dataset.fingerprint[:12]}...): give that one, or encode the captions again with this one"
        )
    return dataset


def _check_languages(vocabulary: Dataset, captions: Captions) -> None:
    """Check that a vocabulary was counted on all languages of the captions; one that states no languages was counted on all."""
    counted = VocabularyParameters.from_json(vocabulary.manifest.parameters).languages or captions.language_names
    uncounted = [language for language in captions.language_names if language not in counted]
    if uncounted:
        raise DatasetError(
            f"the vocabulary {vocabulary.folder.location!r} was counted on captions in {', '.join(counted)}: those in "
            f"{', '.join(uncounted)} are nearly all <unk>. Build a vocabulary of all languages and encode the captions with it"
        )


def leave_out_missing(
    captions: Captions, features: Dataset, *, allow_missing_features: bool = False
) -> tuple[MissingFeatures | None, Captions]:
    """Return what images of captions lack features, None if none do, and the captions of the others.

    Raises:
        DatasetError: images lack features, and that is not allowed, or a language or portion has no captions left. The message
            also counts their captions, since an image may have one or eleven.
    """
    positions = missing_images(features, captions.image_ids)
    if not len(positions):
        return None, captions
    lacks = np.isin(captions.images, positions)
    image_ids = [captions.image_ids[n] for n in positions.tolist()]
    missing = MissingFeatures.of(captions.split, image_ids, int(lacks.sum()), features)
    if not allow_missing_features:
        raise lacking(features, missing, images=len(captions.image_ids), captions=len(captions))
    kept = captions.select(~lacks)
    for language, portion in np.unique(np.stack([captions.languages, captions.portions]), axis=1).T:
        if not np.any((kept.languages == language) & (kept.portions == portion)):
            raise DatasetError(
                f"{features.folder.location!r} has features of no image that has a caption in "
                f"{captions.language_names[language]} {captions.portion_names[portion]} of split {captions.split!r}: "
                f"{missing.hint or 'check that both datasets are of the same images'}"
            )
    return missing, kept.compact()


def lacking(features: Dataset, missing: MissingFeatures, *, images: int, captions: int) -> DatasetError:
    """Return the error that images of a split lack features.

    ``images`` and ``captions`` count those of the whole split.
    """
    failed = (
        f" ({features.manifest.failed:,} images failed there, see 'imagepivot inspect')" if features.manifest.failed else ""
    )
    empty = ", counting those in which no region was found" if features.kind == "regions" else ""
    ways = [missing.hint or "Extract the features of these images, or check that both datasets are of the same images"]
    if missing.images < images:  # Else no caption would be left.
        ways.append("leave these captions out with --allow-missing-features (allow_missing_features=True)")
    return DatasetError(
        f"{features.folder.location!r} lacks the features of {missing.images:,} of {images:,} images of split "
        f"{missing.split!r}{empty}, with {missing.captions:,} of {captions:,} captions: {missing.names}{failed}. "
        f"{', or '.join(ways)}"
    )

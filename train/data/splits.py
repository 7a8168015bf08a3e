"""Captions and features of splits, checked and joined."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from schemas.dataset import Dataset, open_dataset
from schemas.duplicates import Duplicate, read_duplicates
from schemas.errors import DatasetError, InputError
from schemas.escapes import counted
from schemas.fingerprints import sha256_of_bytes
from schemas.keys import normalization_hint
from schemas.parameters import VocabularyParameters
from train.data.captions import Captions, disjoint_halves, half_of_images, one_caption_per_image, read_captions
from train.data.features import ImageFeatures, extractor_fingerprint, missing_images, read_features
from train.data.token_features import open_token_features, token_fingerprints, with_token_features

TEST_SPLITS = ("test_2016", "test_2016_flickr")
"""Names of the Multi30K test split of 2016, with comparable captions and with translations."""

_MAX_EXAMPLES = 5


def default_test_splits(available: Collection[str]) -> list[str]:
    """Return the available test splits: ``test``, or else Multi30K's of 2016."""
    return [split for split in (("test",) if "test" in available else TEST_SPLITS) if split in available]


@dataclass(frozen=True)
class MissingFeatures:
    """Images of a split without features, excluded with their captions.

    Attributes:
        images: number of excluded images.
        first: their first five ids.
        sha256: SHA-256 of all their ids, one per line.
        hint: advice if ids differ in Unicode normalization only; not part of `to_dict`.
    """

    split: str
    images: int
    captions: int
    first: tuple[str, ...]
    sha256: str
    hint: str = ""

    @classmethod
    def of(cls, split: str, image_ids: Sequence[str], captions: int, features: Dataset) -> MissingFeatures:
        """Describe images without features."""
        digest = sha256_of_bytes("".join(f"{image_id}\n" for image_id in image_ids).encode())
        hint = normalization_hint(image_ids, features.image_ids())
        return cls(split, len(image_ids), captions, tuple(image_ids[:_MAX_EXAMPLES]), digest, hint)

    @property
    def names(self) -> str:
        """The first ids, for messages."""
        return ", ".join(self.first) + (", ..." if self.images > len(self.first) else "")

    @property
    def remark(self) -> str:
        """A sentence for people."""
        counts = f"{counted(self.captions, 'caption')} of {counted(self.images, 'image')} without features"
        return f"left out of split {self.split!r}: {counts}: {self.names}{self.hint and f': {self.hint}'}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "hint"} | {"first": list(self.first)}


@dataclass(frozen=True)
class Exclusion:
    """Items of a split with duplicates in other splits.

    Attributes:
        sha256: SHA-256 of the list that `imagepivot duplicates` wrote.
        items: images, to exclude with all captions, and single captions.
        images: number of images that `apply` left out with all captions.
        captions: number of single captions that `apply` left out.
    """

    location: str
    sha256: str
    items: tuple[Duplicate, ...]
    images: int = 0
    captions: int = 0

    @classmethod
    def read(cls, location: str, splits: Sequence[str], is_other: Callable[[str], bool]) -> Exclusion:
        """Read the items of some splits with duplicates in others.

        Raises:
            InputError: the file does not exist, or is not a list with splits.
        """
        duplicates, sha256 = read_duplicates(location)
        others = {item for item in duplicates if any(map(is_other, item.split.split(",")))}
        counts = Counter(item.group for item in others)
        inside = (item for item in duplicates if not set(splits).isdisjoint(item.split.split(",")))
        return cls(location, sha256, tuple(item for item in inside if counts[item.group] > (item in others)))

    def to_dict(self) -> dict[str, int | str]:
        """Return the numbers of images and captions left out, and the digest of the list."""
        return {"images": self.images, "captions": self.captions, "list_sha256": self.sha256}

    def remark(self, splits: Sequence[str]) -> str:
        """Return a sentence for people."""
        items = f"{counted(self.images, 'image')} and {counted(self.captions, 'caption')}"
        return f"left out of split {', '.join(splits)}: {items} with duplicates in other splits, by {self.location!r}"

    def apply(self, captions: Captions, dataset: Dataset) -> tuple[Exclusion, Captions]:
        """Return the exclusion with its numbers, and the captions without the items.

        Images of the dataset without captions among these are not counted.

        Raises:
            InputError: an image is not in the dataset.
            DatasetError: a language or portion has no captions left.
        """
        if unknown := {item.image_id for item in self.items}.difference(captions.image_ids):
            self._check_known(unknown, dataset)
        ids = {f"{item.image_id}/{item.language}/{item.portion}/{item.index}" for item in self.items}
        has_image = np.array([f"{image_id}///" not in ids for image_id in captions.image_ids])[captions.images]
        kept = has_image & np.array([caption_id not in ids for caption_id in captions.ids()])
        images, singles = len(np.unique(captions.images[~has_image])), int((has_image & ~kept).sum())
        chosen = _select(captions, kept, f"{self.location!r} excludes all", "shorten the list, or choose other captions")
        return replace(self, images=images, captions=singles), chosen

    def _check_known(self, image_ids: set[str], dataset: Dataset) -> None:
        known = set(dataset.image_ids())
        if not (unknown := sorted(image_ids - known)):
            return
        bare = unknown[0].lstrip("0")
        cause = normalization_hint(unknown, known) or "it is a list of other datasets"
        if similar := min((image_id for image_id in known if image_id.lstrip("0") == bare), default=""):
            cause = f"{similar!r} is, and spreadsheets drop leading zeros"
        raise InputError(
            f"{self.location!r} lists {counted(len(unknown), 'image')} of which {dataset.folder.location!r} has no captions, e.g. "
            f"{unknown[0]!r}: {cause}. Write the list again with imagepivot duplicates, and edit it as text"
        )


def _select(captions: Captions, kept: np.ndarray, fault: str, advice: str) -> Captions:
    """Return the kept captions.

    Raises:
        DatasetError: a language or portion has none; the message has fault and advice.
    """
    for language, portion in np.unique(np.stack([captions.languages, captions.portions]), axis=1).T:
        if not np.any(kept & (captions.languages == language) & (captions.portions == portion)):
            labels = f"{captions.language_names[language]} {captions.portion_names[portion]} of split {captions.split!r}"
            raise DatasetError(f"{fault} captions in {labels}: {advice}")
    return captions.select(kept)


@dataclass(frozen=True)
class SplitData:
    """Captions and the features of their images.

    Attributes:
        captions: each of ``image_ids`` has at least one.
        features: in the order of ``captions.image_ids``.
        fingerprints: fingerprints of ``captions``, ``features``, ``vocabulary`` and ``extractor``; with token
            features also ``token_features`` and ``token_model``.
        missing_features: excluded images without features, or None.
        untrained: features of random weights, see `schemas.dataset.Dataset.untrained`.
        sample_outputs: sample outputs of the models of features and token features, by name of their fingerprint.
        exclusion: excluded duplicates, or None.
    """

    captions: Captions
    features: ImageFeatures
    fingerprints: Mapping[str, str]
    missing_features: MissingFeatures | None = None
    untrained: tuple[str, ...] = ()
    sample_outputs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    exclusion: Exclusion | None = None


def open_data(
    captions: str,
    features: str,
    vocabulary: str | None = None,
    *,
    split: str | Sequence[str],
    portions: Mapping[str, Sequence[str]],
    captions_per_image: Literal["all", "one"] = "all",
    images: Literal["all", "half", "disjoint"] = "all",
    seed: int = 0,
    l2: bool = False,
    memory_map: str | os.PathLike[str] | None = None,
    expected: Mapping[str, str] | None = None,
    allow_missing_features: bool = False,
    token_features: str = "",
    token_width: int = 0,
    exclusion: Exclusion | None = None,
    kind: Literal["encoded", "embeddings"] = "encoded",
) -> SplitData:
    """Read the captions of one split or several, and the features of their images.

    Everything is checked before the features are read.

    Args:
        captions: folder of the captions.
        features: folder of the features.
        vocabulary: folder of the vocabulary of the captions.
        split: the split, or several.
        portions: portions by language.
        captions_per_image: ``one`` samples one caption per image and language.
        images: ``half`` samples half of the images; ``disjoint`` gives each of two languages a separate half.
        seed: seed of the samples.
        l2: divide each feature by its Euclidean norm.
        memory_map: as in `read_features`.
        expected: required fingerprints, e.g. those of a run.
        allow_missing_features: exclude captions of images without features, after sampling.
        token_features: folder of the token features, for a model with precomputed word vectors; empty for others.
        token_width: width of the token features.
        exclusion: duplicates to leave out before sampling.
        kind: kind of the captions.

    Raises:
        DatasetError: a dataset is missing or of the wrong kind, captions have another vocabulary, a
            fingerprint is not the expected one, the dataset lacks these captions, or images lack features.
        InputError: the exclusion names an image that the captions lack.
        UsageError: the arguments do not fit together.
    """
    encoded = open_dataset(captions, kind=kind)
    extracted = open_dataset(features)
    fingerprint = encoded.manifest.input_fingerprint("vocabulary") or "none"
    if fingerprint == "none" and kind == "encoded":
        raise DatasetError(
            f"the manifest of {encoded.folder.location!r} does not name its vocabulary: encode the captions again"
        )
    fingerprints = {
        "captions": encoded.fingerprint,
        "features": extracted.fingerprint,
        "vocabulary": fingerprint,
        "extractor": extractor_fingerprint(extracted),
    }
    tokens = open_token_features(token_features, encoded, width=token_width) if token_features else None
    if tokens is not None:
        fingerprints |= token_fingerprints(tokens)
    check_fingerprints(fingerprints, expected or {}, captions=captions, features=features)
    words = None if vocabulary is None else open_dataset(vocabulary, kind="vocabulary")
    if words is not None and words.fingerprint != fingerprint:
        raise DatasetError(
            f"{encoded.folder.location!r} was encoded with another vocabulary (fingerprint {fingerprint[:12]}...) than "
            f"{vocabulary!r} ({words.fingerprint[:12]}...): give that one, or encode the captions again with this one"
        )
    languages = None if words is None else VocabularyParameters.from_json(words.manifest.parameters).languages
    if languages and (uncounted := [language for language in portions if language not in languages]):
        raise DatasetError(
            f"the vocabulary {vocabulary!r} was counted on captions in {', '.join(languages)}: those in {', '.join(uncounted)} "
            "are nearly all <unk>. Build a vocabulary of all languages and encode the captions with it"
        )
    chosen = read_captions(encoded, split=split, portions=portions)
    if exclusion is not None:
        exclusion, chosen = exclusion.apply(chosen, encoded)
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
        fingerprints=fingerprints,
        missing_features=missing_features,
        untrained=tuple(dict.fromkeys((*extracted.untrained, *encoded.untrained))),
        sample_outputs={
            "extractor": extracted.manifest.sample_outputs,
            **({} if tokens is None else {"token_model": tokens.manifest.sample_outputs}),
        },
        exclusion=exclusion,
    )


def check_fingerprints(actual: Mapping[str, str], expected: Mapping[str, str], *, captions: str, features: str) -> None:
    """Check all expected fingerprints of data.

    Raises:
        DatasetError: a fingerprint differs.
    """
    messages = {
        "vocabulary": f"{captions!r} was encoded with another vocabulary, with other token ids: encode the captions with the "
        "vocabulary of the model",
        "extractor": f"{features!r} comes from another extractor, or from other weights or settings, than the features of the "
        "model: extract them as for its training",
        "token_model": "the token features come from another model, or from other settings, than those of the run: write them as "
        "for its training",
    }
    for name, fingerprint in expected.items():
        if actual[name] != fingerprint:
            raise DatasetError(f"{messages[name]} (fingerprint {actual[name][:12]}..., expected {fingerprint[:12]}...)")


def leave_out_missing(
    captions: Captions, features: Dataset, *, allow_missing_features: bool = False
) -> tuple[MissingFeatures | None, Captions]:
    """Return the images without features, or None, and the captions of the others.

    Raises:
        DatasetError: images lack features, and that is not allowed, or a language or portion has no captions left.
    """
    positions = missing_images(features, captions.image_ids)
    if not len(positions):
        return None, captions
    lacks = np.isin(captions.images, positions)
    image_ids = [captions.image_ids[n] for n in positions.tolist()]
    missing = MissingFeatures.of(captions.split, image_ids, int(lacks.sum()), features)
    if not allow_missing_features:
        raise lacking(features, missing, images=len(captions.image_ids), captions=len(captions))
    fault = f"{features.folder.location!r} lacks the features of all images with"
    hint = missing.hint or "check that both datasets are of the same images"
    return missing, _select(captions, ~lacks, fault, hint).compact()


def lacking(features: Dataset, missing: MissingFeatures, *, images: int, captions: int) -> DatasetError:
    """Return the error about missing features; ``images`` and ``captions`` are totals."""
    failed = (
        f" ({features.manifest.failed:,} images failed there, see 'imagepivot inspect')" if features.manifest.failed else ""
    )
    empty = ", counting images without regions" if features.kind == "regions" else ""
    ways = [missing.hint or "Extract the features of these images, or check that both datasets are of the same images"]
    if missing.images < images:  # Else no caption would be left.
        ways.append("leave these captions out with --allow-missing-features (allow_missing_features=True)")
    return DatasetError(
        f"{features.folder.location!r} lacks the features of {missing.images:,} of {images:,} images of "
        f"split {missing.split!r}{empty}, with {missing.captions:,} of {captions:,} captions: "
        f"{missing.names}{failed}. {', or '.join(ways)}"
    )

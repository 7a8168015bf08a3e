"""What a training needs, opened from a configuration and a corpus: data, dimensions of the model, sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from schemas.conversion import dump
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.overlaps import find_overlap
from schemas.parameters import VocabularyParameters
from schemas.vocabulary import SPECIALS, Vocabulary
from train.config.sections import Config
from train.data.captions import ByImage, Captions, labels_of, no_captions
from train.data.feature_checks import FeatureOutliers, find_feature_outliers
from train.data.features import feature_spec
from train.data.sampling import Batch, ImageSampler, Sampler, TaskSampler
from train.data.splits import MissingFeatures, SplitData, open_data
from train.data.token_features import check_token_features
from train.data.word_vectors import WordVectors, check_word_vectors, open_word_vectors
from train.devices import upload
from train.evaluation.evaluation import Validation, validate
from train.jobs import Corpus
from train.losses import Inputs, Term
from train.models.retrieval_model import Dimensions, ImageBatch, RetrievalModel


class TrainingInputsProtocol(Protocol):
    """What `train.train` needs besides a job; `TrainingInputs` is made of datasets, and a program may bring its own."""

    @property
    def dimensions(self) -> Dimensions:
        """Languages and sizes."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that the captions were encoded with."""

    @property
    def captions_parameters(self) -> Mapping[str, Any]:
        """Parameters of the encoded captions, as their manifest states them."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """What tells other ``captions``, ``features``, ``vocabulary`` and ``extractor`` from these, and if any ``word_vectors``, or
        ``token_features`` and ``token_model``.
        """

    @property
    def contents(self) -> Mapping[str, str]:
        """What tells other content from this where ``fingerprints`` are the same, by name; may be empty."""

    @property
    def word_vectors(self) -> WordVectors | None:
        """The pretrained vectors of words that the model begins with; None if it draws them."""

    @property
    def missing_features(self) -> tuple[MissingFeatures, ...]:
        """The images without features that were left out, by split."""

    @property
    def feature_outliers(self) -> tuple[FeatureOutliers, ...]:
        """The images with features that should be looked at, by split."""

    def sampler(self, config: Config, seed: int) -> Sampler:
        """Return the sampler of the batches."""

    def inputs(self, batch: Batch, device: torch.device, rows: slice) -> Inputs:
        """Return the inputs of the model for some rows of a batch."""

    def evaluate(self, model: RetrievalModel, config: Config, terms: Sequence[Term]) -> Validation:
        """Measure recalls, by language, and the losses of an objective's terms on the validation split."""


@dataclass(frozen=True)
class TrainingInputs:
    """`TrainingInputsProtocol` made of datasets.

    Attributes:
        training: the training split, reduced as the configuration says.
        validation: the whole validation split, without the languages that training is not stopped by and that have no captions
            there.
    """

    training: SplitData
    validation: SplitData
    vocabulary: Vocabulary
    captions_parameters: Mapping[str, Any]
    dimensions: Dimensions
    word_vectors: WordVectors | None = None
    contents: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of the datasets."""
        words = {} if self.word_vectors is None else {"word_vectors": self.word_vectors.fingerprint}
        return {**self.training.fingerprints, **words}

    @property
    def missing_features(self) -> tuple[MissingFeatures, ...]:
        """The images without features that were left out, by split."""
        return tuple(data.missing_features for data in (self.training, self.validation) if data.missing_features is not None)

    @property
    def feature_outliers(self) -> tuple[FeatureOutliers, ...]:
        """The images with features of zeros or of unusual norms, by split."""
        found = (
            find_feature_outliers(data.captions.split, data.features, data.captions.image_ids)
            for data in (self.training, self.validation)
        )
        return tuple(outliers for outliers in found if outliers is not None)

    def counts(self, config: Config) -> dict[str, dict[str, int]]:
        """Count captions by language, and words that have a vector, and those that begin with a pretrained one, by encoder."""
        dimensions, captions, languages = self.dimensions, self.training.captions, self.dimensions.languages
        every = range(dimensions.vocabulary_size)
        encoders = {"+".join(languages): languages} if config.model.mixes_languages else {name: (name,) for name in languages}
        ids = {name: dimensions.language_ids.get(of_encoder[0], every) for name, of_encoder in encoders.items()}
        counts = {
            "captions": {name: len(captions.rows_of(name)) for name in languages},
            "words": {name: len(of_encoder) - len(SPECIALS) for name, of_encoder in ids.items()},
        }
        if self.word_vectors is not None:
            counts["pretrained"] = {name: self.word_vectors.known(encoders[name], ids[name]) for name in encoders}
        return counts

    def sampler(self, config: Config, seed: int) -> Sampler:
        """Return the sampler that a configuration describes."""
        return build_sampler(config, self.training.captions, seed)

    def inputs(self, batch: Batch, device: torch.device, rows: slice = slice(None)) -> Inputs:
        """Return the inputs of the model for some rows of a batch."""
        return inputs_of(self.training, batch, device, rows)

    def evaluate(self, model: RetrievalModel, config: Config, terms: Sequence[Term]) -> Validation:
        """Measure recalls, by language, and the losses of an objective's terms on the validation split."""
        return validate(model, self.validation, config, terms)


def load_training_inputs(
    config: Config, corpus: Corpus, *, seed: int, memory_map: str | None = None, allow_missing_features: bool = False
) -> TrainingInputs:
    """Read and check everything that a training needs; arguments as in `train.data.splits.open_data`.

    Raises:
        UsageError: the configuration does not fit the data, or the features do not fit into memory.
        DatasetError: a dataset is missing, of the wrong kind, or does not belong with the others.
    """
    check_word_vectors(config.model, corpus.word_vectors)
    check_token_features(config.model, corpus.token_features)
    data, validated = config.data, validation_portions(config, corpus.captions)
    config.model.check_features(feature_spec(open_dataset(corpus.features)).shape)
    words = None
    if corpus.word_vectors:
        made_for = open_dataset(corpus.vocabulary, kind="vocabulary").fingerprint
        words = open_word_vectors(
            corpus.word_vectors, vocabulary=made_for, languages=data.languages, width=config.model.pretrained_width
        )
    open_split = partial(
        open_data,
        *(corpus.captions, corpus.features, corpus.vocabulary),
        l2=data.l2_features,
        memory_map=memory_map,
        allow_missing_features=allow_missing_features,
        token_features=corpus.token_features,
        token_width=config.model.token_width,
    )
    # The smaller split comes first, so that errors in the folders show sooner.
    validation = open_split(split=data.validation_split, portions=validated)
    training = open_split(
        split=data.split,
        portions=data.portions,
        captions_per_image=data.captions_per_image,
        images=data.images,
        seed=seed,
    )
    dataset = open_dataset(corpus.vocabulary)
    vocabulary, counting = dataset.vocabulary(), VocabularyParameters.from_json(dataset.manifest.parameters)
    language_ids: dict[str, tuple[int, ...]] = {}
    if data.min_count and not config.model.token_width:
        language_ids = frequent_tokens(training.captions, data.min_count, together=config.model.mixes_languages)
    elif not config.model.mixes_languages and not config.model.token_width:
        language_ids = {name: tokens_of(vocabulary, name, counting) for name in data.languages}
    return TrainingInputs(
        training=training,
        validation=validation,
        vocabulary=vocabulary,
        captions_parameters=open_dataset(corpus.captions).manifest.parameters,
        dimensions=Dimensions(
            languages=data.languages,
            vocabulary_size=len(vocabulary),
            feature_shape=training.features.shape[1:],
            language_ids=language_ids,
            token_width=config.model.token_width,
        ),
        word_vectors=words,
        contents=contents_of(corpus),
    )


def contents_of(corpus: Corpus) -> dict[str, str]:
    """Return `schemas.manifest.Manifest.content_sha256` of each dataset of a corpus, by name."""
    return {name: open_dataset(location).manifest.content_sha256 for name, location in vars(corpus).items() if location}


def validation_portions(config: Config, location: str) -> dict[str, tuple[str, ...]]:
    """Return the portions to validate on: all where a language is monitored, otherwise those that the split has.

    Raises:
        DatasetError: a language that is monitored lacks captions.
    """
    data, monitored = config.data, config.schedule.monitor_languages or config.data.languages
    captions = open_dataset(location, kind="encoded")
    available = {labels[1:] for labels in labels_of(captions) if labels[0] == data.validation_split}
    present = {
        language: tuple(portion for portion in portions if (language, portion) in available)
        for language, portions in data.portions.items()
    }
    complete = tuple(language for language in data.languages if present[language] == data.portions[language])
    for language in monitored:
        if language not in complete:
            absent = next(portion for portion in data.portions[language] if portion not in present[language])
            rest = tuple(name for name in monitored if name in complete) or complete
            raise DatasetError(
                no_captions(captions, f"split {data.validation_split!r}, language {language!r}, portion {absent!r}")
                + ". Training is stopped by the recalls of the languages in schedule.monitor_languages, all if it is empty: "
                + (f"leave {language} out of them (--set 'schedule.monitor_languages={dump(rest)}'), or " if rest else "")
                + "name another data.validation_split"
            )
    return {language: portions for language, portions in present.items() if portions}


def overlap_remark(config: Config, corpus: Corpus | None) -> str:
    """Return a sentence about training images that have captions in other splits, too; an empty string if there are none."""
    if corpus is None:
        return ""
    trained = {*config.data.splits}
    found = find_overlap(open_dataset(corpus.captions), lambda splits: bool(splits & trained) and bool(splits - trained))
    return "" if found is None else found.remark


def tokens_of(vocabulary: Vocabulary, language: str, parameters: VocabularyParameters) -> tuple[int, ...]:
    """Return the ids that one language uses in a joint vocabulary: the specials, and the tokens frequent enough in it.

    If the threshold of the vocabulary applied to each language, it applies here too; if it applied to the joint count, a token
    belongs to every language in which it occurs at all.
    """
    least = parameters.min_count if parameters.count_scope == "language" else 1
    return tuple(
        number for number, counts in enumerate(vocabulary.counts) if number < len(SPECIALS) or counts.get(language, 0) >= least
    )


def frequent_tokens(captions: Captions, min_count: int, *, together: bool) -> dict[str, tuple[int, ...]]:
    """Return, by language, the specials and the ids that occur often enough in captions, ascending.

    Args:
        captions: captions of the training split, as drawn: Kádár et al. 2018 count what a row is trained on.
        min_count: number of occurrences.
        together: count the languages together.
    """

    def frequent(token_ids: np.ndarray) -> tuple[int, ...]:
        counts = np.bincount(token_ids, minlength=len(SPECIALS))
        counts[: len(SPECIALS)] = min_count
        return tuple(np.flatnonzero(counts >= min_count).tolist())

    if together:
        return dict.fromkeys(captions.language_names, frequent(captions.token_ids))
    languages = np.repeat(captions.languages, captions.lengths)  # Of each token.
    return {name: frequent(captions.token_ids[languages == number]) for number, name in enumerate(captions.language_names)}


def build_sampler(config: Config, captions: Captions, seed: int) -> Sampler:
    """Build the sampler that a configuration describes.

    Raises:
        UsageError: there is nothing to train on, or only captions of a single image, so that no batch has negatives.
    """
    schedule, loss = config.schedule, config.loss
    _check_negatives(captions, together=schedule.batches == "images")
    if schedule.batches == "tasks":
        return TaskSampler(
            captions,
            schedule.batch_size,
            seed=seed,
            c2c_probability=loss.c2c_probability,
            bucket_by_length=schedule.bucket_by_length,
        )
    return ImageSampler(captions, schedule.batch_size, seed=seed)


def _check_negatives(captions: Captions, *, together: bool) -> None:
    """Check that there are captions of several images: in all languages ``together``, or in each."""
    counts = ByImage.of(captions).counts > 0  # [I, L]
    names = captions.language_names
    for of_images, name in [(counts.all(1), " and ".join(names))] if together else zip(counts.T, names, strict=True):
        if of_images.sum() == 1:
            raise UsageError(
                f"split {captions.split!r} has captions in {name} of a single image: batches would have no negatives, so that "
                "nothing would be learned. Give captions of two images or more"
            )


def inputs_of(data: SplitData, batch: Batch, device: torch.device, rows: slice = slice(None)) -> Inputs:
    """Collect the captions and features that a batch refers to."""
    captions = [data.captions.batch(chosen[rows]) for chosen in batch.captions]
    if data.captions.vectors is not None:  # Read now, where batches may be read ahead.
        captions = [chosen.alone() for chosen in captions]
    return Inputs(
        task=batch.task,
        numbers=upload(torch.from_numpy(np.asarray(batch.images, np.int64)), device),
        images=None if batch.task == "c2c" else ImageBatch.of(data.features, batch.images[rows], device),
        captions=tuple(captions),
        languages=batch.languages,
    )

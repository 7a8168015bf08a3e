"""Inputs of a training run from datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from schemas.conversion import dump
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.overlaps import leakage_remark
from schemas.parameters import VocabularyParameters
from schemas.process.devices import upload
from schemas.vocabulary import SPECIALS, Vocabulary
from train.chance import Chance
from train.config.sections import Config
from train.data.captions import ByImage, Captions, labels_of, no_captions
from train.data.feature_checks import FeatureOutliers, find_feature_outliers
from train.data.features import feature_spec
from train.data.sampling import Batch, ImageSampler, Sampler, TaskSampler
from train.data.splits import Exclusion, MissingFeatures, SplitData, open_data
from train.data.token_features import check_token_features
from train.data.word_vectors import WordVectors, check_word_vectors, open_word_vectors
from train.evaluation.evaluation import Validation, chance, measure_validation
from train.jobs import Corpus
from train.losses import Inputs, Term
from train.models.retrieval_model import Dimensions, ImageBatch, RetrievalModel


@dataclass(frozen=True)
class TrainingInputs:
    """Inputs of `train.loop.training.train`; a subclass may have other data.

    Attributes:
        training: the training split, reduced as configured.
        validation: the validation split of all monitored languages, and of other languages with captions in it.
        captions_parameters: those in the manifest of the encoded captions.
        word_vectors: for the initialization of word embeddings, or None.
        contents: digests of contents, by name, to detect changes; may be empty.

    Examples:
        >>> config, corpus = imagepivot.load_config("demo"), imagepivot.Corpus("encoded", "features", "vocabulary")
        >>> inputs = imagepivot.load_training_inputs(config, corpus, seed=0)
        >>> inputs.dimensions.feature_shape
        (2048,)
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
        """Fingerprints of the datasets, of word vectors and of a list of duplicates."""
        words = {} if self.word_vectors is None else {"word_vectors": self.word_vectors.fingerprint}
        lists = {} if self.training.exclusion is None else {"exclude": self.training.exclusion.sha256}
        return {**self.training.fingerprints, **words, **lists}

    @property
    def missing_features(self) -> tuple[MissingFeatures, ...]:
        """Excluded images without features, by split."""
        return tuple(data.missing_features for data in (self.training, self.validation) if data.missing_features is not None)

    @property
    def feature_outliers(self) -> tuple[FeatureOutliers, ...]:
        """Images with features of zeros or of unusual norms, by split."""
        by_split = (
            find_feature_outliers(data.captions.split, data.features, data.captions.image_ids)
            for data in (self.training, self.validation)
        )
        return tuple(outliers for outliers in by_split if outliers is not None)

    def counts(self, config: Config) -> dict[str, dict[str, int]]:
        """Count captions by language, and embedded words by encoder."""
        dimensions, captions, languages = self.dimensions, self.training.captions, self.dimensions.languages
        all_ids = range(dimensions.vocabulary_size)
        encoders = {"+".join(languages): languages} if config.model.mixes_languages else {name: (name,) for name in languages}
        ids = {name: dimensions.language_ids.get(members[0], all_ids) for name, members in encoders.items()}
        counts = {"captions": {name: len(captions.rows_of(name)) for name in languages}}
        if not dimensions.token_width:  # Token vectors replace word embeddings.
            counts["words"] = {name: len(encoder_ids) - len(SPECIALS) for name, encoder_ids in ids.items()}
        if self.word_vectors is not None:
            counts["pretrained"] = {name: self.word_vectors.count(encoders[name], ids[name]) for name in encoders}
        return counts

    def chance(self) -> dict[str, Chance]:
        """Return the recalls of a random ranking of the validation split by language."""
        captions = self.validation.captions
        return {name: chance(captions, name) for name in captions.language_names}

    def sampler(self, config: Config, seed: int) -> Sampler:
        """Build the sampler of a configuration.

        Raises:
            UsageError: the captions are of no image or a single one, so that batches have no negatives.
        """
        captions, schedule = self.training.captions, config.schedule
        has_captions, names = ByImage.of(captions).counts > 0, captions.language_names  # [I, L]
        groups = (
            [*zip(has_captions.T, names, strict=True)]
            if schedule.batches == "tasks"
            else [(has_captions.all(1), " and ".join(names))]
        )
        for images, name in groups:
            if images.sum() == 1:
                raise UsageError(
                    f"split {captions.split!r} has captions in {name} of a single image, so that batches "
                    "have no negatives: give captions of two images or more"
                )
        if schedule.batches == "images":
            return ImageSampler(captions, schedule.batch_size, seed=seed)
        return TaskSampler(
            captions,
            schedule.batch_size,
            seed=seed,
            c2c_probability=config.loss.c2c_probability,
            bucket_by_length=schedule.bucket_by_length,
        )

    def inputs(self, batch: Batch, device: torch.device, rows: slice = slice(None)) -> Inputs:
        """Read the captions and features of some rows of a batch, as inputs of the model."""
        data = self.training
        captions = [data.captions.batch(chosen[rows]) for chosen in batch.captions]
        if data.captions.vectors is not None:  # Read here, in the thread that prefetches batches.
            captions = [chosen.compact() for chosen in captions]
        return Inputs(
            numbers=upload(torch.from_numpy(np.asarray(batch.images, np.int64)), device),
            images=None if batch.task == "c2c" else ImageBatch.of(data.features, batch.images[rows], device),
            captions=tuple(captions),
            languages=batch.languages,
        )

    def evaluate(self, model: RetrievalModel, config: Config, terms: Sequence[Term]) -> Validation:
        """Measure recalls, by language, and the losses of terms on the validation split."""
        return measure_validation(model, self.validation, config, terms)


def load_training_inputs(
    config: Config,
    corpus: Corpus,
    *,
    seed: int,
    memory_map: str | None = None,
    allow_missing_features: bool = False,
    exclude: str = "",
) -> TrainingInputs:
    """Read and check the datasets of a corpus.

    ``exclude`` is a list of duplicates: training images and captions with duplicates in other splits are left
    out. Other arguments are those of `train.data.splits.open_data`.

    Raises:
        UsageError: the configuration does not fit the data, or the features do not fit into memory.
        DatasetError: a dataset is missing, of the wrong kind, or incompatible with the others.
    """
    check_word_vectors(config.model, corpus.word_vectors)
    check_token_features(config.model, corpus.token_features)
    data, portions = config.data, validation_portions(config, corpus.captions)
    config.model.check_features(feature_spec(open_dataset(corpus.features)).shape)
    words = None
    if corpus.word_vectors:
        fingerprint = open_dataset(corpus.vocabulary, kind="vocabulary").fingerprint
        width = config.model.pretrained_width
        words = open_word_vectors(
            corpus.word_vectors, vocabulary_fingerprint=fingerprint, languages=data.languages, width=width
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
    # The smaller split first, to report errors in the folders sooner.
    validation = open_split(split=data.validation_split, portions=portions)
    training = open_split(
        split=data.split,
        portions=data.portions,
        captions_per_image=data.captions_per_image,
        images=data.images,
        seed=seed,
        exclusion=Exclusion.read(exclude, data.splits, lambda split: split not in data.splits) if exclude else None,
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
    """Return the content digest of each dataset of a corpus, by name."""
    return {name: open_dataset(location).manifest.content_sha256 for name, location in vars(corpus).items() if location}


def validation_portions(config: Config, location: str) -> dict[str, tuple[str, ...]]:
    """Return the portions of the validation split by language.

    Other languages than the monitored ones may lack some.

    Raises:
        DatasetError: a monitored language lacks captions.
    """
    data, monitored = config.data, config.monitored
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
            others = tuple(name for name in monitored if name in complete) or complete
            raise DatasetError(
                no_captions(captions, f"split {data.validation_split!r}, language {language!r}, portion {absent!r}")
                + ". Early stopping needs captions in all of schedule.monitor_languages, by default all languages: "
                + (f"leave {language} out of them (--set 'schedule.monitor_languages={dump(others)}'), or " if others else "")
                + "name another data.validation_split"
            )
    return {language: portions for language, portions in present.items() if portions}


def overlap_remark(config: Config, corpus: Corpus | None) -> str:
    """Return a sentence about training images in other splits, or an empty string."""
    if corpus is None:
        return ""
    trained = {*config.data.splits}
    return leakage_remark(open_dataset(corpus.captions), lambda splits: bool(splits & trained) and bool(splits - trained))


def tokens_of(vocabulary: Vocabulary, language: str, parameters: VocabularyParameters) -> tuple[int, ...]:
    """Return the token ids of one language in a joint vocabulary, with the specials.

    A threshold of the vocabulary per language applies here, too. With a joint one, a token belongs to all its languages.
    """
    min_count = parameters.min_count if parameters.count_scope == "language" else 1
    return tuple(
        token_id
        for token_id, counts in enumerate(vocabulary.counts)
        if token_id < len(SPECIALS) or counts.get(language, 0) >= min_count
    )


def frequent_tokens(captions: Captions, min_count: int, *, together: bool) -> dict[str, tuple[int, ...]]:
    """Return the specials and the frequent token ids, ascending, by language.

    The captions are the sampled ones of the training split, as in Kádár et al. 2018. ``together`` counts over all languages.
    """

    def frequent(token_ids: np.ndarray) -> tuple[int, ...]:
        counts = np.bincount(token_ids, minlength=len(SPECIALS))
        counts[: len(SPECIALS)] = min_count
        return tuple(np.flatnonzero(counts >= min_count).tolist())

    if together:
        return dict.fromkeys(captions.language_names, frequent(captions.token_ids))
    languages = np.repeat(captions.languages, captions.lengths)  # The language of each token.
    return {name: frequent(captions.token_ids[languages == index]) for index, name in enumerate(captions.language_names)}

"""What a training needs, opened from a configuration and a corpus: data, dimensions of the model, sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.dataset import open_dataset
from schemas.parameters import VocabularyParameters
from schemas.vocabulary import SPECIALS, Vocabulary
from train.config.sections import Config
from train.data.captions import Captions
from train.data.corpus import Corpus
from train.data.sampling import ImageSampler, Sampler, TaskSampler
from train.data.splits import LeftOut, TrainingData, open_data
from train.models.joint_embedding import ModelConfig

__all__ = ["Material", "build_sampler", "open_material", "tokens_of"]


@dataclass(frozen=True)
class Material:
    """The data of a training and the dimensions of its model.

    Attributes:
        training: the training split, reduced as the configuration says.
        validation: the whole validation split.
        vocabulary: the vocabulary that the captions were encoded with.
        captions_parameters: parameters of the encoded captions.
        model_config: dimensions and choices of the model.
    """

    training: TrainingData
    validation: TrainingData
    vocabulary: Vocabulary
    captions_parameters: Mapping[str, Any]
    model_config: ModelConfig

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The images without features that were left out, by split."""
        return tuple(data.left_out for data in (self.training, self.validation) if data.left_out is not None)


def open_material(
    config: Config, corpus: Corpus, *, seed: int, memory_map: str | None = None, allow_missing_features: bool = False
) -> Material:
    """Read and check everything that a training needs.

    Args:
        config: the configuration.
        corpus: folders of captions, features and vocabulary.
        seed: seed of the run, which reduced training splits depend on.
        memory_map: folder for a copy of features that do not fit into memory.
        allow_missing_features: leave out the captions of images that lack features.

    Raises:
        UsageError: the configuration does not fit the data, or the features do not fit into memory.
        DatasetError: a dataset is missing, of the wrong kind, or does not belong with the others.
    """
    data, model = config.data, config.model
    # The smaller split comes first, so that errors in the folders show sooner.
    validation = open_data(
        corpus.captions,
        corpus.features,
        corpus.vocabulary,
        split=data.validation_split,
        portions=data.portions,
        l2=data.l2_features,
        memory_map=memory_map,
        allow_missing_features=allow_missing_features,
    )
    training = open_data(
        corpus.captions,
        corpus.features,
        corpus.vocabulary,
        split=data.split,
        portions=data.portions,
        captions_per_image=data.captions_per_image,
        images=data.images,
        seed=seed,
        l2=data.l2_features,
        memory_map=memory_map,
        allow_missing_features=allow_missing_features,
    )
    dataset = open_dataset(corpus.vocabulary)
    vocabulary, counting = dataset.vocabulary(), VocabularyParameters.from_json(dataset.manifest.parameters)
    language_ids = {} if model.shared else {name: tokens_of(vocabulary, name, counting) for name in data.languages}
    return Material(
        training=training,
        validation=validation,
        vocabulary=vocabulary,
        captions_parameters=open_dataset(corpus.captions).manifest.parameters,
        model_config=ModelConfig(
            languages=data.languages,
            vocabulary_size=len(vocabulary),
            feature_width=training.features.width,
            embedding=model.embedding,
            words=model.words,
            shared=model.shared,
            similarity=model.similarity,
            language_ids=language_ids,
        ),
    )


def tokens_of(vocabulary: Vocabulary, language: str, parameters: VocabularyParameters) -> tuple[int, ...]:
    """Return the ids that one language uses in a joint vocabulary: the specials, and the tokens frequent enough in it.

    Args:
        vocabulary: the joint vocabulary.
        language: the language.
        parameters: parameters of the vocabulary. If its threshold applied to each language, it applies here too; if it applied to
            the joint count, a token belongs to every language in which it occurs at all.
    """
    least = parameters.min_count if parameters.count_scope == "language" else 1
    return tuple(
        number for number, counts in enumerate(vocabulary.counts) if number < len(SPECIALS) or counts.get(language, 0) >= least
    )


def build_sampler(config: Config, captions: Captions, seed: int) -> Sampler:
    """Build the sampler that a configuration describes."""
    schedule, loss = config.schedule, config.loss
    if loss.objective == "ranking":
        return TaskSampler(
            captions, schedule.batch_size, seed=seed, c2c_probability=loss.c2c_probability, bucket=schedule.bucket
        )
    return ImageSampler(captions, schedule.batch_size, seed=seed)

"""From a configuration and folders to what a training needs: data, model and sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from schemas.dataset import open_dataset
from schemas.parameters import VocabularyParameters
from schemas.vocabulary import SPECIALS, Vocabulary
from train.config.sections import Config
from train.data.captions import Captions
from train.data.sampling import ImageSampler, Sampler, TaskSampler
from train.data.splits import TrainingData, open_data
from train.models.joint_embedding import JointEmbedding, ModelConfig

__all__ = ["Material", "build_model", "build_sampler", "open_material", "tokens_of"]


@dataclass(frozen=True)
class Material:
    """What is trained on, and what the model is built from.

    Attributes:
        training: the training split, with what the configuration draws from it.
        validation: the validation split, whole.
        vocabulary: that the captions were encoded with.
        captions_parameters: of the encoded captions.
        model_config: what the model is built from.
    """

    training: TrainingData
    validation: TrainingData
    vocabulary: Vocabulary
    captions_parameters: Mapping[str, Any]
    model_config: ModelConfig


def open_material(
    config: Config, *, captions: str, features: str, vocabulary: str, seed: int, memory_map: str | None = None
) -> Material:
    """Reads and checks everything that a training needs; arguments and errors as of `train.loop.train`."""
    data, model = config.data, config.model
    # The smaller split first: what is wrong with the folders is found in less time.
    validation = open_data(
        captions,
        features,
        vocabulary,
        split=data.validation_split,
        portions=data.portions,
        l2=data.l2_features,
        memory_map=memory_map,
    )
    training = open_data(
        captions,
        features,
        vocabulary,
        split=data.split,
        portions=data.portions,
        captions_per_image=data.captions_per_image,
        images=data.images,
        seed=seed,
        l2=data.l2_features,
        memory_map=memory_map,
    )
    words = open_dataset(vocabulary)
    tokens, counting = words.vocabulary(), VocabularyParameters.from_json(words.manifest.parameters)
    own = {} if model.shared else {name: tokens_of(tokens, name, counting) for name in data.languages}
    return Material(
        training=training,
        validation=validation,
        vocabulary=tokens,
        captions_parameters=open_dataset(captions).manifest.parameters,
        model_config=ModelConfig(
            languages=data.languages,
            vocabulary_size=len(tokens),
            feature_width=training.features.width,
            embedding=model.embedding,
            words=model.words,
            shared=model.shared,
            similarity=model.similarity,
            language_ids=own,
        ),
    )


def tokens_of(vocabulary: Vocabulary, language: str, parameters: VocabularyParameters) -> tuple[int, ...]:
    """Ids of a joint vocabulary that a language's own vocabulary would hold: the specials, and what it uses often enough.

    Args:
        vocabulary: the joint one.
        language: the language.
        parameters: of the vocabulary's manifest. Where its threshold was for each language, the same holds here; where it was for
            the joint count, a token that occurs in the language at all is one of its own.
    """
    least = parameters.min_count if parameters.count_scope == "language" else 1
    return tuple(
        number for number, counts in enumerate(vocabulary.counts) if number < len(SPECIALS) or counts.get(language, 0) >= least
    )


def build_model(config: ModelConfig, seed: int) -> JointEmbedding:
    """A model with the first weights of a seed, the same on every device; torch's own generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return JointEmbedding(config)


def build_sampler(config: Config, captions: Captions, seed: int) -> Sampler:
    """The batches that a configuration asks for."""
    schedule, loss = config.schedule, config.loss
    if loss.objective == "ranking":
        return TaskSampler(
            captions, schedule.batch_size, seed=seed, c2c_probability=loss.c2c_probability, bucket=schedule.bucket
        )
    return ImageSampler(captions, schedule.batch_size, seed=seed)

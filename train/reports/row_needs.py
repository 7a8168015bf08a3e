"""What the rows of the papers' tables need beyond captions: features of some sort, and more where a preset says so.

A row is trained on the first of the given datasets of features that fits it. Models of the kind ``vse`` take one vector per image.
Of those that attend to several, SCAN and the lines of Huang et al. attend to regions; other lines to what `_SORTS` names. Features
whose origin is not known, such as imported ones, fit all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from schemas.dataset import Dataset
from schemas.errors import UsageError
from schemas.parameters import FeaturesParameters
from train.config.sections import Config
from train.data.vectors import feature_spec

__all__ = ["FURTHER", "Further", "features_for"]


@dataclass(frozen=True)
class Further:
    """A dataset that only some presets take.

    Attributes:
        asked: the property of `ModelConfig` that is not 0 where a preset takes it.
        lacking: what a preset lacks without it, and the option that brings it.
        taking: what a preset does with it.
    """

    asked: str
    lacking: str
    taking: str


FURTHER: Mapping[str, Further] = {
    "word_vectors": Further(
        "pretrained_width",
        "pretrained word vectors (--word-vectors FOLDER, which imagepivot word-vectors makes)",
        "begins with word vectors",
    ),
    "token_features": Further(
        "token_width",
        "vectors of tokens (--token-features FOLDER, which imagepivot token-features makes)",
        "reads vectors of tokens",
    ),
}
"""Such datasets, by field of `Corpus`."""

_OPTION = "--features FOLDER, which may be repeated"
_SORTS: Mapping[str, str] = {"huang2019/mha-d-vgg19": "crops", "dan*": "grid"}
_EXAMPLES: Mapping[str, str] = {
    "vector": "one vector per image, such as 'resnet50-pool'",
    "regions": "regions, such as 'faster-rcnn-36'",
    "crops": "separate crops, as those of 'vgg19-10crop' with imagepivot features --keep-crops",
    "grid": "cells of a grid, such as 'resnet152-grid'",
}


def features_for(preset: str, config: Config, given: Mapping[str, Dataset]) -> tuple[str, str]:
    """Choose the features for a row.

    Args:
        preset: the preset of the row.
        config: its configuration.
        given: datasets of features by folder, the preferred ones first.

    Returns:
        The folder of the features, and what is lacking, with the option that brings it; one of both is empty.
    """
    wanted = _wanted(preset, config)
    for location, dataset in given.items():
        if _sort(dataset) in (wanted, "") and _takes(config, feature_spec(dataset).shape):
            return location, ""
    return "", f"{_EXAMPLES[wanted]} ({_OPTION})"


def _wanted(preset: str, config: Config) -> str:
    named = (sort for pattern, sort in _SORTS.items() if fnmatchcase(preset, pattern))
    return next(named, "vector" if _takes(config, (1,)) else "regions")


def _sort(dataset: Dataset) -> str:
    """Return what features are; empty for several of unknown origin."""
    if len(feature_spec(dataset).shape) == 1:
        return "vector"
    if dataset.kind == "regions":
        return "regions"
    extractor = FeaturesParameters.from_json(dataset.manifest.parameters).extractor or {}
    return next((sort for sort, stated in (("crops", "separate"), ("grid", "grid")) if extractor.get(stated)), "")


def _takes(config: Config, shape: tuple[int, ...]) -> bool:
    try:
        config.model.check_features(shape)
    except UsageError:
        return False
    return True

"""Rows of the papers' tables that are chosen, and the datasets that each is trained on: features of some sort, and more by preset.

A row is trained on the first of the given datasets of features that fits it. Models of the kind ``vse`` take one vector per image.
Of those that attend to several, SCAN and the lines of Huang et al. attend to regions; other lines to what `_SORTS` names. Features
whose origin is not known, such as imported ones, fit all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from schemas.dataset import Dataset, open_dataset
from schemas.errors import UsageError
from schemas.parameters import FeaturesParameters
from train.config.presets import preset_names
from train.config.sections import Config, resolve
from train.data.features import feature_spec
from train.jobs import Corpus, ReproduceJob
from train.reports.published import ENSEMBLES, presets_of_paper, presets_of_table, rows_of_paper


@dataclass(frozen=True)
class OptionalDataset:
    """A dataset that only some presets take.

    Attributes:
        asked: the property of `ModelConfig` that is not 0 where a preset takes it.
        lacking: what a preset lacks without it, and the option that brings it.
        taking: what a preset does with it.
    """

    asked: str
    lacking: str
    taking: str


OPTIONAL_DATASETS: Mapping[str, OptionalDataset] = {
    "word_vectors": OptionalDataset(
        "pretrained_width",
        "pretrained word vectors (--word-vectors FOLDER, which imagepivot word-vectors makes)",
        "begins with word vectors",
    ),
    "token_features": OptionalDataset(
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


def corpora_of(job: ReproduceJob) -> dict[str, Corpus]:
    """Return the presets of the selected rows in the order of the tables, ensembles last, each with what it is trained on.

    Rows that need what is not given are left out: features of another sort, or word vectors. What a row does not take, such as
    word vectors where it draws them, is not in its corpus.

    Raises:
        UsageError: a pattern matches no row, no row is left, or no row takes some features or the word vectors.
        DatasetError: there are no such features.
    """
    kept, lacking = _divided(job)
    if not kept:
        raise UsageError(f"there is nothing to train: {'; '.join(_sentences(lacking))}")
    for name, further in OPTIONAL_DATASETS.items():
        given = getattr(job, name)
        if given and not any(getattr(corpus, name) for corpus in kept.values()):
            raise UsageError(
                f"--{name.replace('_', '-')} {given!r} is given, but no row that is chosen {further.taking}: leave it out, or "
                "choose others with --rows"
            )
    unused = [location for location in job.features if all(corpus.features != location for corpus in kept.values())]
    if unused:
        raise UsageError(
            f"--features {unused[0]!r} is given, but no row that is chosen takes these features: leave it out, or choose "
            "others with --rows"
        )
    return kept


def left_out(job: ReproduceJob) -> list[str]:
    """Return a sentence for each thing that presets lack, and are left out for."""
    return _sentences(_divided(job)[1])


def _sentences(lacking: Mapping[str, str]) -> list[str]:
    by_cause: dict[str, list[str]] = {}
    for preset, cause in lacking.items():
        by_cause.setdefault(cause, []).append(preset)
    return [f"left out for want of {cause}: {', '.join(presets)}" for cause, presets in by_cause.items()]


def _divided(job: ReproduceJob) -> tuple[dict[str, Corpus], dict[str, str]]:
    """Return the presets to train with what they are trained on, and those left out with what they lack."""
    given = {location: open_dataset(location) for location in job.features}
    kept: dict[str, Corpus] = {}
    without: dict[str, str] = {}
    for name in _chosen(job):
        if name in ENSEMBLES:  # Its members stand before it.
            lacking = next((without[member] for member in ENSEMBLES[name] if member in without), "")
            corpus = kept.get(ENSEMBLES[name][0], job.corpus)
        elif name in preset_names():
            config = resolve(name, job.overrides)
            features, lacking = features_for(name, config, given)
            taken = {field: further for field, further in OPTIONAL_DATASETS.items() if getattr(config.model, further.asked)}
            folders = {field: getattr(job, field) if field in taken else "" for field in OPTIONAL_DATASETS}
            lacking = lacking or next((taken[field].lacking for field in taken if not folders[field]), "")
            corpus = replace(job.corpus, features=features, **folders)
        else:
            lacking, corpus = "a preset", job.corpus
        if lacking:
            without[name] = lacking
        else:
            kept[name] = corpus
    return kept, without


def _chosen(job: ReproduceJob) -> list[str]:
    """Return the presets of the rows that are chosen, and of the members of ensembles among them."""
    names = presets_of_paper(job.paper)
    if job.table is not None:
        patterns = presets_of_table(job.paper, job.table)
    else:
        patterns = job.rows or (("*",) if job.sts else ())
    chosen = set() if patterns else {row.preset for row in rows_of_paper(job.paper)}
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{job.paper}/{pattern}")}
        if not matches:
            raise UsageError(f"--rows {pattern!r} matches no row of {job.paper}: its rows are {', '.join(names)}")
        chosen |= matches
    chosen |= {member for name in chosen for member in ENSEMBLES.get(name, ())}
    return [name for name in names if name in chosen]


def features_for(preset: str, config: Config, given: Mapping[str, Dataset]) -> tuple[str, str]:
    """Choose the features for a row.

    Datasets of features are given by folder, the preferred ones first.

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

"""Selection of features, word vectors and token vectors for rows of tables.

A row is trained on the first dataset of features that fits it. Models of the kind ``vse`` take one vector per
image. Of the models that attend to several, SCAN and those of Huang et al. take regions, and others the sort
in `_SORTS`. Features of unknown origin, such as imported ones, fit all of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from schemas.dataset import Dataset, open_dataset
from schemas.errors import UsageError
from schemas.parameters import FeaturesParameters
from train.config.sections import Config, load_config
from train.data.features import feature_spec
from train.jobs import Corpus, ReproduceJob
from train.reports.published import ENSEMBLES, presets_of_paper, presets_of_table, rows_of_paper


@dataclass(frozen=True)
class OptionalDataset:
    """A dataset that only some presets take.

    Attributes:
        config_field: property of `ModelConfig` that is not 0 for presets that take it.
        missing_message: the dataset and the option that gives it, for messages.
        usage: verb phrase for a preset that takes it, for messages.
    """

    config_field: str
    missing_message: str
    usage: str


OPTIONAL_DATASETS: Mapping[str, OptionalDataset] = {
    "word_vectors": OptionalDataset(
        "pretrained_width",
        "pretrained word vectors (--word-vectors FOLDER, which imagepivot word-vectors makes)",
        "begins with word vectors",
    ),
    "token_features": OptionalDataset(
        "token_width",
        "vectors of tokens (--token-features FOLDER, which imagepivot text-features makes)",
        "reads vectors of tokens",
    ),
}
"""Optional datasets by field of `Corpus`."""

_SORTS: Mapping[str, str] = {"huang2019/mha-d-vgg19": "crops", "dan*": "grid"}
_EXAMPLES: Mapping[str, str] = {
    "vector": "one vector per image, such as 'resnet50-pool'",
    "regions": "regions, such as 'faster-rcnn-36'",
    "crops": "separate crops, as those of 'vgg19-10crop' with imagepivot features --keep-crops",
    "grid": "cells of a grid, such as 'resnet152-grid'",
}


def corpora_of(job: ReproduceJob) -> tuple[dict[str, Corpus], list[str]]:
    """Choose the datasets of each selected preset, ensembles last.

    A corpus holds only datasets that its preset takes.

    Returns:
        Corpora by preset, and a sentence for each missing dataset, with the presets that are skipped for lack of it.

    Raises:
        UsageError: a pattern matches no row, all rows are skipped, or no row takes one of the datasets.
        DatasetError: a dataset of features does not exist.
    """
    features = {location: open_dataset(location) for location in job.features}
    corpora: dict[str, Corpus] = {}
    missing: dict[str, str] = {}
    for name in _select_presets(job):
        if name in ENSEMBLES:  # Members precede their ensemble.
            message = next((missing[member] for member in ENSEMBLES[name] if member in missing), "")
            corpus = corpora.get(ENSEMBLES[name][0], job.corpus)
        else:
            config = load_config(name, job.overrides)
            location, message = features_for(name, config, features)
            taken = {field for field, dataset in OPTIONAL_DATASETS.items() if getattr(config.model, dataset.config_field)}
            folders = {field: getattr(job, field) if field in taken else "" for field in OPTIONAL_DATASETS}
            absent = (OPTIONAL_DATASETS[field].missing_message for field in folders if field in taken and not folders[field])
            message = message or next(absent, "")
            corpus = replace(job.corpus, features=location, **folders)
        if message:
            missing[name] = message
        else:
            corpora[name] = corpus
    skipped: dict[str, list[str]] = {}
    for preset, message in missing.items():
        skipped.setdefault(message, []).append(preset)
    remarks = [f"left out for lack of {message}: {', '.join(names)}" for message, names in skipped.items()]
    if not corpora:
        raise UsageError(f"there is nothing to train: {'; '.join(remarks)}")
    options = [(name, getattr(job, name), dataset.usage) for name, dataset in OPTIONAL_DATASETS.items()]
    options += [("features", location, "takes these features") for location in job.features]
    for name, location, usage in options:
        if location and all(getattr(corpus, name) != location for corpus in corpora.values()):
            raise UsageError(
                f"--{name.replace('_', '-')} {location!r} is given, but no row that is chosen {usage}: "
                "leave it out, or choose others with --rows"
            )
    return corpora, remarks


def _select_presets(job: ReproduceJob) -> list[str]:
    """Return the presets of the selected rows, and of the members of their ensembles."""
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


def features_for(preset: str, config: Config, datasets: Mapping[str, Dataset]) -> tuple[str, str]:
    """Choose the features for a row from datasets in order of preference.

    Returns:
        The folder of the features and "", or "" and a message with the missing features and their option.
    """
    sorts = (sort for pattern, sort in _SORTS.items() if fnmatchcase(preset, pattern))
    wanted = next(sorts, "vector" if _takes(config, (1,)) else "regions")
    for location, dataset in datasets.items():
        if _feature_kind(dataset) in (wanted, "") and _takes(config, feature_spec(dataset).shape):
            return location, ""
    return "", f"{_EXAMPLES[wanted]} (--features FOLDER, which may be repeated)"


def _feature_kind(dataset: Dataset) -> str:
    """Return the kind of features, a key of `_EXAMPLES`; empty if unknown."""
    if len(feature_spec(dataset).shape) == 1:
        return "vector"
    if dataset.kind == "regions":
        return "regions"
    extractor = FeaturesParameters.from_json(dataset.manifest.parameters).extractor or {}
    return next((kind for kind, key in (("crops", "separate"), ("grid", "grid")) if extractor.get(key)), "")


def _takes(config: Config, shape: tuple[int, ...]) -> bool:
    try:
        config.model.check_features(shape)
    except UsageError:
        return False
    return True

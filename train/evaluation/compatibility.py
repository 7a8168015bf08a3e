"""Compatibility of runs with datasets, languages and one another."""

from collections.abc import Sequence
from typing import Literal

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.sample_outputs import are_equal
from train.data.features import extractor_fingerprint
from train.data.splits import check_fingerprints
from train.data.token_features import check_token_features
from train.runs.run import Run

_DATASETS = {
    "vocabulary": "captions in the ids of another vocabulary",
    "extractor": "features of another extractor",
    "token_model": "vectors of tokens of another model",
}
"""Datasets that all runs of an ensemble share, by fingerprint, and how a message names other ones."""


def check_dataset(run: Run, dataset: Dataset, name: Literal["vocabulary", "extractor"]) -> None:
    """Check that captions have a run's vocabulary, or features its extractor.

    Raises:
        DatasetError: they come from another vocabulary or extractor.
    """
    vocabulary = dataset.manifest.input_fingerprint("vocabulary") or "none"
    fingerprint = vocabulary if name == "vocabulary" else extractor_fingerprint(dataset)
    location = dataset.folder.location
    check_fingerprints({name: fingerprint}, {name: run.fingerprints[name]}, captions=location, features=location)
    if name == "extractor":
        check_sample_outputs(run, features=location)


def check_sample_outputs(run: Run, *, features: str = "", token_features: str = "") -> None:
    """Check that features come from the code that a run was trained with.

    Datasets and runs without sample outputs pass.

    Raises:
        DatasetError: equal weights and options give other values, since features were extracted by another version.
    """
    for name, location in (("extractor", features), ("token_model", token_features)):
        if not location:
            continue
        manifest, expected = open_dataset(location).manifest, run.sample_outputs.get(name, ())
        if not are_equal(manifest.sample_outputs, expected, manifest.parameters):
            versions = ", ".join(f"{library} {version}" for library, version in manifest.libraries.items())
            raise DatasetError(
                f"{location!r} was computed by another version of the model's code ({versions}) than the "
                f"features that {run.folder.location!r} was trained on: the values for a fixed input differ "
                "beyond rounding. Extract them with the versions of the training, or train on these"
            )


def check_vectors(run: Run) -> None:
    """Check that a run's model embeds images and captions as single vectors.

    Raises:
        UsageError: it compares an image with a caption part by part.
    """
    if not run.model.vectors:
        raise UsageError(
            f"{run.folder.location!r} holds a model of the kind {run.config.model.kind!r}, which compares "
            "an image with a caption part by part and has no vector of either: there is nothing to embed, "
            "to search in, or to compare sentences by. imagepivot evaluate scores it"
        )


def check_languages(languages: Sequence[str], known: Sequence[str], subject: str = "this run") -> None:
    """Check that a run or an ensemble knows the languages of ``--languages``.

    Raises:
        UsageError: it does not know one of them.
    """
    if unknown := [language for language in languages if language not in known]:
        raise UsageError(
            f"--languages names {', '.join(unknown)}, but {subject} knows only {', '.join(known)}: give some of these"
        )


def check_members(runs: Sequence[Run]) -> list[str]:
    """Check that runs can form an ensemble: equal datasets, and a common language.

    Returns:
        The languages that all runs know, in the order of the first run.

    Raises:
        DatasetError: a run was trained with another vocabulary or extractor than the first one.
        UsageError: the runs share no language.
    """
    first = runs[0]
    for run in runs[1:]:
        for name, meaning in _DATASETS.items():
            if name in first.fingerprints and name in run.fingerprints and run.fingerprints[name] != first.fingerprints[name]:
                raise DatasetError(
                    f"{run.folder.location!r} was trained with {meaning} than {first.folder.location!r} (fingerprint "
                    f"{run.fingerprints[name][:12]}..., not {first.fingerprints[name][:12]}...): the runs of an ensemble read the "
                    "same datasets. Leave one of them out"
                )
    common = [language for language in first.model.languages if all(language in run.model.languages for run in runs)]
    if not common:
        languages = "; ".join(f"{run.folder.location!r} knows {', '.join(run.model.languages)}" for run in runs)
        raise UsageError(f"no language is known to all runs of the ensemble: {languages}. Give runs that share one")
    return common


def check_tokens(runs: Sequence[Run], token_features: str) -> int:
    """Check that token vectors are passed exactly if a run reads them.

    Returns:
        The width of the vectors; 0 if no run reads any.

    Raises:
        UsageError: the folder is empty although a run reads vectors of tokens, or is given although none does.
    """
    model = max((run.config.model for run in runs), key=lambda model: model.token_width)
    check_token_features(model, token_features)
    return model.token_width


def check_reads_text(run: Run) -> None:
    """Check that a run's model reads any text.

    Raises:
        UsageError: it reads precomputed vectors of tokens.
    """
    if run.config.model.token_width:
        raise UsageError(
            f"{run.folder.location!r} reads vectors of tokens (model.word_vectors is 'precomputed'), which exist for captions "
            "only: it cannot read other text. evaluate, embed and figures take them with --token-features"
        )


def expected_fingerprints(runs: Sequence[Run]) -> dict[str, str]:
    """Return the fingerprints of datasets that all runs of an ensemble can read."""
    return {name: run.fingerprints[name] for run in runs for name in _DATASETS if name in run.fingerprints}

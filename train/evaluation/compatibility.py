"""What a run can be used for: captions in the ids of its vocabulary, features from its extractor, and vectors if it has them."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError
from train.data.features import extractor_fingerprint
from train.data.splits import check_fingerprints
from train.data.token_features import check_token_features
from train.runs.run import Run


def check_captions(run: Run, captions: Dataset) -> None:
    """Check that encoded captions are in the ids of a run's vocabulary.

    Raises:
        DatasetError: they were encoded with another vocabulary.
    """
    _check(run, "vocabulary", captions.manifest.input_fingerprint("vocabulary") or "none", captions)


def check_features(run: Run, features: Dataset) -> None:
    """Check that features come from the extractor that a run was trained on; they may be of any images.

    Raises:
        DatasetError: they come from another extractor.
    """
    _check(run, "extractor", extractor_fingerprint(features), features)


def check_vectors(run: Run) -> None:
    """Check that a run's model makes one vector of an image or caption, whatever it is compared with.

    Raises:
        UsageError: it does not.
    """
    if not run.model.vectors:
        raise UsageError(
            f"{run.folder.location!r} holds a model of the kind {run.config.model.kind!r}, which compares an image with a caption "
            "part by part and has no vector of either: there is nothing to embed, to search in, or to compare sentences by. "
            "imagepivot evaluate scores it"
        )


def check_members(runs: Sequence[Run]) -> list[str]:
    """Check that runs can be one ensemble: they read the same captions and features, in a language that all know.

    Returns:
        The languages that all know, in the order of the first run.

    Raises:
        DatasetError: a run was trained with another vocabulary or extractor than the first one.
        UsageError: no language is known to all.
    """
    first = runs[0]
    meanings = {
        "vocabulary": "captions in the ids of another vocabulary",
        "extractor": "features of another extractor",
        "token_model": "vectors of tokens of another model",
    }
    for run in runs[1:]:
        for name, meaning in meanings.items():
            if name in first.fingerprints and name in run.fingerprints and run.fingerprints[name] != first.fingerprints[name]:
                raise DatasetError(
                    f"{run.folder.location!r} was trained with {meaning} than {first.folder.location!r} (fingerprint "
                    f"{run.fingerprints[name][:12]}..., not {first.fingerprints[name][:12]}...): the runs of an ensemble read the "
                    "same datasets. Leave one of them out"
                )
    common = [language for language in first.model.languages if all(language in run.model.languages for run in runs)]
    if not common:
        known = "; ".join(f"{run.folder.location!r} knows {', '.join(run.model.languages)}" for run in runs)
        raise UsageError(f"no language is known to all runs of the ensemble: {known}. Give runs that share one")
    return common


def check_tokens(runs: Sequence[Run], token_features: str) -> int:
    """Check that there are vectors of tokens exactly if runs read them.

    Of an ensemble, some runs may have words of their own. An empty folder is none.

    Returns:
        The width of the vectors; 0 where no run reads any.

    Raises:
        UsageError: there are none, or no run reads them.
    """
    model = max((run.config.model for run in runs), key=lambda model: model.token_width)
    check_token_features(model, token_features)
    return model.token_width


def check_reads_text(run: Run) -> None:
    """Check that a run's model reads any text, and not only captions of which there are vectors.

    Raises:
        UsageError: it does not.
    """
    if run.config.model.token_width:
        raise UsageError(
            f"{run.folder.location!r} reads vectors of tokens (model.word_vectors is 'precomputed'), which are made of captions, "
            "and of a text there are none. evaluate, embed and figures take them with --token-features"
        )


def expected_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the fingerprints that captions and features of other images must have for runs that can be an ensemble."""
    names = ("vocabulary", "extractor", "token_model")
    return {name: run.fingerprints[name] for run in runs for name in names if name in run.fingerprints}


def _check(run: Run, name: str, fingerprint: str, dataset: Dataset) -> None:
    location = dataset.folder.location
    check_fingerprints({name: fingerprint}, {name: run.fingerprints[name]}, captions=location, features=location)

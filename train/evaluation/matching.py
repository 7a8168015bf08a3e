"""What a run may be used with: captions in the ids of its vocabulary, and features of the extractor that it was trained on."""

from __future__ import annotations

from schemas.dataset import Dataset
from train.data.features import extractor_fingerprint
from train.data.splits import check_fingerprints
from train.runs.run import Run

__all__ = ["check_captions", "check_features"]


def check_captions(run: Run, captions: Dataset) -> None:
    """Checks that encoded captions are in the ids of a run's vocabulary.

    Raises:
        DatasetError: they were encoded with another.
    """
    _check(run, "vocabulary", captions.manifest.input_fingerprint("vocabulary") or "none", captions)


def check_features(run: Run, features: Dataset) -> None:
    """Checks that features are of the extractor that a run was trained on; which images they are of does not matter.

    Raises:
        DatasetError: they are another extractor's.
    """
    _check(run, "extractor", extractor_fingerprint(features), features)


def _check(run: Run, name: str, found: str, dataset: Dataset) -> None:
    location = dataset.folder.location
    check_fingerprints({name: found}, {name: run.fingerprints[name]}, captions=location, features=location)

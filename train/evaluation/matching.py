"""Which datasets a run can be used with: captions in the ids of its vocabulary, and features from its extractor."""

from __future__ import annotations

from schemas.dataset import Dataset
from train.data.features import extractor_fingerprint
from train.data.splits import check_fingerprints
from train.runs.run import Run

__all__ = ["check_captions", "check_features"]


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


def _check(run: Run, name: str, fingerprint: str, dataset: Dataset) -> None:
    location = dataset.folder.location
    check_fingerprints({name: fingerprint}, {name: run.fingerprints[name]}, captions=location, features=location)

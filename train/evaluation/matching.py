"""What a run can be used for: captions in the ids of its vocabulary, features from its extractor, and vectors if it has them."""

from __future__ import annotations

from schemas.dataset import Dataset
from schemas.errors import UsageError
from train.data.features import extractor_fingerprint
from train.data.splits import check_fingerprints
from train.runs.run import Run

__all__ = ["check_captions", "check_features", "check_vectors"]


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
            "part by part and has no vector of either: there is nothing to embed or to search in. imagepivot evaluate scores it"
        )


def _check(run: Run, name: str, fingerprint: str, dataset: Dataset) -> None:
    location = dataset.folder.location
    check_fingerprints({name: fingerprint}, {name: run.fingerprints[name]}, captions=location, features=location)

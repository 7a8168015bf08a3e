"""Retrieval within folds of the images, as on COCO: "1K" is the mean over five folds of 1,000 of its 5,000 test images.

VSE++ (``evaluation.py``, ``evalrank``) and SCAN do so, each fold with the five captions of its images. Theirs are cut in the order
of the files that were published with Karpathy's split; ours in that of the image ids, the only one that a dataset keeps. They are
other thousands of the same images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

import numpy as np

from schemas.errors import UsageError
from train.data.captions import Captions
from train.data.splits import TrainingData
from train.evaluation.evaluating import Count, chance, count_nothing, evaluate_together
from train.evaluation.metrics import Direction, Retrieval
from train.models.retrieval_model import RetrievalModel


def evaluate_folds(
    members: Sequence[tuple[RetrievalModel, TrainingData]], folds: int, *, count: Count = count_nothing
) -> dict[str, Retrieval]:
    """Measure recall and median rank within each fold of the images, and return the means over the folds, for each language.

    A language's images are cut in the order of their ids; if their number cannot be divided, the first folds have one more.

    Args:
        members: as in `evaluate_together`.
        folds: number of folds; 1 ranks all images together.
        count: counts captions and images.

    Returns:
        Retrieval by language: means of recalls and of median ranks, and the number of all queries.

    Raises:
        UsageError: a language has fewer images than there are folds.
    """
    if folds == 1:
        return evaluate_together(members, count=count)
    captions = members[0][1].captions
    results = {}
    for language in captions.language_names:
        if len(captions.rows_of(language)):
            of_folds = [
                evaluate_together([(model, _cut(data, language, images)) for model, data in members], count=count)[language]
                for images in _folds(captions, language, folds)
            ]
            results[language] = Retrieval(
                _mean([result.image_to_text for result in of_folds]), _mean([result.text_to_image for result in of_folds])
            )
    return results


def chance_in_folds(captions: Captions, language: str, folds: int) -> Mapping[str, tuple[float, ...]]:
    """Return the recalls of a random order, see `chance`; the means over the folds of `evaluate_folds`."""
    if folds == 1:
        return chance(captions, language)
    of_folds = [chance(_of_images(captions, language, images), language) for images in _folds(captions, language, folds)]
    return {
        direction: tuple(mean(values) for values in zip(*(recalls[direction] for recalls in of_folds), strict=True))
        for direction in of_folds[0]
    }


def _folds(captions: Captions, language: str, folds: int) -> list[np.ndarray]:
    """Return the images of each fold: positions in ``captions.image_ids``, ascending."""
    images = np.unique(captions.images[captions.rows_of(language)])
    if len(images) < folds:
        raise UsageError(
            f"--folds is {folds}, but split {captions.split!r} has only {len(images)} images with captions in {language!r}: give a "
            "smaller number"
        )
    return np.array_split(images, folds)


def _of_images(captions: Captions, language: str, images: np.ndarray) -> Captions:
    rows = captions.rows_of(language)
    return captions.select(rows[np.isin(captions.images[rows], images)]).compact()


def _cut(data: TrainingData, language: str, images: np.ndarray) -> TrainingData:
    """Return the captions of some images in a language, with the features of these images alone."""
    features = replace(data.features, rows=data.features.rows[images])
    return replace(data, captions=_of_images(data.captions, language, images), features=features)


def _mean(directions: Sequence[Direction]) -> Direction:
    first, fifth, tenth = (mean(values) for values in zip(*(direction.recalls for direction in directions), strict=True))
    median = mean(direction.median_rank for direction in directions)
    return Direction(first, fifth, tenth, median_rank=median, queries=sum(direction.queries for direction in directions))

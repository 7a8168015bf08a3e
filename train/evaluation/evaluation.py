"""How well a model retrieves: recall and median rank on a split, by language; within folds of its images, and during a training.

VSE++ (``evaluation.py``, ``evalrank``) and SCAN report COCO's "1K": the mean over five folds of 1,000 of its 5,000 test images with
their five captions. Their folds are cut in the order of the files of Karpathy's split, ours in the order of the image ids, the
only one that a dataset keeps. They are other thousands of the same images.

Letters: ``I`` images, ``D`` feature width, ``R`` features of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from schemas.errors import UsageError
from train.config.sections import Config
from train.data.batches import CaptionBatch
from train.data.captions import Captions
from train.data.features import ImageFeatures
from train.data.sampling import Batch, fixed_batches
from train.data.splits import SplitData
from train.devices import computing, upload
from train.evaluation.metrics import CUTOFFS, Direction, Ranks, Retrieval, Scores, chance_recall, ranks_of
from train.losses import Term, Views, named_losses, per_query
from train.models.retrieval_model import Encoded, ImageBatch, RetrievalModel

_BATCH = 512
_MOST_BYTES = 32 << 20

_COPIED_AT_ONCE = 1024

Count: TypeAlias = Callable[[int], object]
"""Takes the number of images or captions that were encoded since it was last called, for a display of progress."""


def count_nothing(done: int) -> None:
    """Take a number, and do nothing with it."""


@contextmanager
def evaluating(model: RetrievalModel) -> Iterator[torch.device]:
    """Put a model into evaluation mode without gradients inside the block, and yield its device.

    It computes in float32, whatever the precision of a training around it: in bfloat16 so many scores are equal that ranks would
    say little, and those of TF32 differ from the scores of a CPU by as much as scores that lie close differ from one another.
    """
    training, device = model.training, model.device
    model.eval()
    try:
        with torch.no_grad(), computing("fp32", device):
            yield device
    finally:
        model.train(training)


def encode_images(
    model: RetrievalModel, features: np.ndarray | ImageFeatures, *, batch_size: int = _BATCH, count: Count = count_nothing
) -> Encoded:
    """Encode images, a batch at a time, since their features may be mapped from a file.

    Features are ``[I, D]`` or ``[I, R, D]``. Batches are smaller where features take much memory; their size changes speed, not
    results. Images are returned in their order, on the model's device.
    """
    parts = []
    # Vectors of the usual widths are far from the bound; regions would take as much again in each layer of the model.
    batch_size = max(1, min(batch_size, _MOST_BYTES // (4 * math.prod(features.shape[1:]))))
    with evaluating(model) as device:
        for start in range(0, max(len(features), 1), batch_size):  # No images have a shape, too.
            rows = slice(start, start + batch_size)
            if isinstance(features, ImageFeatures):
                batch = ImageBatch.of(features, rows, device)
            else:
                batch = ImageBatch(upload(torch.from_numpy(np.array(features[rows], np.float32)), device))
            parts.append(model.encode_images(batch))
            count(len(batch))
    return Encoded.concatenate(parts)


def encode_captions(
    model: RetrievalModel, captions: CaptionBatch, language: str, *, batch_size: int = _BATCH, count: Count = count_nothing
) -> Encoded:
    """Encode captions in one language, however many they are.

    Captions of similar length go through the model together: a batch takes as many time steps as its longest caption has tokens.

    The size of a batch changes speed, not results. They are returned in their order, on the model's device.
    """
    by_length = np.argsort(captions.lengths, kind="stable")
    parts = []
    with evaluating(model) as device:
        for start in range(0, max(len(captions), 1), batch_size):
            batch = replace(captions, rows=captions.rows[by_length[start : start + batch_size]])
            parts.append(model.encode_captions(batch, language))
            count(len(batch))
        back = upload(torch.from_numpy(np.argsort(by_length, kind="stable")), device)
        return Encoded.concatenate(parts)[back]


def evaluate(model: RetrievalModel, data: SplitData, *, count: Count = count_nothing) -> dict[str, Retrieval]:
    """Measure recall and median rank for each language; arguments and result as those of `evaluate_together`, for one model."""
    return evaluate_together([(model, data)], count=count)


def evaluate_together(
    members: Sequence[tuple[RetrievalModel, SplitData]], *, count: Count = count_nothing
) -> dict[str, Retrieval]:
    """Measure recall and median rank of an ensemble, whose scores are the means of its members', for each language.

    The candidates of a language are its captions and the images that have any: an image without a caption in the language is
    neither query nor candidate, so that a language is scored as if there were no others.

    Args:
        members: models, each with the split to evaluate on: the same captions and images, with the features that it takes. The
            models are put back into their previous modes afterwards.
        count: counts captions and images.

    Returns:
        Retrieval by language, in the order of ``data.captions.language_names``; a language without captions is left out.
    """
    return {language: Retrieval.of(ranks) for language, ranks in ranks_together(members, count=count).items()}


def ranks_together(members: Sequence[tuple[RetrievalModel, SplitData]], *, count: Count = count_nothing) -> dict[str, Ranks]:
    """Rank the images and captions of each language; arguments as those of `evaluate_together`."""
    images = [encode_images(model, data.features, count=count) for model, data in members]

    def captions_of(number: int, language: str, rows: np.ndarray) -> Encoded:
        model, data = members[number]
        return encode_captions(model, data.captions.batch(rows), language, count=count)

    return _by_language([model for model, _ in members], members[0][1].captions, images, captions_of)


@dataclass(frozen=True)
class EncodedSplit:
    """A split as a model encodes it: images in the order of its features, captions in that of `Captions`."""

    images: Encoded
    captions: Encoded


def _encode_split(model: RetrievalModel, data: SplitData) -> EncodedSplit:
    """Encode all images and captions of a split."""
    captions = data.captions
    rows = [captions.rows_of(language) for language in captions.language_names]
    batches = [captions.batch(of_language) for of_language in rows]
    encoded = Encoded.concatenate(
        [encode_captions(model, *each) for each in zip(batches, captions.language_names, strict=True)]
    )
    back = upload(torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable")), model.device)
    return EncodedSplit(encode_images(model, data.features), encoded[back])


def _by_language(
    models: Sequence[RetrievalModel],
    captions: Captions,
    images: Sequence[Encoded],
    captions_of: Callable[[int, str, np.ndarray], Encoded],
) -> dict[str, Ranks]:
    """Rank for each language, with the mean of the models' scores.

    ``captions_of`` returns, from the number of a model, a language and rows of ``captions``, these captions as the model
    encodes them; ``images`` are as each model encodes them.
    """
    results = {}
    for language in captions.language_names:
        rows = captions.rows_of(language)
        if not len(rows):
            continue
        chosen, image_of_caption = np.unique(captions.images[rows], return_inverse=True)
        sources = [
            scores_between(
                model, encoded[upload(torch.from_numpy(chosen).long(), model.device)], captions_of(number, language, rows)
            )
            for number, (model, encoded) in enumerate(zip(models, images, strict=True))
        ]
        owners = torch.from_numpy(image_of_caption).long()
        results[language] = ranks_of(mean_scores(sources), len(chosen), owners, device=models[0].device)
    return results


def scores_between(model: RetrievalModel, first: Encoded, second: Encoded) -> Scores:
    """Return the scores of a model as a source for `train.evaluation.ranks_of`."""

    def scores(rows: slice, columns: Tensor) -> Tensor:
        with evaluating(model):
            if second.values.dim() == 2:
                return model.scores(first[rows], second[columns])
            # Words and regions take many times the memory of vectors: a part of them is copied at a time.
            return torch.cat([model.scores(first[rows], second[part]) for part in columns.split(_COPIED_AT_ONCE)], dim=1)

    return scores


def mean_scores(sources: Sequence[Scores]) -> Scores:
    """Return the mean of sources of scores as a source."""

    def scores(rows: slice, columns: Tensor) -> Tensor:
        total = sources[0](rows, columns)
        for source in sources[1:]:
            total = total + source(rows, columns)
        return total / len(sources) if len(sources) > 1 else total

    return scores


def chance(captions: Captions, language: str) -> dict[str, tuple[float, ...]]:
    """Return the recalls, in percent, of a random order, by direction; `evaluate` says what the candidates are."""
    counts = np.unique(captions.images[captions.rows_of(language)], return_counts=True)[1]
    total = int(counts.sum())
    return {
        "image_to_text": tuple(float(np.mean([chance_recall(k, int(n), total) for n in counts])) for k in CUTOFFS),
        "text_to_image": tuple(chance_recall(k, 1, len(counts)) for k in CUTOFFS),
    }


@dataclass(frozen=True)
class Validation:
    """A measurement on the validation split.

    Attributes:
        loss: the objective, per query; None if it was not measured.
        terms: the losses that it is the weighted sum of, by name, per query.
    """

    retrieval: Mapping[str, Retrieval]
    loss: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)


def validate(model: RetrievalModel, data: SplitData, config: Config, terms: Sequence[Term]) -> Validation:
    """Measure a model on the validation split, in float32 and without changing it.

    The losses are those of `train.data.sampling`, with the hinges of the configuration also while ``loss.sum_warmup_steps``
    trains on others, so that the values of a run can be compared.
    """
    encoded = _encode_split(model, data)
    ranks = _by_language(
        [model],
        data.captions,
        [encoded.images],
        lambda number, language, rows: encoded.captions[upload(torch.from_numpy(rows), model.device)],
    )
    retrieval = {language: Retrieval.of(of_language) for language, of_language in ranks.items()}
    batches = fixed_batches(data.captions, config.schedule, config.loss)
    if not batches:
        return Validation(retrieval)
    with evaluating(model) as device:
        losses = [(batch, *named_losses(terms, _views(encoded, batch, device), config.loss.hinges)) for batch in batches]
        return Validation(retrieval, *per_query(losses))


def _views(encoded: EncodedSplit, batch: Batch, device: torch.device) -> Views:
    numbers = upload(torch.from_numpy(batch.images).long(), device)
    captions = (encoded.captions[upload(torch.from_numpy(rows).long(), device)] for rows in batch.captions)
    images = None if batch.task == "c2c" else encoded.images[numbers]
    return Views(numbers, images, tuple(zip(batch.languages, captions, strict=True)))


def evaluate_folds(
    members: Sequence[tuple[RetrievalModel, SplitData]], folds: int, *, count: Count = count_nothing
) -> dict[str, Retrieval]:
    """Measure recall and median rank within each fold of the images, and return the means over the folds, for each language.

    A language's images are cut in the order of their ids; if their number cannot be divided, the first folds have one more.

    One fold ranks all images together.

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


def _cut(data: SplitData, language: str, images: np.ndarray) -> SplitData:
    """Return the captions of some images in a language, with the features of these images alone."""
    features = replace(data.features, rows=data.features.rows[images])
    return replace(data, captions=_of_images(data.captions, language, images), features=features)


def _mean(directions: Sequence[Direction]) -> Direction:
    first, fifth, tenth = (mean(values) for values in zip(*(direction.recalls for direction in directions), strict=True))
    median = mean(direction.median_rank for direction in directions)
    return Direction(first, fifth, tenth, median_rank=median, queries=sum(direction.queries for direction in directions))

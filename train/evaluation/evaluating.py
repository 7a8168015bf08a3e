"""How well a model retrieves: recall and median rank on a split, by language.

Letters: ``I`` images, ``D`` feature width, ``R`` features of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from train.data.batches import CaptionBatch
from train.data.captions import Captions
from train.data.features import ImageFeatures
from train.data.splits import TrainingData
from train.devices import computing, upload
from train.evaluation.metrics import CUTOFFS, Retrieval, Scores, chance_recall, retrieval
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

    Args:
        model: the model.
        features: ``[I, D]``, or ``[I, R, D]``.
        batch_size: images that the model takes at once, fewer where their features take much memory; changes speed, not results.
        count: counts the images.

    Returns:
        The images, in their order, on the model's device.
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

    Args:
        model: the model.
        captions: the captions.
        language: their language.
        batch_size: captions that the model takes at once; changes speed, not results.
        count: counts the captions.

    Returns:
        The captions, in their order, on the model's device.
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


def evaluate(
    model: RetrievalModel, data: TrainingData, *, batch_size: int = _BATCH, count: Count = count_nothing
) -> dict[str, Retrieval]:
    """Measure recall and median rank for each language; arguments and result as those of `evaluate_together`, for one model."""
    return evaluate_together([(model, data)], batch_size=batch_size, count=count)


def evaluate_together(
    members: Sequence[tuple[RetrievalModel, TrainingData]], *, batch_size: int = _BATCH, count: Count = count_nothing
) -> dict[str, Retrieval]:
    """Measure recall and median rank of an ensemble, whose scores are the means of its members', for each language.

    The candidates of a language are its captions and the images that have any: an image without a caption in the language is
    neither query nor candidate, so that a language is scored as if there were no others.

    Args:
        members: models, each with the split to evaluate on: the same captions and images, with the features that it takes. The
            models are put back into their previous modes afterwards.
        batch_size: captions or images that a model takes at once; changes speed, not results.
        count: counts captions and images.

    Returns:
        Retrieval by language, in the order of ``data.captions.language_names``; a language without captions is left out.
    """
    images = [encode_images(model, data.features, batch_size=batch_size, count=count) for model, data in members]

    def captions_of(number: int, language: str, rows: np.ndarray) -> Encoded:
        model, data = members[number]
        batch = data.captions.batch(rows)
        return encode_captions(model, batch, language, batch_size=batch_size, count=count)

    return _by_language([model for model, _ in members], members[0][1].captions, images, captions_of)


@dataclass(frozen=True)
class EncodedSplit:
    """A split as a model encodes it.

    Attributes:
        images: the images, in the order of the features.
        captions: the captions, in the order of `Captions`.
    """

    images: Encoded
    captions: Encoded


def encode_split(
    model: RetrievalModel, data: TrainingData, *, batch_size: int = _BATCH, count: Count = count_nothing
) -> EncodedSplit:
    """Encode all images and captions of a split; arguments as those of `evaluate`."""
    captions = data.captions
    rows = [captions.rows_of(language) for language in captions.language_names]
    batches = [captions.batch(of_language) for of_language in rows]
    encoded = Encoded.concatenate(
        [
            encode_captions(model, batch, language, batch_size=batch_size, count=count)
            for batch, language in zip(batches, captions.language_names, strict=True)
        ]
    )
    back = upload(torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable")), model.device)
    return EncodedSplit(encode_images(model, data.features, batch_size=batch_size, count=count), encoded[back])


def evaluate_encoded(model: RetrievalModel, data: TrainingData, encoded: EncodedSplit) -> dict[str, Retrieval]:
    """Measure a split that is encoded already; returns what `evaluate` does."""
    return _by_language(
        [model],
        data.captions,
        [encoded.images],
        lambda number, language, rows: encoded.captions[upload(torch.from_numpy(rows), model.device)],
    )


def _by_language(
    models: Sequence[RetrievalModel],
    captions: Captions,
    images: Sequence[Encoded],
    captions_of: Callable[[int, str, np.ndarray], Encoded],
) -> dict[str, Retrieval]:
    """Measure retrieval for each language, with the mean of the models' scores.

    Args:
        models: the models.
        captions: captions of the split.
        images: the images, as each model encodes them.
        captions_of: from the number of a model, a language and rows of ``captions`` to these captions as the model encodes them.
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
        results[language] = retrieval(mean_scores(sources), len(chosen), owners, device=models[0].device)
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


def sum_of_recalls(results: Mapping[str, Retrieval]) -> float:
    """Add up the recalls of all languages in both directions: early stopping maximises this (Kádár et al. 2018, section 4)."""
    return sum(result.sum_of_recalls for result in results.values())


def chance(captions: Captions, language: str) -> dict[str, tuple[float, ...]]:
    """Return the recalls, in percent, of a random order, by direction; `evaluate` says what the candidates are."""
    counts = np.unique(captions.images[captions.rows_of(language)], return_counts=True)[1]
    total = int(counts.sum())
    return {
        "image_to_text": tuple(float(np.mean([chance_recall(k, int(n), total) for n in counts])) for k in CUTOFFS),
        "text_to_image": tuple(chance_recall(k, 1, len(counts)) for k in CUTOFFS),
    }

"""Retrieval metrics of models on a split, by language: recall and median rank.

VSE++ (``evaluation.py``, ``evalrank``) and SCAN report COCO's "1K": the mean over five folds of 1,000 of its 5,000 test images with
their five captions. Their folds follow the order of files in Karpathy's split. Ours follow the image ids, the only order that a
dataset keeps, so that they hold other thousands of the same images.

Letters: ``I`` images, ``D`` feature width, ``R`` features of an image.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from schemas.errors import UsageError
from schemas.process.devices import upload
from train.chance import Chance, chance_measures
from train.config.sections import Config
from train.data.batches import CaptionBatch
from train.data.captions import Captions
from train.data.features import ImageFeatures
from train.data.sampling import Batch, fixed_batches
from train.data.splits import SplitData
from train.devices import computing
from train.evaluation.metrics import Ranks, RetrievalMetrics, Scores, bidirectional_ranks
from train.evaluation.ranks import rank_table
from train.evaluation.relevance import RelevanceCollector, RightItems
from train.losses import LossSums, Term, Views, named_losses
from train.models.retrieval_model import Encoded, ImageBatch, RetrievalModel

_BATCH = 512
_MAX_BATCH_BYTES = 32 << 20

_COLUMNS_AT_ONCE = 1024

Count: TypeAlias = Callable[[int], object]
"""Progress callback: takes the number of images or captions encoded since its last call."""

Members: TypeAlias = Sequence[tuple[RetrievalModel, SplitData]]
"""Models of an ensemble, each with the split to evaluate on: the same captions and images, with the features that it takes."""


def no_progress(done: int) -> None:
    """Ignore progress."""


@contextmanager
def eval_mode(model: RetrievalModel) -> Iterator[torch.device]:
    """Run a block in evaluation mode without gradients; yield the model's device.

    The block computes in float32, also during a training in bfloat16 or TF32. Bfloat16 rounds too many scores
    to equal values for ranks. TF32 differs from a CPU by as much as close scores differ.
    """
    training, device = model.training, model.device
    model.eval()
    try:
        with torch.no_grad(), computing("fp32", device):
            yield device
    finally:
        model.train(training)


def embed_images(model: RetrievalModel, features: ImageFeatures, *, on_progress: Count = no_progress) -> Encoded:
    """Encode images in batches, since their features may be memory-mapped.

    Features are ``[I, D]`` or ``[I, R, D]``. Batches shrink where features take much memory; their size
    affects speed, not results. The result keeps the order of the images and is on the model's device.
    """
    parts = []
    # Vectors of the usual widths are far from the bound; regions take as much again in each layer of the model.
    batch_size = max(1, min(_BATCH, _MAX_BATCH_BYTES // (4 * math.prod(features.shape[1:]))))
    with eval_mode(model) as device:
        for start in range(0, max(len(features), 1), batch_size):  # No images have a shape, too.
            batch = ImageBatch.of(features, slice(start, start + batch_size), device)
            parts.append(model.encode_images(batch))
            on_progress(len(batch))
    return Encoded.concatenate(parts)


def embed_captions(
    model: RetrievalModel, captions: CaptionBatch, language: str, *, on_progress: Count = no_progress
) -> Encoded:
    """Encode captions in one language, bucketed by length.

    The result keeps the order of the captions and is on the model's device.
    """
    by_length = np.argsort(captions.lengths, kind="stable")
    parts = []
    with eval_mode(model):
        for start in range(0, max(len(captions), 1), _BATCH):
            batch = replace(captions, rows=captions.rows[by_length[start : start + _BATCH]])
            parts.append(model.encode_captions(batch, language))
            on_progress(len(batch))
        return take_rows(Encoded.concatenate(parts), np.argsort(by_length, kind="stable"))


def take_rows(encoded: Encoded, rows: np.ndarray) -> Encoded:
    """Return rows of encoded items, in the order of their indices."""
    return encoded[upload(torch.from_numpy(rows).long(), encoded.values.device)]


def rank_language(
    models: Sequence[RetrievalModel],
    captions: Captions,
    language: str,
    images: Sequence[Encoded],
    texts: Sequence[Encoded],
    definitions: Mapping[str, RightItems] = {},
) -> Ranks:
    """Rank images and captions in a language by the mean scores of models.

    The candidates are the captions in the language and the images that have any: other images are neither query nor candidate. A
    language is thus scored as if it were the only one. ``images`` and the captions ``texts`` in the language are encoded by each
    model. Relevance is measured by each of the ``definitions`` of correct items.
    """
    rows = captions.rows_of(language)
    candidates, image_of_caption = np.unique(captions.images[rows], return_inverse=True)
    sides = zip(models, images, texts, strict=True)
    scores = mean_scores([scores_between(model, take_rows(encoded, candidates), text) for model, encoded, text in sides])
    defined = ((name, right_items(captions, rows, candidates)) for name, right_items in definitions.items())
    pairs = {name: both for name, both in defined if both is not None}
    device = models[0].device
    if pairs:
        scores = collector = RelevanceCollector(scores, pairs, (len(candidates), len(rows)), device)
    images_of_both = np.arange(len(candidates)), image_of_caption
    ranks, best_wrong = bidirectional_ranks(scores, *map(torch.from_numpy, images_of_both), device=device)
    return Ranks(*ranks, best_wrong, collector.summarize() if pairs else {})


def scores_between(model: RetrievalModel, first: Encoded, second: Encoded) -> Scores:
    """Return the scores of a model as a source for `bidirectional_ranks`."""

    def scores(rows: slice, columns: Tensor) -> Tensor:
        with eval_mode(model):
            if second.values.dim() == 2:
                return model.scores(first[rows], second[columns])
            # Words and regions take many times the memory of vectors: copy a part of them at a time.
            return torch.cat([model.scores(first[rows], second[part]) for part in columns.split(_COLUMNS_AT_ONCE)], dim=1)

    return scores


def mean_scores(sources: Sequence[Scores]) -> Scores:
    """Return the mean of sources of scores as a source."""

    def scores(rows: slice, columns: Tensor) -> Tensor:
        total = sources[0](rows, columns)
        for source in sources[1:]:
            total = total + source(rows, columns)
        return total / len(sources) if len(sources) > 1 else total

    return scores


def chance(captions: Captions, language: str) -> Chance:
    """Return recalls in percent and median rank of a random order."""
    counts = np.unique(captions.images[captions.rows_of(language)], return_counts=True)[1].tolist()
    return Chance(chance_measures(counts, sum(counts)), chance_measures([1], len(counts)), images=len(counts))


@dataclass(frozen=True)
class Validation:
    """Metrics and losses on the validation split.

    Attributes:
        retrieval: retrieval metrics by language.
        loss: the objective, per query; None if it was not measured.
        terms: losses by name, per query; the objective is their weighted sum.
        ranks: ranks of the queries, see `train.evaluation.ranks`; None to write none.
    """

    retrieval: Mapping[str, RetrievalMetrics]
    loss: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    ranks: pa.Table | None = None


def measure_validation(model: RetrievalModel, data: SplitData, config: Config, terms: Sequence[Term]) -> Validation:
    """Measure a model on the validation split, in float32 and without changing it.

    Losses are those of `train.data.sampling` with the configured hinges, also during
    ``loss.sum_warmup_steps``, so that values of a run can be compared.
    """
    rows = {language: data.captions.rows_of(language) for language in data.captions.language_names}
    parts = [embed_captions(model, data.captions.batch(indices), language) for language, indices in rows.items()]
    captions = take_rows(Encoded.concatenate(parts), np.argsort(np.concatenate(list(rows.values())), kind="stable"))
    images = embed_images(model, data.features)
    ranks = {
        language: rank_language([model], data.captions, language, [images], [take_rows(captions, indices)])
        for language, indices in rows.items()
        if len(indices)
    }
    tables = [rank_table(data.captions, language, language_ranks) for language, language_ranks in ranks.items()]
    retrieval = {language: RetrievalMetrics.of(language_ranks) for language, language_ranks in ranks.items()}
    batches = fixed_batches(data.captions, config.schedule, config.loss)
    if not batches:
        return Validation(retrieval, ranks=pa.concat_tables(tables))
    with eval_mode(model) as device:
        losses = [
            (batch, *named_losses(terms, _views(images, captions, batch, device), config.loss.hinges)) for batch in batches
        ]
        return Validation(retrieval, *LossSums().add(losses).per_query(), pa.concat_tables(tables))


def _views(images: Encoded, captions: Encoded, batch: Batch, device: torch.device) -> Views:
    indices = upload(torch.from_numpy(batch.images).long(), device)
    views = (take_rows(captions, rows) for rows in batch.captions)
    return Views(indices, None if batch.task == "c2c" else images[indices], tuple(zip(batch.languages, views, strict=True)))


def rank_folds(
    members: Members,
    language: str,
    folds: int,
    *,
    on_progress: Count = no_progress,
    definitions: Mapping[str, RightItems] = {},
) -> list[tuple[Captions, Ranks]]:
    """Return captions and ranks of each fold of a language's images.

    Images are cut in the order of their ids; the first folds may have one more. The models return to their previous modes.

    Raises:
        UsageError: the language has fewer images than folds.
    """
    captions, models, results = members[0][1].captions, [model for model, _ in members], []
    rows = captions.rows_of(language)
    candidates = np.unique(captions.images[rows])
    if len(candidates) < folds:
        raise UsageError(
            f"--folds is {folds}, but split {captions.split!r} has only {len(candidates)} images with "
            f"captions in {language!r}: give a smaller number"
        )
    for fold in np.array_split(candidates, folds):
        selected = captions.select(rows[np.isin(captions.images[rows], fold)]).compact()
        batch = selected.batch(np.arange(len(selected)))
        features = [replace(data.features, rows=data.features.rows[fold]) for _, data in members]
        images = [embed_images(*pair, on_progress=on_progress) for pair in zip(models, features, strict=True)]
        texts = [embed_captions(model, batch, language, on_progress=on_progress) for model in models]
        results.append((selected, rank_language(models, selected, language, images, texts, definitions)))
    return results

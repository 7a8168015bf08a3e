"""How well a model retrieves: embeddings of a split, and recall and median rank by language.

Letters: ``I`` images, ``N`` captions, ``C`` captions of one language, ``E`` embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from train.data.captions import Captions
from train.data.packing import pack
from train.data.splits import TrainingData
from train.evaluation.metrics import CUTOFFS, Retrieval, chance_recall, retrieval
from train.models.joint_embedding import JointEmbedding

__all__ = [
    "Count",
    "Embeddings",
    "chance",
    "count_nothing",
    "embed_all",
    "embed_captions",
    "embed_images",
    "evaluate",
    "sum_of_recalls",
]

_BATCH = 512

Count: TypeAlias = Callable[[int], object]
"""Takes the number of vectors that were made since it was last called, for a display of progress."""


def count_nothing(done: int) -> None:
    """Take a number of vectors, and do nothing with it."""


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of all images and captions of a split, on the model's device.

    Attributes:
        images: ``[I, E]``, in the order of ``Captions.image_ids``.
        captions: ``[C, E]`` for each language.
        rows: ``[C]`` for each language, the rows of ``Captions`` that ``captions`` embeds, ascending.
    """

    images: Tensor
    captions: Mapping[str, Tensor]
    rows: Mapping[str, np.ndarray]


@contextmanager
def _evaluating(model: JointEmbedding) -> Iterator[torch.device]:
    """Put a model into evaluation mode without gradients inside the block, and yield its device.

    Mixed precision is off: in bfloat16 so many scores are equal that ranks would say little.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield device
    finally:
        model.train(training)


def embed_images(
    model: JointEmbedding, features: np.ndarray, *, batch_size: int = _BATCH, count: Count = count_nothing
) -> Tensor:
    """Embed image features ``[I, D]`` as ``[I, E]``, a batch at a time, since they may be mapped from a file."""
    parts: list[Tensor] = []
    with _evaluating(model) as device:
        for start in range(0, len(features), batch_size):
            batch = np.array(features[start : start + batch_size], np.float32)
            parts.append(model.embed_images(torch.from_numpy(batch).to(device)))
            count(len(batch))
    return torch.cat(parts) if parts else torch.zeros(0, model.config.embedding, device=device)


def embed_captions(
    model: JointEmbedding,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    language: str,
    *,
    batch_size: int = _BATCH,
    count: Count = count_nothing,
) -> Tensor:
    """Embed captions in one language.

    Captions of similar length go through the model together: a batch takes as many time steps as its longest caption has tokens.

    Args:
        model: the model.
        token_ids: as in ``Captions``.
        offsets: as in ``Captions``.
        rows: ``[C]``, the captions to embed.
        language: their language.
        batch_size: captions that the model takes at once; changes speed, not results.
        count: counts the captions.

    Returns:
        Embeddings ``[C, E]``, in the order of ``rows``.
    """
    by_length = np.argsort(np.diff(offsets)[rows], kind="stable")
    with _evaluating(model) as device:
        embeddings = torch.zeros(len(rows), model.config.embedding, device=device)
        for start in range(0, len(rows), batch_size):
            chosen = by_length[start : start + batch_size]
            packed = pack(token_ids, offsets, rows[chosen]).to(device)
            embeddings[torch.from_numpy(chosen).to(device)] = model.embed_captions(packed, language).float()
            count(len(chosen))
    return embeddings


def embed_all(
    model: JointEmbedding, data: TrainingData, *, batch_size: int = _BATCH, count: Count = count_nothing
) -> Embeddings:
    """Embed all images and captions, the captions by language."""
    captions = data.captions
    rows_of_languages = {language: captions.rows_of(language) for language in captions.language_names}
    rows_of_languages = {language: rows for language, rows in rows_of_languages.items() if len(rows)}
    return Embeddings(
        images=embed_images(model, data.features.array, batch_size=batch_size, count=count).float(),
        captions={
            language: embed_captions(
                model, captions.token_ids, captions.offsets, rows, language, batch_size=batch_size, count=count
            )
            for language, rows in rows_of_languages.items()
        },
        rows=rows_of_languages,
    )


def evaluate(
    model: JointEmbedding, data: TrainingData, *, batch_size: int = _BATCH, count: Count = count_nothing
) -> dict[str, Retrieval]:
    """Measure recall and median rank for each language.

    The candidates of a language are its captions and the images that have any: an image without a caption in the language is
    neither query nor candidate, so that a language is scored as if there were no others.

    Args:
        model: the model; it is put back into its previous mode afterwards.
        data: the split to evaluate on.
        batch_size: captions or images that the model takes at once; changes speed, not results.
        count: counts captions and images.

    Returns:
        Retrieval by language, in the order of ``data.captions.language_names``; a language without captions is left out.
    """
    embeddings = embed_all(model, data, batch_size=batch_size, count=count)
    with _evaluating(model) as device:
        results = {}
        for language, rows in embeddings.rows.items():
            images, image_of_caption = np.unique(data.captions.images[rows], return_inverse=True)
            results[language] = retrieval(
                model.similarity,
                embeddings.images[torch.from_numpy(images).long().to(device)],
                embeddings.captions[language],
                torch.from_numpy(image_of_caption).long().to(device),
            )
    return results


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

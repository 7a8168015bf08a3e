"""What a model retrieves: embeddings of a split, and recall and median rank by language.

Letters: ``I`` images, ``N`` captions, ``C`` captions of one language, ``E`` embedding width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from train.data.captions import Captions
from train.data.packing import pack
from train.data.splits import TrainingData
from train.evaluation.metrics import CUTOFFS, Retrieval, chance_recall, retrieval
from train.models.joint_embedding import JointEmbedding

__all__ = ["Embeddings", "chance", "embed_all", "embed_captions", "embed_images", "evaluate", "sum_of_recalls"]

_BATCH = 512


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of everything in a split, on the model's device.

    Attributes:
        images: ``[I, E]``, in the order of ``Captions.image_ids``.
        captions: by language ``[C, E]``.
        rows: by language ``[C]``: rows of ``Captions``, ascending, that ``captions`` are of.
    """

    images: Tensor
    captions: Mapping[str, Tensor]
    rows: Mapping[str, np.ndarray]


@contextmanager
def _evaluating(model: JointEmbedding) -> Iterator[torch.device]:
    """Evaluation mode and no gradients for a while; gives the model's device.

    Mixed precision is off: scores in bfloat16 are equal so often that ranks would say little.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield device
    finally:
        model.train(training)


def embed_images(model: JointEmbedding, features: np.ndarray, *, batch_size: int = _BATCH) -> Tensor:
    """Embeddings ``[I, E]`` of image features ``[I, D]``, a batch at a time: they may be mapped from a file."""
    with _evaluating(model) as device:
        parts = [
            model.embed_images(torch.from_numpy(np.array(features[start : start + batch_size], np.float32)).to(device))
            for start in range(0, len(features), batch_size)
        ]
    return torch.cat(parts) if parts else torch.zeros(0, model.config.embedding, device=device)


def embed_captions(
    model: JointEmbedding,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    language: str,
    *,
    batch_size: int = _BATCH,
) -> Tensor:
    """Embeddings ``[C, E]`` of some captions of one language, in the order of ``rows`` ``[C]``.

    Captions of like length go through the model together: a batch takes as many time steps as its longest caption has tokens.
    ``token_ids`` and ``offsets`` are as in ``Captions``.
    """
    by_length = np.argsort(np.diff(offsets)[rows], kind="stable")
    with _evaluating(model) as device:
        embeddings = torch.zeros(len(rows), model.config.embedding, device=device)
        for start in range(0, len(rows), batch_size):
            chosen = by_length[start : start + batch_size]
            packed = pack(token_ids, offsets, rows[chosen]).to(device)
            embeddings[torch.from_numpy(chosen).to(device)] = model.embed_captions(packed, language).float()
    return embeddings


def embed_all(model: JointEmbedding, data: TrainingData, *, batch_size: int = _BATCH) -> Embeddings:
    """Embeddings of all images and captions of the data, by language."""
    captions = data.captions
    rows = {language: captions.rows_of(language) for language in captions.language_names}
    rows = {language: found for language, found in rows.items() if len(found)}
    return Embeddings(
        images=embed_images(model, data.features.array, batch_size=batch_size).float(),
        captions={
            language: embed_captions(model, captions.token_ids, captions.offsets, found, language, batch_size=batch_size)
            for language, found in rows.items()
        },
        rows=rows,
    )


def evaluate(model: JointEmbedding, data: TrainingData, *, batch_size: int = _BATCH) -> dict[str, Retrieval]:
    """Recall and median rank of each language of the data.

    The candidates of a language are its captions and the images that have any: an image without a caption of the language is
    neither query nor candidate, so that a language is scored as if the others were not there.

    Args:
        model: the model; its mode is as before afterwards.
        data: the split that is evaluated on.
        batch_size: captions or images that the model takes at once; changes speed, not results.

    Returns:
        Retrieval by language, in the order of ``data.captions.language_names``; a language without captions is left out.
    """
    embeddings = embed_all(model, data, batch_size=batch_size)
    with _evaluating(model) as device:
        found = {}
        for language, rows in embeddings.rows.items():
            images, image_of_caption = np.unique(data.captions.images[rows], return_inverse=True)
            found[language] = retrieval(
                model.similarity,
                embeddings.images[torch.from_numpy(images).long().to(device)],
                embeddings.captions[language],
                torch.from_numpy(image_of_caption).long().to(device),
            )
    return found


def sum_of_recalls(results: Mapping[str, Retrieval]) -> float:
    """Recalls of all languages and both directions added up: what early stopping maximises (Kádár et al. 2018, section 4)."""
    return sum(result.sum_of_recalls for result in results.values())


def chance(captions: Captions, language: str) -> dict[str, tuple[float, ...]]:
    """Recalls, percent, that a random order reaches on these captions, by direction; see ``evaluate`` for the candidates."""
    counts = np.unique(captions.images[captions.rows_of(language)], return_counts=True)[1]
    total = int(counts.sum())
    return {
        "image_to_text": tuple(float(np.mean([chance_recall(k, int(n), total) for n in counts])) for k in CUTOFFS),
        "text_to_image": tuple(chance_recall(k, 1, len(counts)) for k in CUTOFFS),
    }

"""Searching images with a sentence in any language of a model.

Letters: ``I`` images, ``E`` embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.parameters import FeaturesParameters
from schemas.vocabulary import UNK
from train.evaluation.embedding import embed_shard, weights_digest
from train.evaluation.evaluate import embed_captions
from train.evaluation.matching import check_features
from train.runs.run import Run

__all__ = ["Gallery", "Hit", "embedded_gallery", "gallery_of", "search"]


@dataclass(frozen=True)
class Gallery:
    """Images that are searched.

    Attributes:
        image_ids: ids of the images.
        embeddings: ``[I, E]``, on the model's device.
    """

    image_ids: Sequence[str]
    embeddings: Tensor


@dataclass(frozen=True)
class Hit:
    """An image that was found.

    Attributes:
        image_id: its id.
        score: similarity with the query; larger is nearer.
    """

    image_id: str
    score: float


def gallery_of(run: Run, features: str) -> Gallery:
    """Embeds all images of a features dataset.

    Raises:
        DatasetError: it holds no features, or others than the run was trained on.
    """
    dataset = open_dataset(features, kind="features")
    check_features(run, dataset)
    shards = [embed_shard(run, dataset, number) for number in range(dataset.num_shards)]
    return Gallery([image_id for ids, _ in shards for image_id in ids], torch.cat([embeddings for _, embeddings in shards]))


def embedded_gallery(run: Run, folder: str) -> Gallery:
    """Reads images that ``imagepivot embed`` embedded.

    Args:
        run: the run that searches.
        folder: what was written: the folder of ``images`` and ``captions``, or that of the images.

    Raises:
        DatasetError: it holds no embeddings, or another model's.
    """
    try:
        dataset = open_dataset(f"{folder.rstrip('/')}/images", kind="features")
    except DatasetError:
        dataset = open_dataset(folder, kind="features")
    model = FeaturesParameters.from_json(dataset.manifest.parameters).model
    if model is None or model.weights_sha256 != weights_digest(run.model):
        raise DatasetError(
            f"{folder!r} does not hold images as this run embeds them: they are another model's, or features that no model has "
            "seen. Embed them again with imagepivot embed, or give --features"
        )
    device = next(run.model.parameters()).device
    return Gallery(dataset.image_ids(), torch.from_numpy(dataset.numpy().astype(np.float32, copy=False)).to(device))


def search(run: Run, tokens: Sequence[str], language: str, gallery: Gallery, *, top: int = 10) -> list[Hit]:
    """The best images for a sentence, best first; images of the same score in the order of the gallery.

    Args:
        run: a trained model.
        tokens: of the sentence, made as those of the run's captions were. Unknown ones are read as ``<unk>``.
        language: its language.
        gallery: what to search.
        top: most images that are given.

    Raises:
        UsageError: the model does not know the language, or none of the tokens.
    """
    known = run.model.config.languages
    if language not in known:
        raise UsageError(f"--language is {language!r}, this run knows {', '.join(known)}")
    if top < 1:
        raise UsageError(f"--top is {top}, expected 1 or more")
    ids = run.vocabulary.encode(tokens)
    if all(token == UNK for token in ids[1:-1]):
        shown = " ".join(tokens)
        raise UsageError(
            f"the model knows no word of {shown!r}: its vocabulary has none of them, so every image would do as well"
        )
    flat, offsets = np.array(ids, np.int32), np.array([0, len(ids)], np.int64)
    query = embed_captions(run.model, flat, offsets, np.zeros(1, np.int64), language)
    with torch.no_grad():
        scores = run.model.similarity(gallery.embeddings, query)[:, 0]
    best = torch.argsort(scores, descending=True, stable=True)[:top].tolist()
    return [Hit(gallery.image_ids[row], float(scores[row])) for row in best]

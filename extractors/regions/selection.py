"""The choice of regions among the proposals of an image, and their columns in a dataset.

The rule is that of ``tools/generate_tsv.py`` in github.com/peteanderson80/bottom-up-attention: a box is ranked by its best class
among those in which no better box covers it. The boxes are the proposals themselves; the boxes that the detector refines for each
class are not used.

Letters in shapes: ``P`` proposals, ``R`` regions kept, ``D`` values of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from extractors.regions.suppression import best_surviving_scores
from extractors.settings import RegionOptions
from schemas.features import FeatureSpec

__all__ = ["SUPPRESSION", "Detections", "columns", "select"]

SUPPRESSION = 0.3
"""Overlap from which a box covers another box of its class."""


@dataclass(frozen=True)
class Detections:
    """All proposals of one image, the most likely object first.

    Attributes:
        width: width of the original image in pixels.
        height: height of the original image in pixels.
        boxes: float32 ``[P, 4]``, x1 y1 x2 y2 in pixels of the original image.
        features: float32 ``[P, D]``.
        classes: float32 ``[P, 1 + classes]``, probabilities; the background is first.
        attributes: float32 ``[P, 1 + attributes]``, probabilities; "none" is first.
    """

    width: int
    height: int
    boxes: Tensor
    features: Tensor
    classes: Tensor
    attributes: Tensor


def select(boxes: Tensor, classes: Tensor, options: RegionOptions) -> Tensor:
    """Choose the regions of an image.

    Args:
        boxes: float32 ``[P, 4]``, in pixels of the original image.
        classes: float32 ``[P, 1 + classes]``, probabilities; the background is first.
        options: limits of the number of regions, and the threshold of the score.

    Returns:
        int64 ``[R]``, positions of the regions. If the number of those that reach the threshold is within the limits, they are in
        the order of the proposals; otherwise the best score comes first, and of equal scores the earlier proposal. R is less than
        ``min_regions`` only if P is.
    """
    scores = best_surviving_scores(boxes, classes[:, 1:], SUPPRESSION)
    chosen = (scores >= options.score_threshold).nonzero().flatten()
    if options.min_regions <= len(chosen) <= options.max_regions:
        return chosen
    limit = options.min_regions if len(chosen) < options.min_regions else options.max_regions
    return scores.sort(descending=True, stable=True).indices[:limit]


def columns(images: Sequence[Detections], options: RegionOptions, spec: FeatureSpec) -> dict[str, np.ndarray]:
    """Choose the regions of images, and return them by the names of the columns of a shard.

    The class of a region is its most probable class other than background, and its score that probability: not always the class
    by which the region was chosen. The attribute is found in the same way, among those other than "none"; with weights that have
    no attributes all of them have the probability 0, and the attribute is "none".

    A proposal that is not finite, as after an overflow in 16 bits, spoils its image: nobody knows whether it would have been
    chosen. The features of such an image are no numbers, as many as its proposals have that are not finite, and not stored.

    Args:
        images: proposals of B images.
        options: as `select` takes them.
        spec: shape ``(max_regions, D)``, and the type of the features.

    Returns:
        Arrays whose first axis is B. Rows after the first ``num_regions`` are zero.
    """
    count, (most, width) = len(images), spec.shape
    arrays: dict[str, np.ndarray] = {
        "width": np.array([image.width for image in images], dtype=np.int32),
        "height": np.array([image.height for image in images], dtype=np.int32),
        "num_regions": np.zeros(count, dtype=np.int16),
        "boxes": np.zeros((count, most, 4), dtype=np.float32),
        "features": np.zeros((count, most, width), dtype=spec.dtype),
        "class_ids": np.zeros((count, most), dtype=np.int16),
        "class_scores": np.zeros((count, most), dtype=np.float32),
        "attribute_ids": np.zeros((count, most), dtype=np.int16),
        "attribute_scores": np.zeros((count, most), dtype=np.float32),
    }
    for i, image in enumerate(images):
        rows = select(image.boxes, image.classes, options)
        arrays["num_regions"][i] = len(rows)
        _fill(arrays, i, "boxes", image.boxes[rows])
        arrays["features"][i, : len(rows)] = spec.rounded(image.features[rows].cpu().numpy())
        for name, probabilities in (("class", image.classes), ("attribute", image.attributes)):
            score, label = probabilities[rows, 1:].max(dim=1)
            _fill(arrays, i, f"{name}_ids", torch.where(score > 0, label + 1, 0))
            _fill(arrays, i, f"{name}_scores", score)
    if images:  # One answer for all images: the device is waited for.
        bad = torch.stack([(~image.features.isfinite()).sum() for image in images]).tolist()
        for features, number in zip(arrays["features"], bad, strict=True):
            if number:
                features.fill(0)
                features.reshape(-1)[:number] = np.nan
    return arrays


def _fill(arrays: dict[str, np.ndarray], image: int, column: str, values: Tensor) -> None:
    arrays[column][image, : len(values)] = values.cpu().numpy()

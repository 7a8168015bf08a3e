"""The choice of regions among the proposals of images, and their columns in a dataset.

The rule is that of ``tools/generate_tsv.py`` in github.com/peteanderson80/bottom-up-attention: a box is ranked by its best class
among those in which no better box covers it. The boxes are the proposals themselves; the boxes that the detector refines for each
class are not used.

On a device nothing here has a shape that depends on the values, and the regions of all images come back in one copy.

Letters in shapes: ``B`` images, ``P`` proposals of an image, ``R`` = ``max_regions``, ``D`` values of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from extractors.options import RegionOptions
from extractors.regions.boxes import best_scores_after_nms, first_true
from schemas.features import FeatureSpec

NMS_IOU_THRESHOLD = 0.3
"""Overlap from which a box covers another box of its class."""

_FEATURE = 9  # Numbers of a region before its feature.


@dataclass(frozen=True)
class Detections:
    """The proposals of B images, the most likely object of each image first.

    Attributes:
        boxes: float32 ``[B, P, 4]``, x1 y1 x2 y2 in pixels of the original image.
        usable: bool ``[B, P]``, False for rows that are no proposals; these stand behind all others.
        features: float32 ``[B, P, D]``.
        classes: float32 ``[B, P, 1 + classes]``, probabilities; the background is first.
        attributes: float32 ``[B, P, 1 + attributes]``, probabilities; "none" is first.
    """

    boxes: Tensor
    usable: Tensor
    features: Tensor
    classes: Tensor
    attributes: Tensor


def select_indices(found: Detections, options: RegionOptions) -> tuple[Tensor, Tensor]:
    """Choose the regions of images.

    Returns:
        int64 ``[B, min(P, R)]``, positions of the regions and behind them of others; and int64 ``[B]``, how many of these are
        regions. If the number of those that reach the threshold is within the limits, they are in the order of the proposals;
        otherwise the best score comes first, and of equal scores the earlier proposal. There are fewer than ``min_regions`` only
        if there are fewer proposals.
    """
    # Where a row is no proposal, the score is less than any: it comes last, and covers nothing.
    scores = torch.where(found.usable[:, :, None], found.classes[:, :, 1:], -1)
    best = torch.where(found.usable, best_scores_after_nms(found.boxes, scores, NMS_IOU_THRESHOLD), -1)
    chosen, counts = first_true(best >= options.score_threshold, best.shape[1])
    is_within = (options.min_regions <= counts) & (counts <= options.max_regions)
    positions = torch.where(is_within[:, None], chosen, best.sort(dim=1, descending=True, stable=True).indices)
    numbers = counts.clamp(options.min_regions, options.max_regions).minimum(found.usable.sum(dim=1))
    return positions[:, : options.max_regions], numbers


def gather_regions(found: Detections, options: RegionOptions) -> Tensor:
    """Choose the regions of images, and return all that a dataset has of them in one tensor, so that one copy fetches it.

    The class of a region is its most probable class other than background, and its score that probability: not always the class
    by which the region was chosen. The attribute is found in the same way, among those other than "none"; with weights that have
    no attributes all of them have the probability 0, and the attribute is "none".

    A proposal that is not finite, as after an overflow in 16 bits, spoils its image: nobody knows whether it would have been
    chosen. The features of such an image are no numbers, as many as its proposals have that are not finite, which must not be
    stored.

    Returns:
        float32 ``[B, R, 9 + D]``: 1 for a region, box, class and its score, attribute and its score, feature. Rows after the last
        region are zero.
    """
    positions, numbers = select_indices(found, options)
    num_nonfinite = (~found.features.isfinite() & found.usable[:, :, None]).sum(dim=(1, 2))[:, None, None]

    def rows(values: Tensor) -> Tensor:
        return values.take_along_dim(positions[:, :, None], dim=1)

    parts = [torch.ones_like(positions)[:, :, None], rows(found.boxes)]
    for probabilities in (found.classes, found.attributes):
        score, label = rows(probabilities)[:, :, 1:].max(dim=2, keepdim=True)
        parts += [torch.where(score > 0, label + 1, 0), score]
    features = rows(found.features)
    place = torch.arange(features[0].numel(), device=features.device).view(features.shape[1:])
    features = torch.where(num_nonfinite > 0, torch.where(place < num_nonfinite, torch.nan, 0.0), features)
    together = torch.cat([part.to(torch.float32) for part in (*parts, features)], dim=2)
    is_region = torch.arange(positions.shape[1], device=positions.device) < numbers[:, None]
    return F.pad(torch.where(is_region[:, :, None], together, 0), (0, 0, 0, options.max_regions - positions.shape[1]))


def empty_regions(spec: FeatureSpec) -> Tensor:
    """Return what `gather_regions` returns of no images."""
    most, width = spec.shape
    return torch.zeros(0, most, _FEATURE + width)


def columns(sizes: Sequence[tuple[int, int]], regions: Tensor, spec: FeatureSpec) -> dict[str, np.ndarray]:
    """Return regions by the names of the columns of a shard.

    Args:
        sizes: widths and heights of B images in pixels.
        regions: from `gather_regions`, on any device.
        spec: shape ``(R, D)``, and the type of the features.

    Returns:
        Arrays whose first axis is B. Rows after the first ``num_regions`` are zero.
    """
    values = regions.cpu().numpy()
    width_height = np.array(sizes, dtype=np.int32).reshape(-1, 2)
    return {
        "width": width_height[:, 0],
        "height": width_height[:, 1],
        "num_regions": values[:, :, 0].sum(axis=1).astype(np.int16),
        "boxes": values[:, :, 1:5],
        "features": spec.rounded(values[:, :, _FEATURE:]),
        "class_ids": values[:, :, 5].astype(np.int16),
        "class_scores": values[:, :, 6],
        "attribute_ids": values[:, :, 7].astype(np.int16),
        "attribute_scores": values[:, :, 8],
    }

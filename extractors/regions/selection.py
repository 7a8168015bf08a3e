"""Selection of regions among proposals, and their columns in a dataset.

The rule is that of ``tools/generate_tsv.py`` in github.com/peteanderson80/bottom-up-attention: boxes are ranked by their best score
among the classes in which they survive NMS. Boxes are the proposals, without regression by class.

No shape depends on values, and one copy returns the regions of all images from a device.

Shapes: ``B`` images, ``P`` proposals of an image, ``R`` = ``max_regions``, ``D`` width of a feature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from extractors.options import RegionOptions
from extractors.regions.nms import best_scores_after_nms, first_true
from schemas.features import FeatureSpec

SAMPLE_SIDE = 160
"""Side of the input of which `extractors.base.Extractor.sample` computes features, in pixels."""

SAMPLE_BOXES = torch.tensor([[0, 0, 159, 159], [16, 32, 100, 120], [64, 8, 150, 60], [5, 70, 60, 155]], dtype=torch.float32)
"""Boxes of these features, in pixels of the input."""

NMS_IOU_THRESHOLD = 0.3
"""Minimum IoU that suppresses within a class."""

_FEATURE = 9  # Values of a region before its feature.


@dataclass(frozen=True)
class Detections:
    """Proposals of B images, best first.

    Attributes:
        boxes: float32 ``[B, P, 4]``, x1 y1 x2 y2 in pixels of the original image.
        valid: bool ``[B, P]``, False for padding at the end.
        features: float32 ``[B, P, D]``.
        classes: float32 ``[B, P, 1 + classes]``, probabilities, background first.
        attributes: float32 ``[B, P, 1 + attributes]``, probabilities, "none" first.
    """

    boxes: Tensor
    valid: Tensor
    features: Tensor
    classes: Tensor
    attributes: Tensor


def select_indices(detections: Detections, options: RegionOptions) -> tuple[Tensor, Tensor]:
    """Select the regions of images.

    Returns:
        int64 ``[B, min(P, R)]``, positions of regions, then arbitrary ones; and int64 ``[B]``, the number of regions. If the number
        of proposals at or above the threshold is within the limits, they keep their order. Otherwise proposals are sorted by score,
        and ties go to the earlier one. The number is less than ``min_regions`` only for fewer proposals.
    """
    # Padding gets the score -1: it comes last, and suppresses nothing.
    scores = torch.where(detections.valid[:, :, None], detections.classes[:, :, 1:], -1)
    best = torch.where(detections.valid, best_scores_after_nms(detections.boxes, scores, NMS_IOU_THRESHOLD), -1)
    above, counts = first_true(best >= options.score_threshold, best.shape[1])
    is_within = (options.min_regions <= counts) & (counts <= options.max_regions)
    positions = torch.where(is_within[:, None], above, best.sort(dim=1, descending=True, stable=True).indices)
    num_regions = counts.clamp(options.min_regions, options.max_regions).minimum(detections.valid.sum(dim=1))
    return positions[:, : options.max_regions], num_regions


def gather_regions(detections: Detections, options: RegionOptions) -> Tensor:
    """Select the regions of images, and gather all their columns in one tensor.

    The class of a region is its most probable class other than background, which need not be the class of its selection. The
    attribute is the most probable one other than "none". If all probabilities are 0 (weights without attributes), it is "none".

    If any valid proposal of an image has a non-finite feature (overflow in 16 bits), the selection is undefined. The features of
    this image are then all zero except for as many NaN as its proposals have non-finite values; they must not be stored.

    Returns:
        float32 ``[B, R, 9 + D]``: 1 for a region, box, class and score, attribute and score, feature; zero after the last region.
    """
    positions, num_regions = select_indices(detections, options)
    num_nonfinite = (~detections.features.isfinite() & detections.valid[:, :, None]).sum(dim=(1, 2))[:, None, None]

    def rows(values: Tensor) -> Tensor:
        return values.take_along_dim(positions[:, :, None], dim=1)

    parts = [torch.ones_like(positions)[:, :, None], rows(detections.boxes)]
    for probabilities in (detections.classes, detections.attributes):
        score, label = rows(probabilities)[:, :, 1:].max(dim=2, keepdim=True)
        parts += [torch.where(score > 0, label + 1, 0), score]
    features = rows(detections.features)
    flat_index = torch.arange(features[0].numel(), device=features.device).view(features.shape[1:])
    features = torch.where(num_nonfinite > 0, torch.where(flat_index < num_nonfinite, torch.nan, 0.0), features)
    together = torch.cat([part.to(torch.float32) for part in (*parts, features)], dim=2)
    is_region = torch.arange(positions.shape[1], device=positions.device) < num_regions[:, None]
    return F.pad(torch.where(is_region[:, :, None], together, 0), (0, 0, 0, options.max_regions - positions.shape[1]))


def empty_regions(spec: FeatureSpec) -> Tensor:
    """Return the result of `gather_regions` for an empty batch."""
    return torch.zeros(0, spec.shape[0], _FEATURE + spec.shape[1])


def columns(sizes: Sequence[tuple[int, int]], regions: Tensor, spec: FeatureSpec) -> dict[str, np.ndarray]:
    """Split regions into the columns of a shard, ``[B, ...]`` each.

    Args:
        sizes: widths and heights of B images in pixels.
        regions: from `gather_regions`, on any device.
        spec: spec of the features, shape ``(R, D)``.
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

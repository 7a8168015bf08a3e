"""Features whose length says that something is wrong with them, found before anything is trained on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from train.data.features import ImageFeatures

NORM_OUTLIER_FACTOR = 100.0
"""How many times longer or shorter than the median a feature must be to be reported: far more than images of one extractor differ,
so that a remark means something."""


@dataclass(frozen=True)
class FeatureOutliers:
    """Images of a split that have a feature of zeros, or one of an unusual norm; none is left out.

    Padding does not count.

    Attributes:
        split: the split.
        images: number of all images of the split.
        zero_features: number of images with a feature of zeros.
        norm_outliers: number of images with another feature whose Euclidean norm is more than `NORM_OUTLIER_FACTOR` times the
            median of the split's, or less than the median divided by it.
        median: median of the norms of all features that are not zero; 0 if all are.
        example: id of the first of these images.
    """

    split: str
    images: int
    zero_features: int
    norm_outliers: int
    median: float
    example: str

    @property
    def remark(self) -> str:
        """What was found, in one sentence."""
        zeros = f"{self.zero_features:,} have a feature of zeros" if self.zero_features else ""
        what = "one" if self.zero_features else "have a feature"
        factor = f"{NORM_OUTLIER_FACTOR:g}"
        bounds = f"more than {factor} times the median of {self.median:.3g}, or less than a {factor}th of it"
        norms = f"{self.norm_outliers:,} {what} whose norm is {bounds}" if self.norm_outliers else ""
        counts = " and ".join(filter(None, (zeros, norms)))
        return (
            f"feature outliers in split {self.split!r}: of {self.images:,} images {counts}, for example {self.example}; they are "
            "used as they are"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def find_feature_outliers(split: str, features: ImageFeatures, image_ids: Sequence[str]) -> FeatureOutliers | None:
    """Find features of zeros and of unusual norms.

    Returns:
        What there is; None if all features are in order.
    """
    norms = features.norms_of_images().astype(np.float64)
    norms = norms.reshape(len(norms), math.prod(norms.shape[1:]))
    used = features.mask(slice(None))
    used = np.ones_like(norms, bool) if used is None else used
    positive = norms[used & (norms > 0)]
    median = float(np.median(positive)) if len(positive) else 0.0
    zero = (used & (norms == 0)).any(1)
    outlying = (norms > NORM_OUTLIER_FACTOR * median) | (norms < median / NORM_OUTLIER_FACTOR)
    unusual = (used & outlying).any(1) & ~zero
    images = np.flatnonzero(zero | unusual)
    if not len(images):
        return None
    return FeatureOutliers(split, len(features), int(zero.sum()), int(unusual.sum()), median, image_ids[int(images[0])])

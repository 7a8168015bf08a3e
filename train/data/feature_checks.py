"""Checks for zero vectors and norm outliers among image features, before training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.data.features import ImageFeatures

NORM_OUTLIER_FACTOR = 100.0
"""Ratio to the median norm from which a feature is reported; norms of one extractor vary far less."""


@dataclass(frozen=True)
class FeatureOutliers:
    """Counts of images with zero features or unusual norms; padding is ignored.

    Attributes:
        images: number of all images of the split.
        norm_outliers: number of other images with a norm above `NORM_OUTLIER_FACTOR` times the median, or
            below the median divided by it.
        median: median norm of the nonzero features; 0 if all are zeros.
        example: id of the first reported image.
    """

    split: str
    images: int
    zero_features: int
    norm_outliers: int
    median: float
    example: str

    @property
    def remark(self) -> str:
        """A sentence for people."""
        zeros = f"{self.zero_features:,} have a feature of zeros" if self.zero_features else ""
        factor = f"{NORM_OUTLIER_FACTOR:g}"
        bounds = f"a norm above {factor} times the median of {self.median:.3g}, or below a {factor}th of it"
        norms = f"{self.norm_outliers:,} have {bounds}" if self.norm_outliers else ""
        counts = " and ".join(filter(None, (zeros, norms)))
        return (
            f"feature outliers in split {self.split!r}: of {self.images:,} images {counts}, for example "
            f"{self.example}; they are used unchanged"
        )


def find_feature_outliers(split: str, features: ImageFeatures, image_ids: Sequence[str]) -> FeatureOutliers | None:
    """Count features of zeros and of unusual norms; None without any."""
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

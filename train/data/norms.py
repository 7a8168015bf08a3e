"""Features whose length says that something is wrong with them, found before anything is trained on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from train.data.features import ImageFeatures

__all__ = ["WILD_FACTOR", "OddFeatures", "odd_features"]

WILD_FACTOR = 100.0
"""How many times longer or shorter than the median a feature must be to be reported: far more than images of one extractor differ,
so that a remark means something."""


@dataclass(frozen=True)
class OddFeatures:
    """Images of a split that have a feature of zeros, or one of a wild norm: nothing is left out, but somebody should look.

    Padding does not count.

    Attributes:
        split: the split.
        images: number of all images of the split.
        zero: number of images with a feature of zeros.
        wild: number of images with another feature whose Euclidean norm is more than `WILD_FACTOR` times the median of the
            split's, or less than the median divided by it.
        median: median of the norms of all features that are not zero; 0 if all are.
        example: id of the first of these images.
    """

    split: str
    images: int
    zero: int
    wild: int
    median: float
    example: str

    @property
    def remark(self) -> str:
        """What was found, in one sentence."""
        of_zeros = f"{self.zero:,} have a feature of zeros" if self.zero else ""
        what = "one" if self.zero else "have a feature"
        bounds = f"more than {WILD_FACTOR:g} times the median of {self.median:.3g}, or less than a {WILD_FACTOR:g}th of it"
        of_wild_norm = f"{self.wild:,} {what} whose norm is {bounds}" if self.wild else ""
        found = " and ".join(part for part in (of_zeros, of_wild_norm) if part)
        return (
            f"odd features in split {self.split!r}: of {self.images:,} images {found}, for example {self.example}; they are used "
            "as they are"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def odd_features(split: str, features: ImageFeatures, image_ids: Sequence[str]) -> OddFeatures | None:
    """Look for features of zeros and of wild norms.

    Args:
        split: the split.
        features: the features of its images.
        image_ids: the images.

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
    wild = (used & ((norms > WILD_FACTOR * median) | (norms < median / WILD_FACTOR))).any(1) & ~zero
    odd = np.flatnonzero(zero | wild)
    if not len(odd):
        return None
    return OddFeatures(split, len(features), int(zero.sum()), int(wild.sum()), median, image_ids[int(odd[0])])

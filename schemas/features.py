"""Specification of a feature: name, shape and stored type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from schemas.conversion import convert
from schemas.errors import DatasetError

if TYPE_CHECKING:
    import numpy as np

DTYPES = ("float32", "float16")
"""Types in which the values of features are stored."""


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and type of the feature of one image.

    Attributes:
        name: the extractor's name, e.g. ``resnet50-pool``.
        shape: shape of the feature of one image, e.g. ``(2048,)``.
        dtype: one of `DTYPES`, as stored.
        source: the paper or file that defines the feature.

    Examples:
        >>> imagepivot.FeatureSpec("mean-colour", shape=(3,)).width
        3
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    source: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype of feature {self.name!r} is {self.dtype!r}, expected one of {DTYPES}")
        if not self.shape or any(n < 1 for n in self.shape):
            raise ValueError(f"shape of feature {self.name!r} is {self.shape!r}, expected positive sizes")

    @property
    def width(self) -> int:
        """Number of values of one image."""
        return prod(self.shape)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Round float32 values to the stored type; overflow becomes infinite."""
        import numpy as np  # Lazy: shell completion reads specs.

        with np.errstate(over="ignore"):
            return values.astype(self.dtype, copy=False)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values of a manifest."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "source": self.source}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> FeatureSpec:
        """Read the values of a manifest.

        Raises:
            DatasetError: they do not describe a feature.
        """
        try:
            return convert(stored, cls, "feature", error=DatasetError)
        except ValueError as error:
            raise DatasetError(f"the feature is not described: {error}") from error

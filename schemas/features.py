"""What a feature is: its name, shape and stored type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from schemas.errors import DatasetError
from schemas.stored import stored_values

__all__ = ["FeatureSpec"]

_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and type of the feature of one image, as an extractor computes it and a shard stores it.

    Attributes:
        name: the extractor's name, e.g. ``resnet50-pool``.
        shape: shape of the feature of one image, e.g. ``(2048,)``.
        dtype: ``float32`` or ``float16``, as stored.
        source: the paper or file that defines the feature.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    source: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype of feature {self.name!r} is {self.dtype!r}, expected one of {_DTYPES}")
        if not self.shape or any(n < 1 for n in self.shape):
            raise ValueError(f"shape of feature {self.name!r} is {self.shape!r}, expected positive sizes")

    @property
    def width(self) -> int:
        """Number of values of one image."""
        return prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the plain values that a manifest stores."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "source": self.source}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> FeatureSpec:
        """Read what a manifest stores.

        Raises:
            DatasetError: it does not describe a feature.
        """
        values = stored_values(cls, stored)
        missing = {"name", "shape"} - values.keys()
        unknown = set(stored) - values.keys()
        try:
            if missing or unknown:
                raise ValueError(f"{min(missing)} is missing" if missing else f"{min(unknown)!r} is unknown")
            return cls(**values)
        except ValueError as error:
            raise DatasetError(f"the feature is not described: {error}") from error

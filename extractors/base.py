"""The interface of all extractors.

Letters in shapes: ``B`` images of a batch, ``H`` and ``W`` pixels of one preprocessed image.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from schemas.features import FeatureSpec
from schemas.fingerprints import canonical_json, sha256_of_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image
    from torch import Tensor


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """The feature of an extractor, and everything that decides its values. Can be pickled; holds no weights and no device.

    Attributes:
        spec: name, shape and type of the feature.
        parameters: JSON values: name, decoding rules, transform, weights, precision. Library versions and the device are left
            out, so that the same request has the same fingerprint everywhere.
        kind: kind of dataset that it fills: ``features``, or ``regions`` for several regions per image with their boxes.
        batch_size: default number of images in a batch.
        classes: number of classes of its regions, without the background; 0 if it has none.
        attributes: number of attributes of its regions, without "none"; 0 if it has none.
        remark: the set of weights that was taken of a file with several, and how to take another; else empty.
    """

    spec: FeatureSpec
    parameters: dict[str, Any]
    kind: str = "features"
    batch_size: int = 16
    classes: int = 0
    attributes: int = 0
    remark: str = ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of the parameters, as 64 hexadecimal digits."""
        return sha256_of_bytes(canonical_json(self.parameters).encode("utf-8"))


class Extractor(ABC):
    """A loaded model with its preprocessing, as `extractors.load` returns it.

    Each image goes through ``decode`` (bytes to RGB) and ``preprocess`` (RGB to 8-bit pixels), both cheap and safe to call from
    any number of threads; ``collate`` then makes a batch of several images, and ``extract`` runs the model on it. An extractor
    whose images differ in size overrides ``collate``; one that makes several arrays per image overrides ``extract_columns``.

    Attributes:
        description: what the extractor makes.
        device: where the model runs; None for the CPU.
    """

    def __init__(self, description: Description, device: torch.device | None = None) -> None:
        self.description = description
        self.device = device

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU, which computes while the host does other things."""
        return self.device is not None and self.device.type == "cuda"

    @property
    def feeder_threads(self) -> int:
        """Threads that give the model one batch each, so that it has the next one already: one on a GPU, else none by default."""
        return 1 if self.on_gpu else 0

    @property
    def spec(self) -> FeatureSpec:
        """Name, shape and type of the feature of one image."""
        return self.description.spec

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything that decides the values of the features, as JSON values."""
        return self.description.parameters

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the parameters."""
        return self.description.fingerprint

    @property
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray] | None:
        """The function `preprocess` without the model, for other processes: can be pickled, and returns an array ``[3, H, W]``.

        None if this process alone can do it.
        """
        return None

    @abstractmethod
    def preprocess(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into the 8-bit pixels that the model starts from.

        Returns:
            uint8 ``[3, H, W]``, channels R, G, B.
        """

    def preprocess_single_threaded(self, image: Image.Image) -> Tensor:
        """Return what `preprocess` does, bit for bit, in less time where a single thread does so.

        It may consist of many short operations, between which several threads would wait for Python's lock, for longer than the
        operations take. By default it is `preprocess`.
        """
        return self.preprocess(image)

    def collate(self, images: Sequence[Tensor]) -> Any:
        """Make a batch for `extract` from the pixels of B images.

        Returns:
            uint8 ``[B, 3, H, W]``; all images have the same size.
        """
        import torch

        return torch.stack(list(images))

    @abstractmethod
    def extract(self, batch: Any) -> np.ndarray:
        """Run the model on a batch that `collate` made.

        Returns:
            ``[B, *spec.shape]`` in the type of the spec, in the order of the batch. Everything is computed in float32 and
            rounded by `FeatureSpec.rounded` at the end.
        """

    def extract_columns(self, batch: Any) -> dict[str, np.ndarray]:
        """Run the model and return its arrays by the names of their columns in a shard.

        Returns:
            Arrays whose first axis is B; by default just ``feature``.
        """
        return {"feature": self.extract(batch)}

    def extract_async(self, batch: Any) -> Callable[[], dict[str, np.ndarray]]:
        """Run the model without waiting for a GPU.

        Returns:
            Waits for the GPU and returns what `extract_columns` does; may be called in another thread, while the next batch is
            started. By default everything has been computed before.
        """
        columns = self.extract_columns(batch)
        return lambda: columns


class RegionExtractor(Extractor):
    """An extractor of several regions per image. Its images differ in size, and `extract_columns` does the work.

    More letters in shapes: ``H0`` and ``W0`` pixels of the original image, ``R`` regions kept, ``D`` width of a feature.
    """

    def collate(self, images: Sequence[Any]) -> list[Any]:
        """Return the images as a list, because their sizes differ.

        Returns:
            What `preprocess` returned for B images: tensors, uint8 ``[3, H0, W0]``, or objects that hold pixels.
        """
        return list(images)

    def extract(self, batch: Sequence[Any]) -> np.ndarray:
        """Return only the features of the regions.

        Returns:
            ``[B, R, D]`` in the type of the spec; rows after the last region of an image are zero.
        """
        return self.extract_columns(batch)["features"]

    @abstractmethod
    def extract_columns(self, batch: Sequence[Any]) -> dict[str, np.ndarray]:
        """Find the regions of each image: all columns of kind ``regions`` except ``image_id``."""


@cache
def warn_once(sentence: str) -> None:
    """Log a sentence as a warning, once in a process, for users of Python; commands show it themselves."""
    logger.warning(sentence)

"""Interface of all extractors.

Shapes: ``B`` images of a batch, ``H`` and ``W`` pixels of a preprocessed image.
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
from schemas.parameters import EmbeddingModel, FeaturesParameters

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image
    from torch import Tensor


logger = logging.getLogger(__name__)

_SAMPLE_SIZE_WH = (96, 72)  # Small, so that region extractors resize it to few pixels.


@dataclass(frozen=True)
class Description:
    """Picklable description of an extractor, without weights and device.

    Attributes:
        parameters: JSON values that determine the features: name, decoding rules, transform, weights, precision. They exclude
            library versions and the device, so that a request has one fingerprint on all machines.
        kind: kind of dataset: ``features``, or ``regions`` for several regions with boxes per image.
        classes: number of region classes without the background; 0 for kind ``features``.
        attributes: number of region attributes without "none"; 0 for kind ``features``.
        remark: for a weights file with several sets: the chosen set and how to choose another; else empty.
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
    """A loaded model with its preprocessing, result of `load_extractor`.

    Call order: ``decode_image`` (bytes to RGB), ``preprocess`` (RGB to 8-bit pixels), ``collate`` (images to
    a batch), ``extract`` (batch to features). The first two are thread-safe. Extractors of images with
    different sizes override ``collate``, those with several arrays per image ``extract_columns``.

    Attributes:
        device: device of the model; None for the CPU.

    Examples:
        >>> extractor = imagepivot.load_extractor("resnet50-pool", weights="random:0")
        >>> images = [imagepivot.decode_image(Path(f"photos/img-0{n}.jpg").read_bytes()) for n in range(3)]
        >>> extractor.extract(extractor.collate([extractor.preprocess(image) for image in images])).shape
        (3, 2048)
    """

    def __init__(self, description: Description, device: torch.device | None = None) -> None:
        self.description = description
        self.device = device

    @property
    def on_gpu(self) -> bool:
        """True if the model runs on a GPU, asynchronously to the host."""
        return self.device is not None and self.device.type == "cuda"

    @property
    def feeder_threads(self) -> int:
        """Number of feeder threads, one batch in flight each: 1 on a GPU, else 0."""
        return 1 if self.on_gpu else 0

    @property
    def spec(self) -> FeatureSpec:
        """Name, shape and type of the feature of one image."""
        return self.description.spec

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON values that determine the features."""
        return self.description.parameters

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the parameters."""
        return self.description.fingerprint

    @property
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray] | None:
        """Picklable `preprocess` without the model: to ``[3, H, W]``; None if unsupported."""
        return None

    @abstractmethod
    def preprocess(self, image: Image.Image) -> Tensor:
        """Preprocess an RGB image to the model's 8-bit input.

        Returns:
            uint8 ``[3, H, W]``, channels R, G, B.
        """

    def collate(self, images: Sequence[Tensor]) -> Any:
        """Stack B preprocessed images of one size: uint8 ``[B, 3, H, W]``."""
        import torch

        return torch.stack(list(images))

    @abstractmethod
    def extract(self, batch: Any) -> np.ndarray:
        """Run the model on a batch from `collate`.

        Returns:
            ``[B, *spec.shape]`` in the spec's dtype, in batch order, rounded from float32 by `FeatureSpec.rounded`.
        """

    def extract_columns(self, batch: Any) -> dict[str, np.ndarray]:
        """Run the model and return ``[B, ...]`` by column, by default only ``feature``."""
        return {"feature": self.extract(batch)}

    def sample(self) -> np.ndarray:
        """Compute values of `sample_image` that tell versions of the code apart.

        They may have any shape, see `extractors.sample_outputs`. The default is the feature.
        """
        return self.extract(self.collate([self.preprocess(sample_image())]))

    def extract_async(self, batch: Any) -> Callable[[], dict[str, np.ndarray]]:
        """Run the model without waiting for a GPU.

        Returns:
            Function that waits for the GPU and returns the columns of `extract_columns`. Another thread may
            call it while the next batch starts. The default computes everything immediately.
        """
        columns = self.extract_columns(batch)
        return lambda: columns


class RegionExtractor(Extractor):
    """Extractor of several regions per image; subclasses implement `extract_columns`.

    Shapes: ``R`` regions of an image, ``D`` feature width.
    """

    def collate(self, images: Sequence[Any]) -> list[Any]:
        """Return the results of `preprocess` as a list, since image sizes differ."""
        return list(images)

    def extract(self, batch: Sequence[Any]) -> np.ndarray:
        """Return region features, ``[B, R, D]`` in the spec's dtype, padded with zeros."""
        return self.extract_columns(batch)["features"]

    def sample(self) -> np.ndarray:
        """Compute the sum of the regions' features, which rounding does not reorder."""
        return super().sample().sum(axis=1)

    @abstractmethod
    def extract_columns(self, batch: Sequence[Any]) -> dict[str, np.ndarray]:
        """Detect regions: all columns of kind ``regions`` except ``image_id``."""


def sample_image() -> Image.Image:
    """Return a fixed RGB image with ramps, edges and texture, from integers only."""
    import numpy as np
    from PIL import Image

    y, x = np.mgrid[: _SAMPLE_SIZE_WH[1], : _SAMPLE_SIZE_WH[0]]
    red, green, blue = 2 * x, 3 * y, 40 + 160 * ((x // 12 + y // 9) % 2) + (7 * x * y) % 31
    return Image.fromarray(np.stack([red, green, blue], axis=-1).astype(np.uint8), "RGB")


@cache
def warn_once(sentence: str) -> None:
    """Log a warning once per process, for Python users; commands print it themselves."""
    logger.warning(sentence)


def joint_parameters(description: Description) -> FeaturesParameters:
    """Return the parameters of vectors that a model of sentences writes."""
    spec, model = description.spec, description.parameters
    weights = model["weights"]
    encoder = {name: value for name, value in model.items() if name not in ("feature", "weights", "untrained")}
    untrained = (f"{spec.name} ({weights['name']})",) if model.get("untrained") else None
    joint = EmbeddingModel(weights["sha256"], "cosine", untrained=untrained, encoder=encoder)
    return FeaturesParameters(feature=spec, model=joint)

"""``resnet50-pool``: image features as those of Multi30K.

Faithful to ``scripts/feature-extractor`` of github.com/multi30k/dataset: torchvision's ResNet50 with the weights of 2017, one
centre crop, the output of the global average pool. The published files hold float16; here features are float32. In the 16-bit
precisions, too, the average is taken in float32.

Letters in shapes: ``B`` images, ``D`` = 2048 width of the feature.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from extractors.base import Description, Extractor
from extractors.computing.devices import cast_layers, compiled, numerics, upload
from extractors.computing.passes import in_chunks, in_halves
from extractors.images.preprocess import Preprocessing, normalize, resize_and_crop
from extractors.settings import Settings
from extractors.weights.finding import Architecture, Weights, resolve_weights
from schemas.features import FeatureSpec

__all__ = ["ARCHITECTURE", "PREPROCESSING", "ResNet50Pool", "describe", "find_weights", "load"]

ARCHITECTURE = Architecture(
    build=torchvision.models.resnet50,
    default=torchvision.models.ResNet50_Weights.IMAGENET1K_V1,
    refused={
        "11ad3fa6": "this is torchvision's IMAGENET1K_V2 of 2021, whose features have the same shape but are not those of the "
        "papers. Use --weights default, or resnet50-0676ba61.pth (IMAGENET1K_V1)",
    },
)

PREPROCESSING = Preprocessing(resize_short=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class ResNet50Pool(Extractor):
    """ResNet50 up to its global average pool.

    Args:
        settings: what is asked of the extractor.
        weights: from `find_weights`.
        device: from `extractors.computing.devices.resolve_device`.
    """

    def __init__(self, settings: Settings, weights: Weights, device: torch.device) -> None:
        super().__init__(describe(settings, weights))
        self._device = device
        self._precision = settings.precision
        with torch.device("meta"):
            model = ARCHITECTURE.build(weights=None)
        model.load_state_dict(weights.state, assign=True)
        layers = OrderedDict((name, layer) for name, layer in model.named_children() if name not in ("avgpool", "fc"))
        trunk = nn.Sequential(layers).eval().requires_grad_(False)
        self._dtype = cast_layers(trunk, settings.precision)
        self._trunk = compiled(trunk.to(device).to(memory_format=torch.channels_last), device, enabled=settings.compile)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Resize the shorter side to 256 and cut out the centre.

        Returns:
            uint8 ``[3, 224, 224]``, channels R, G, B.
        """
        return resize_and_crop(image, PREPROCESSING)

    def extract(self, batch: Tensor) -> np.ndarray:
        """Run the model on preprocessed images.

        Args:
            batch: uint8 ``[B, 3, 224, 224]``, channels R, G, B; B may be 0.

        Returns:
            ``[B, D]`` in the type of the spec, not negative. On a CPU an image has the same bytes in any batch and with any number
            of threads.
        """
        size = PREPROCESSING.crop
        if batch.dtype != torch.uint8 or batch.shape[1:] != (3, size, size):
            raise ValueError(f"batch is {batch.dtype} {list(batch.shape)}, expected torch.uint8 [B, 3, {size}, {size}]")
        if not len(batch):
            return np.zeros((0, *self.spec.shape), dtype=self.spec.dtype)
        if self._device.type == "cpu":
            return self.spec.rounded(in_chunks(self._forward, batch).numpy())
        with numerics(self._precision, self._device), torch.inference_mode():
            return self.spec.rounded(in_halves(self._forward, batch).numpy())

    def _forward(self, pixels: Tensor) -> Tensor:
        """Compute features: uint8 ``[B, 3, 224, 224]`` on any device to float32 ``[B, D]`` on the CPU."""
        pixels = upload(pixels, self._device).contiguous(memory_format=torch.channels_last)
        maps = self._trunk(normalize(pixels, PREPROCESSING).to(self._dtype))  # [B, D, 7, 7]
        return maps.to(torch.float32).mean(dim=(2, 3)).cpu()  # [B, D]


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Find weights, see `extractors.catalogue.ExtractorModule`."""
    return resolve_weights(request, ARCHITECTURE)


def describe(settings: Settings, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    return Description(settings.spec, settings.parameters(weights, transform=PREPROCESSING.parameters()))


load = ResNet50Pool

"""``resnet50-pool``: the image features of Multi30K.

As in ``scripts/feature-extractor`` of github.com/multi30k/dataset: torchvision's ResNet50 with the weights of 2017, one centre
crop, global average pool (always in float32). The published files hold float16, this extractor returns float32.

Shapes: ``B`` images, ``D`` = 2048 width of the feature.
"""

import torch
from torch import Tensor

from extractors.base import Description
from extractors.fixed_size import CenterCropExtractor
from extractors.images.preprocessing import Preprocessing
from extractors.networks import RESNET50_WEIGHTS, resnet50
from extractors.options import ExtractorOptions
from extractors.weights.resolve import Architecture, Weights

ARCHITECTURE = Architecture(
    build=resnet50,
    default=RESNET50_WEIGHTS,
    refused={
        "11ad3fa6": "this is torchvision's IMAGENET1K_V2 of 2021, whose features have the same shape but are not those of the "
        "papers. Use --weights default, or resnet50-0676ba61.pth (IMAGENET1K_V1)",
    },
)

PREPROCESSING = Preprocessing(resize_short=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class ResNet50Pool(CenterCropExtractor):
    """ResNet50 up to its global average pool."""

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        trunk = ARCHITECTURE.load(weights).trunk()
        super().__init__(describe(settings, weights), trunk, PREPROCESSING, settings, device)

    def features(self, maps: Tensor) -> Tensor:
        """Average over cells: ``[B, D, 7, 7]`` to float32 ``[B, D]``, not negative."""
        return maps.to(torch.float32).mean(dim=(2, 3))


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    return Description(settings.spec, settings.parameters(weights, transform=PREPROCESSING.parameters(), norms="folded"))


find_weights = ARCHITECTURE.find_weights
load = ResNet50Pool

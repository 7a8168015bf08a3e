"""``vgg19-grid`` and ``resnet152-grid``: the last map of a network, for models that attend to the cells of a grid.

The features of DAN (Nam, Ha, Kim: Dual Attention Networks for Multimodal Reasoning and Matching, CVPR 2017, arXiv 1611.00471).
What the paper says of the representation of images, and what is chosen where it is silent:

==============  =======================================================================================================
input           the paper: images are rescaled to 448×448 pixels; so both sides are resized, nothing is cut off
layer           the paper: of the 19-layer VGGNet the last pooling layer (``pool5``), of the 152-layer ResNet the layer below
                its last pooling layer (``res5c``, after its ReLU): vectors of 512 and 2048 numbers. At 448 pixels both maps
                have 14×14 cells
order           row by row from the top, from left to right in a row: cell ``(y, x)`` is vector ``14 * y + x``
weights         silent; here torchvision's of 2017 (``IMAGENET1K_V1``)
normalisation   silent; that of torchvision's weights: RGB / 255, less the mean, by the standard deviation of ImageNet. The
                reimplementation github.com/JunweiLiang/DualAttentionNetwork, which had its author's advice and reaches the
                paper's recalls with ResNet152, uses the same numbers
interpolation   silent; bilinear with antialiasing, by Pillow, with which torchvision's weights were trained. That
                reimplementation has OpenCV's bilinear, without antialiasing. Photographs of Flickr are 500 pixels long: their
                longer side shrinks by a tenth, so that the two hardly differ
==============  =======================================================================================================

Features are stored unnormalised. In the 16-bit precisions the map is one of 16-bit numbers.

Letters in shapes: ``B`` images, ``G`` = 196 cells, ``D`` = 512 or 2048 width of a vector.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extractors.base import Description
from extractors.fixed_size import CenterCropExtractor
from extractors.images.preprocessing import Preprocessing
from extractors.networks import RESNET152_WEIGHTS, VGG19, VGG19_WEIGHTS, resnet152
from extractors.options import ExtractorOptions
from extractors.weights.checkpoints import Choice, read_state
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from schemas.features import FeatureSpec

_SIDE = 14  # Cells of a row, and rows of a map.
_BATCH = 8  # Images, four times as large as those of other extractors.
_FORWARD_IMAGES = 1  # Images of one pass on a CPU: VGG19's first maps take 100 MB each.

PREPROCESSING = Preprocessing(resize_short=None, crop=448, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Variant:
    """The differences between the two extractors of this module.

    Attributes:
        architecture: the model without its last layers, and the weights that the extractor's name stands for.
        trunk: takes of the model the layers up to the map.
        has_norms: whether there are batch norms among them, which are folded into convolutions.
    """

    architecture: Architecture
    trunk: Callable[[Any], nn.Module]
    has_norms: bool = False


def _vgg19() -> nn.Module:
    """Build VGG19 without its fully connected layers; the others keep their random values."""
    model = VGG19()
    model.classifier = nn.Sequential()
    return model


def _resnet152() -> nn.Module:
    """Build ResNet152 without its fully connected layer; the others keep their random values."""
    model = resnet152()
    model.fc = nn.Identity()
    return model


def _read_without(path: Path, choice: Choice | None = None, *, prefix: str) -> dict[str, Tensor]:
    """Read a state dict without the tensors whose names begin so."""
    return {name: tensor for name, tensor in read_state(path, choice).items() if not name.startswith(prefix)}


VARIANTS = {
    "vgg19-grid": Variant(
        Architecture(
            build=_vgg19,
            default=VGG19_WEIGHTS,
            refused={
                "d01eb7cb": "these are Oxford's VGG19 weights of 2014 in torchvision's format (jcjohnson/pytorch-vgg), which see "
                "BGR in 0…255. Use --weights default, or vgg19-dcbb9e9d.pth (IMAGENET1K_V1)",
            },
            read=partial(_read_without, prefix="classifier."),
        ),
        trunk=lambda model: model.features,
    ),
    "resnet152-grid": Variant(
        Architecture(
            build=_resnet152,
            default=RESNET152_WEIGHTS,
            refused={
                "f82ba261": "this is torchvision's IMAGENET1K_V2 of 2021, whose features have the same shape but are not those of "
                "the papers' time. Use --weights default, or resnet152-394f9c45.pth (IMAGENET1K_V1)",
            },
            read=partial(_read_without, prefix="fc."),
        ),
        trunk=lambda model: nn.Sequential(
            OrderedDict((name, layer) for name, layer in model.named_children() if name not in ("avgpool", "fc"))
        ),
        has_norms=True,
    ),
}


class FeatureMapExtractor(CenterCropExtractor):
    """A network up to its last map. An image becomes 448 pixels wide and high, whatever its aspect ratio."""

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        variant = VARIANTS[settings.spec.name]
        trunk = variant.trunk(variant.architecture.load(weights))
        super().__init__(describe(settings, weights), trunk, PREPROCESSING, settings, device, _FORWARD_IMAGES)

    def features(self, maps: Tensor) -> Tensor:
        """Put the cells of maps row by row: ``[B, D, 14, 14]`` to float32 ``[B, G, D]``, not negative."""
        return maps.permute(0, 2, 3, 1).flatten(1, 2).to(torch.float32)


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Find weights, see `extractors.catalogue.ExtractorModule`."""
    return resolve_weights(request, VARIANTS[spec.name].architecture)


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    norms = {"norms": "folded"} if VARIANTS[settings.spec.name].has_norms else {}
    parameters = settings.parameters(weights, transform=PREPROCESSING.parameters(), grid=[_SIDE, _SIDE], **norms)
    return Description(settings.spec, parameters, batch_size=_BATCH)


load = FeatureMapExtractor

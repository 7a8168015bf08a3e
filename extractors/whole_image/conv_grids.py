"""``vgg19-grid`` and ``resnet152-grid``: the last feature map of a network.

The features of DAN (Nam, Ha, Kim: Dual Attention Networks for Multimodal Reasoning and Matching, CVPR 2017, arXiv 1611.00471):

==============  =======================================================================================================
input           paper: images are rescaled to 448×448 pixels; both sides are resized, without a crop
layer           paper: the last pooling layer (``pool5``) of the 19-layer VGGNet; the layer below the last pooling layer
                (``res5c``, after its ReLU) of the 152-layer ResNet. Feature maps are 14×14 with 512 and 2048 channels
order           row-major: cell ``(y, x)`` is vector ``14 * y + x``
weights         unspecified; torchvision's of 2017 (``IMAGENET1K_V1``)
normalisation   unspecified; RGB / 255, ImageNet's mean and standard deviation, as for torchvision's weights. So does the
                reimplementation github.com/JunweiLiang/DualAttentionNetwork, which reaches the paper's recalls
interpolation   unspecified; Pillow's antialiased bilinear, as in the training of torchvision's weights. That
                reimplementation has OpenCV's bilinear, which is similar at the sizes of Flickr photographs
==============  =======================================================================================================

Features are unnormalised. In the 16-bit precisions the feature map is rounded to 16 bits.

Shapes: ``B`` images, ``G`` = 196 cells, ``D`` = 512 or 2048 width of a vector.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from extractors.base import Description
from extractors.fixed_size import CenterCropExtractor
from extractors.images.preprocessing import Preprocessing
from extractors.networks import RESNET152_WEIGHTS, VGG19, VGG19_WEIGHTS, resnet152
from extractors.options import ExtractorOptions
from extractors.weights.checkpoints import Choice, read_state_dict
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from schemas.features import FeatureSpec

_SIDE = 14  # Rows and columns of a feature map.
_BATCH = 8  # Images are four times as large as those of other extractors.

PREPROCESSING = Preprocessing(resize_short=None, crop=448, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def _build_without(head: str, network: Callable[[], nn.Module]) -> nn.Module:
    """Build a network without its fully connected layers."""
    model = network()
    setattr(model, head, nn.Identity())
    return model


def _read_without(head: str, path: Path, choice: Choice | None = None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in read_state_dict(path, choice).items() if not name.startswith(f"{head}.")}


ARCHITECTURES = {
    "vgg19-grid": Architecture(
        build=partial(_build_without, "classifier", VGG19),
        default=VGG19_WEIGHTS,
        refused={
            "d01eb7cb": "these are Oxford's VGG19 weights of 2014 in torchvision's format (jcjohnson/pytorch-vgg), which see "
            "BGR in 0…255. Use --weights default, or vgg19-dcbb9e9d.pth (IMAGENET1K_V1)",
        },
        read=partial(_read_without, "classifier"),
    ),
    "resnet152-grid": Architecture(
        build=partial(_build_without, "fc", resnet152),
        default=RESNET152_WEIGHTS,
        refused={
            "f82ba261": "this is torchvision's IMAGENET1K_V2 of 2021, whose features have the same shape but are not those of "
            "the papers' time. Use --weights default, or resnet152-394f9c45.pth (IMAGENET1K_V1)",
        },
        read=partial(_read_without, "fc"),
    ),
}


class FeatureMapExtractor(CenterCropExtractor):
    """Network up to its last feature map, for images squashed to 448×448 pixels."""

    forward_images = 1  # VGG19's first feature maps take 100 MB each.

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        trunk = ARCHITECTURES[settings.spec.name].load(weights).trunk()
        super().__init__(describe(settings, weights), trunk, PREPROCESSING, settings, device)

    def features(self, maps: Tensor) -> Tensor:
        """Flatten maps in row-major order: ``[B, D, 14, 14]`` to float32 ``[B, G, D]``."""
        return maps.permute(0, 2, 3, 1).flatten(1, 2).to(torch.float32)


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Resolve weights, see `extractors.catalogue.ExtractorModule`."""
    return resolve_weights(request, ARCHITECTURES[spec.name])


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    norms = {"norms": "folded"} if settings.spec.name == "resnet152-grid" else {}
    parameters = settings.parameters(weights, transform=PREPROCESSING.parameters(), grid=[_SIDE, _SIDE], **norms)
    return Description(settings.spec, parameters, batch_size=_BATCH)


load = FeatureMapExtractor

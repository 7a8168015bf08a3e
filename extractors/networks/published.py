"""The files of weights that the names of extractors stand for: torchvision's, by their names and addresses there."""

from __future__ import annotations

from typing import NamedTuple


class PublishedWeights(NamedTuple):
    """Weights that torchvision publishes.

    Attributes:
        name: torchvision's, enumeration and member.
        url: of the file, whose name has the first digits of its SHA-256.
    """

    name: str
    url: str

    def __str__(self) -> str:
        return self.name


_FOLDER = "https://download.pytorch.org/models"

RESNET50 = PublishedWeights("ResNet50_Weights.IMAGENET1K_V1", f"{_FOLDER}/resnet50-0676ba61.pth")
RESNET152 = PublishedWeights("ResNet152_Weights.IMAGENET1K_V1", f"{_FOLDER}/resnet152-394f9c45.pth")
VGG19 = PublishedWeights("VGG19_Weights.IMAGENET1K_V1", f"{_FOLDER}/vgg19-dcbb9e9d.pth")

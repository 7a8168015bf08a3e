"""VGG19 (Simonyan and Zisserman 2015, arXiv:1409.1556, column E), with layers, names and random weights as torchvision has them.

Torchvision itself is not imported, see `extractors.networks.resnet`.

Letters in shapes: ``B`` images.
"""

from __future__ import annotations

from torch import Tensor, nn

from extractors.networks.drawing import draw

_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # Channels and number of convolutions, before each pooling.
_CELLS = 7  # Rows and columns of the map that is connected.
_WIDTH = 4096
_CLASSES = 1000


class VGG19(nn.Module):
    """Sixteen convolutions in ``features``, and three fully connected layers in ``classifier``."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in _STAGES:
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((_CELLS, _CELLS))
        self.classifier = nn.Sequential(
            nn.Linear(channels * _CELLS * _CELLS, _WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(_WIDTH, _CLASSES),
        )
        draw(self, linear_std=0.01)

    def forward(self, pixels: Tensor) -> Tensor:
        """Classify: normalised ``[B, 3, 224, 224]`` to logits ``[B, 1000]``."""
        found: Tensor = self.classifier(self.avgpool(self.features(pixels)).flatten(1))
        return found


def vgg19(weights: None = None) -> VGG19:
    """Build VGG19 with random weights; the argument is there because torchvision's function has one."""
    return VGG19()

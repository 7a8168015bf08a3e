"""ResNet50 and ResNet152 (He et al. 2016, arXiv:1512.03385), with layers, names and random weights as torchvision has them.

The stride of a stage stands in the 3×3 convolution of its first block, not in the 1×1 convolution before it as in the paper.
Importing torchvision for this would load torch's compiler, which takes as long as torch itself.

Letters in shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels or cells.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from extractors.networks.drawing import draw

_WIDENING = 4  # Channels that leave a block, for each one inside.
_WIDTHS = (64, 128, 256, 512)  # Channels inside the blocks of each stage.
_CLASSES = 1000


class Bottleneck(nn.Module):
    """Three convolutions, 1×1, 3×3 and 1×1, and a shortcut around them.

    Args:
        channels: C of the input.
        width: channels of the 3×3 convolution.
        stride: of that convolution.
    """

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outgoing = width * _WIDENING
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outgoing, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outgoing)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _projection(channels, outgoing, stride) if stride != 1 or channels != outgoing else None

    def forward(self, maps: Tensor) -> Tensor:
        """Compute maps: ``[B, C, H, W]`` to ``[B, 4 * width, H / stride, W / stride]``, not negative."""
        inner = self.relu(self.bn1(self.conv1(maps)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        inner += maps if self.downsample is None else self.downsample(maps)
        found: Tensor = self.relu(inner)
        return found


class ResNet(nn.Module):
    """A residual network of bottlenecks with its classifier.

    Args:
        blocks: number of blocks of each of the four stages.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        channels = _WIDTHS[0]
        for stage, (count, width) in enumerate(zip(blocks, _WIDTHS, strict=True), start=1):
            first = Bottleneck(channels, width, stride=1 if stage == 1 else 2)
            channels = width * _WIDENING
            others = (Bottleneck(channels, width) for _ in range(count - 1))
            self.add_module(f"layer{stage}", nn.Sequential(first, *others))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc: nn.Module = nn.Linear(channels, _CLASSES)
        draw(self)

    def forward(self, pixels: Tensor) -> Tensor:
        """Classify: normalised ``[B, 3, H, W]`` to logits ``[B, 1000]``."""
        maps = self.maxpool(self.relu(self.bn1(self.conv1(pixels))))
        for stage in range(1, len(_WIDTHS) + 1):
            maps = self.get_submodule(f"layer{stage}")(maps)
        found: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return found


def resnet50(weights: None = None) -> ResNet:
    """Build ResNet50 with random weights; the argument is there because torchvision's function has one."""
    return ResNet((3, 4, 6, 3))


def resnet152(weights: None = None) -> ResNet:
    """Build ResNet152 with random weights; the argument is there because torchvision's function has one."""
    return ResNet((3, 8, 36, 3))


def _projection(channels: int, outgoing: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, outgoing, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(outgoing),
    )

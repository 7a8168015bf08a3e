"""ResNet50, ResNet152 (He et al. 2016) and VGG19 (Simonyan and Zisserman 2015).

The papers are arXiv:1512.03385 and arXiv:1409.1556 (column E). Layers with weights, their names and the order
of random initialization are torchvision's, so equal generator states give equal weights. As there, a ResNet
stage has its stride in the 3×3 convolution of its first block; the paper has it in the 1×1 convolution
before. Importing torchvision instead would load torch's compiler, which takes as long as torch itself.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels or cells.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

_EXPANSION = 4  # Output channels of a block per inner channel.
_WIDTHS = (64, 128, 256, 512)  # Inner channels of the blocks of each stage.
_CLASSES = 1000
_VGG_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # Channels and number of convolutions, before each pooling.
_VGG_CELLS = 7  # Rows and columns of the last feature map.
_VGG_WIDTH = 4096
_FOLDER = "https://download.pytorch.org/models"


class Bottleneck(nn.Module):
    """Residual block of 1×1, 3×3 (``width`` channels, strided) and 1×1 convolution."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outgoing = width * _EXPANSION
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outgoing, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outgoing)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != outgoing:
            projection = nn.Conv2d(channels, outgoing, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(outgoing))

    def forward(self, maps: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, 4 * width, H / stride, W / stride]``, at least 0."""
        inner = self.relu(self.bn1(self.conv1(maps)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        inner += maps if self.downsample is None else self.downsample(maps)
        output: Tensor = self.relu(inner)
        return output


class ResNet(nn.Module):
    """Layers of a residual network; ``blocks`` counts its bottlenecks by stage."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        channels = _WIDTHS[0]
        for stage, (count, width) in enumerate(zip(blocks, _WIDTHS, strict=True), start=1):
            first = Bottleneck(channels, width, stride=1 if stage == 1 else 2)
            channels = width * _EXPANSION
            others = (Bottleneck(channels, width) for _ in range(count - 1))
            self.add_module(f"layer{stage}", nn.Sequential(first, *others))
        self.fc: nn.Module = nn.Linear(channels, _CLASSES)
        init_weights(self)

    def trunk(self) -> nn.Sequential:
        """Return the layers up to the last feature map."""
        return nn.Sequential(OrderedDict((name, layer) for name, layer in self.named_children() if name != "fc"))


resnet50 = partial(ResNet, (3, 4, 6, 3))
"""Build ResNet50 with random weights."""

resnet152 = partial(ResNet, (3, 8, 36, 3))
"""Build ResNet152 with random weights."""


class VGG19(nn.Module):
    """VGG19: 16 convolutions in ``features``, 3 linear layers in ``classifier``."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in _VGG_STAGES:
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * _VGG_CELLS * _VGG_CELLS, _VGG_WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(_VGG_WIDTH, _VGG_WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(_VGG_WIDTH, _CLASSES),
        )
        init_weights(self, linear_std=0.01)

    def trunk(self) -> nn.Sequential:
        """Return the layers up to the last feature map."""
        return self.features


def init_weights(model: nn.Module, *, linear_std: float | None = None) -> None:
    """Initialize the weights of a network in place, in module order.

    Convolutions get He-normal weights (He et al. 2015, fan-out) and zero biases. Tensors on the meta device
    are skipped, since torch would load its compiler for them.

    Args:
        model: network of convolutions, batch norms (unchanged) and linear layers.
        linear_std: standard deviation of linear weights, with zero biases; None to keep torch's defaults.
    """
    for layer in model.modules():
        if not isinstance(layer, (nn.Conv2d, nn.Linear)) or layer.weight.is_meta:
            continue
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif linear_std is None:
            continue
        else:
            nn.init.normal_(layer.weight, 0, linear_std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


class PretrainedWeights(NamedTuple):
    """Name and URL of weights published by torchvision."""

    name: str
    url: str


RESNET50_WEIGHTS = PretrainedWeights("ResNet50_Weights.IMAGENET1K_V1", f"{_FOLDER}/resnet50-0676ba61.pth")
RESNET152_WEIGHTS = PretrainedWeights("ResNet152_Weights.IMAGENET1K_V1", f"{_FOLDER}/resnet152-394f9c45.pth")
VGG19_WEIGHTS = PretrainedWeights("VGG19_Weights.IMAGENET1K_V1", f"{_FOLDER}/vgg19-dcbb9e9d.pth")

"""Detector of bottom-up attention: Faster R-CNN on ResNet-101 C4 with attributes.

Source: Anderson et al. 2018 (arXiv:1707.07998), ``models/vg/ResNet-101/faster_rcnn_end2end_final/test.prototxt`` in
github.com/peteanderson80/bottom-up-attention. Layers have the names of torchvision's ResNet, with these differences:

- The first pooling has no padding and rounds up.
- The second and third stages have their stride in the first 1×1 convolution.
- The last stage (res5), which runs on each region, has no stride and dilates its 3×3 convolutions by two.

With He initialization, a ResNet of 101 layers would give all regions one feature and saturate every softmax.
`initialize` therefore damps residual branches and shifts the inputs of ReLUs down.

Shapes: ``B`` images, ``N`` regions, ``A`` = 12 anchors of a cell, ``h`` and ``w`` cells of a feature map,
``Q`` boxes of an image before NMS, ``P`` proposals of an image.
"""

import math
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FrozenBatchNorm2d

from extractors.computing.fusion import fold_norm
from extractors.regions.boxes import STRIDE, anchor_grid, apply_deltas, cell_anchors, clip, is_larger
from extractors.regions.nms import nms

CLASSES = 1600
"""Number of classes, without the background (id 0): line n of the file is class n."""

ATTRIBUTES = 400
"""Number of attributes, without "none" (id 0): line n of the file is attribute n."""

PROPOSALS = 300
"""Maximum number of proposals of an image."""

POOLED = 14
"""Rows and columns of a pooled region."""

_CANDIDATES = 6000  # Maximum number of boxes of an image before NMS.
_NMS_IOU_THRESHOLD = 0.7
_MIN_SIDE = 16  # In pixels of the original image, exclusive.
_STEM_SCALE = 1 / 16  # Pixels range from -123 to 153.
_DAMPING = 0.25  # Factor of residual branches.
_SHORTCUT_SCALE = 0.7
_SHIFT = -1.0  # Added before each ReLU except those after a residual sum.
# Standard deviations of outputs for inputs of length 1.
_OUTPUT_STDS = {"rpn.scores": 1.0, "rpn.deltas": 0.3, "head.classes": 6.0, "head.attributes": 3.0}


class Backbone(nn.Module):
    """ResNet-101 up to its fourth stage, ``res4b22`` in Caffe, with stride 16."""

    def __init__(self) -> None:
        super().__init__()
        trunk = _resnet101()
        self.conv1, self.bn1 = trunk.conv1, trunk.bn1
        self.layer1, self.layer2, self.layer3 = trunk.layer1, trunk.layer2, trunk.layer3
        for layer in (self.layer2, self.layer3):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Compute feature maps: float32 ``[B, 3, H, W]`` to float32 ``[B, 1024, h, w]``."""
        stem = F.relu(self.bn1(self.conv1(image)), inplace=True)
        stem = F.max_pool2d(stem, kernel_size=3, stride=2, padding=0, ceil_mode=True)
        maps: Tensor = self.layer3(self.layer2(self.layer1(stem)))
        return maps


class RegionProposals(nn.Module):
    """Region proposal network, which scores and regresses the anchors of each cell."""

    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchors", cell_anchors())
        self.conv = nn.Conv2d(1024, 512, kernel_size=3, padding=1)
        self.scores = nn.Conv2d(512, 2 * len(self.anchors), kernel_size=1)
        self.deltas = nn.Conv2d(512, 4 * len(self.anchors), kernel_size=1)

    def propose(self, maps: Tensor, width: int, height: int, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the boxes with the best scores, before NMS, for images of one size.

        Args:
            maps: float32 ``[B, 1024, h, w]``.
            width: width of the detector's input in pixels.
            height: height of the detector's input in pixels.
            scale: float32 ``[B]``, pixels of the input per pixel of the original images.

        Returns:
            float32 ``[B, Q, 4]``, best first, x1 y1 x2 y2 in pixels of the input; and bool ``[B, Q]``, False for boxes with a
            side of at most 16 pixels of the original image, which come last. Q is at most 6,000.
        """
        hidden = F.relu(self.conv(maps), inplace=True)
        objects = self.scores(hidden).unflatten(1, (2, -1)).softmax(dim=1)[:, 1]  # [B, A, h, w], background first
        shifts = self.deltas(hidden).unflatten(1, (-1, 4))  # [B, A, 4, h, w]
        anchors = anchor_grid(self.anchors, *maps.shape[2:])
        boxes = apply_deltas(anchors, shifts.permute(0, 3, 4, 1, 2).reshape(len(maps), -1, 4))
        boxes = clip(boxes, width, height)
        large = is_larger(boxes, _MIN_SIDE * scale[:, None])
        probabilities = torch.where(large, objects.permute(0, 2, 3, 1).flatten(1), -1)
        best = probabilities.sort(dim=1, descending=True, stable=True).indices[:, :_CANDIDATES]
        return boxes.take_along_dim(best[:, :, None], dim=1), large.take_along_dim(best, dim=1)


def suppress(boxes: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Run NMS on the boxes from `RegionProposals.propose`.

    Returns:
        Proposals: float32 ``[B, P, 4]``, best first; and bool ``[B, P]``, False for padding at the end. P is at most `PROPOSALS`.
    """
    positions, counts = nms(boxes, valid, _NMS_IOU_THRESHOLD, PROPOSALS)
    is_proposal = torch.arange(positions.shape[1], device=boxes.device) < counts[:, None]
    return boxes.take_along_dim(positions[:, :, None], dim=1), is_proposal


class Head(nn.Module):
    """Region head: the last stage of the ResNet (res5), then class and attribute.

    Attributes:
        dtype: dtype of the weights of res5.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.layer4 = _resnet101().layer4
        for block in self.layer4:
            block.conv2.stride, block.conv2.dilation, block.conv2.padding = (1, 1), (2, 2), (2, 2)
        self.layer4[0].downsample[0].stride = (1, 1)
        self.classes = nn.Linear(2048, 1 + CLASSES)
        self.attribute_embedding = nn.Embedding(1 + CLASSES, 256)
        self.attribute_hidden = nn.Linear(2048 + 256, 512)
        self.attributes = nn.Linear(512, 1 + ATTRIBUTES)

    def forward(self, pooled: Tensor) -> Tensor:
        """Compute region features: float32 ``[N, 1024, 14, 14]`` to ``[N, 2048]``."""
        maps: Tensor = self.layer4(pooled.to(dtype=self.dtype, memory_format=torch.channels_last))
        return maps.to(torch.float32).mean(dim=(2, 3))

    def classify(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Classify regions by their features, float32 ``[N, 2048]``.

        Attributes depend on the most probable class, background included.

        Returns:
            Probabilities, float32: ``[N, 1 + CLASSES]``, background first, and ``[N, 1 + ATTRIBUTES]``, "none" first.
        """
        scores = self.classes(features)
        embedded = self.attribute_embedding(scores.argmax(dim=1))
        hidden = F.relu(self.attribute_hidden(torch.cat((features, embedded), dim=1)))
        return scores.softmax(dim=1), self.attributes(hidden).softmax(dim=1)


class Detector(nn.Module):
    """Detector of three parts, which `extractors.regions.faster_rcnn` calls in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone: nn.Module = Backbone()
        self.rpn = RegionProposals()
        self.head = Head()


def pool_regions(maps: Tensor, boxes: Tensor) -> Tensor:
    """Max-pool each region to 14×14 cells with Caffe's rounding.

    Args:
        maps: float32 ``[B, 1024, h, w]``.
        boxes: float32 ``[B, P, 4]``, in pixels of the detector's input.

    Returns:
        float32 ``[B * P, 1024, 14, 14]``.
    """
    images = torch.arange(len(maps), dtype=boxes.dtype, device=boxes.device)[:, None, None].expand(-1, boxes.shape[1], 1)
    pooled: Tensor = torchvision.ops.roi_pool(maps, torch.cat((images, boxes), dim=2).flatten(0, 1), POOLED, 1 / STRIDE)
    return pooled


def build_detector() -> Detector:
    """Build the detector with random weights, see `initialize`."""
    with torch.device("meta"):  # Skip torch's initialization, which takes seconds.
        detector = Detector()
    detector.to_empty(device=torch.get_default_device())
    detector.rpn.anchors.copy_(cell_anchors())
    initialize(detector)
    return detector


def fold_frozen_norms(model: nn.Module) -> None:
    """Fold each batch norm into the preceding convolution in place, in float64."""
    for module in list(model.modules()):
        for conv_name, norm_name in (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1")):
            conv, norm = module._modules.get(conv_name), module._modules.get(norm_name)
            if isinstance(conv, nn.Conv2d) and isinstance(norm, FrozenBatchNorm2d):
                fold_norm(conv, norm)
                setattr(module, norm_name, nn.Identity())


def _resnet101() -> Any:
    return torchvision.models.ResNet(Bottleneck, [3, 4, 23, 3], norm_layer=FrozenBatchNorm2d)


def initialize(detector: nn.Module) -> None:
    """Initialize all weights in place, in module order, from torch's global generator."""
    with torch.no_grad():
        for name, layer in detector.named_modules():
            if isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight)
            elif isinstance(layer, (nn.Conv2d, nn.Linear)):
                if name in _OUTPUT_STDS:
                    nn.init.normal_(layer.weight, std=_OUTPUT_STDS[name] / math.sqrt(layer.weight.shape[1]))
                else:
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
            elif isinstance(layer, FrozenBatchNorm2d):
                for tensor, value in ((layer.weight, 1), (layer.bias, _SHIFT), (layer.running_mean, 0), (layer.running_var, 1)):
                    tensor.fill_(value)
        for module in detector.modules():
            if isinstance(module, Bottleneck):
                block: Any = module
                block.bn3.weight.fill_(_DAMPING)
                block.bn3.bias.zero_()
                if block.downsample is not None:
                    block.downsample[1].weight.fill_(_SHORTCUT_SCALE)
        detector.get_buffer("backbone.bn1.weight").fill_(_STEM_SCALE)

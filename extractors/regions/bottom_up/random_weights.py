"""Random weights with which the output of the detector still depends on the image.

With the usual initialisation a ResNet of 101 layers gives all regions of all images the same feature, and every softmax is
saturated. Here residual branches are damped, so that values keep their size from block to block, and norms shift their input
down, so that each ReLU passes few values and regions stay different. Measured on two photographs: 300 proposals, RPN scores
from 0.001 to 0.9999, features of mean 0.2 to 0.5 (trained ones have 0.5 to 0.8), seven or more classes among 48 proposals.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck
from torchvision.ops import FrozenBatchNorm2d

_STEM_SCALE = 1 / 16  # Pixels range from -123 to 153.
_DAMPING = 0.25  # Factor of residual branches.
_SHORTCUT_SCALE = 0.7
_SHIFT = -1.0  # Added before each ReLU except those after a residual sum.
# Standard deviations of the outputs for inputs of length 1.
_SPREADS = {"rpn.scores": 1.0, "rpn.deltas": 0.3, "head.classes": 6.0, "head.attributes": 3.0}


def initialise(detector: nn.Module) -> None:
    """Draw all weights, in place, in the order of the modules, from torch's global generator.

    Args:
        detector: an `extractors.regions.bottom_up.network.Detector`; its present values do not matter.
    """
    with torch.no_grad():
        for name, module in detector.named_modules():
            _initialise(name, module)
        for module in detector.modules():
            if isinstance(module, Bottleneck):
                _damp(module)
        detector.get_buffer("backbone.bn1.weight").fill_(_STEM_SCALE)


def _initialise(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
    elif isinstance(module, (nn.Conv2d, nn.Linear)):
        if name in _SPREADS:
            nn.init.normal_(module.weight, std=_SPREADS[name] / math.sqrt(module.weight.shape[1]))
        else:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, FrozenBatchNorm2d):
        for tensor, value in ((module.weight, 1), (module.bias, _SHIFT), (module.running_mean, 0), (module.running_var, 1)):
            tensor.fill_(value)


def _damp(block: Any) -> None:
    block.bn3.weight.fill_(_DAMPING)
    block.bn3.bias.zero_()
    if block.downsample is not None:
        block.downsample[1].weight.fill_(_SHORTCUT_SCALE)

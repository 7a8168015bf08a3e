"""The models that extractors are compared with: as one would run them over ready tensors, with batch norm folded, and compiled.

Letters in shapes: ``B`` images of a batch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

__all__ = ["BATCH", "CROPS", "Forward", "bare", "compiled", "folded", "inputs"]

Forward = Callable[[Tensor], Tensor]

BATCH = {
    "resnet50-pool": 16,
    "vgg19-10crop": 2,
    "vgg19-10crop-caffe": 2,
    "vgg19-grid": 2,
    "resnet152-grid": 2,
    "timm:resnet18.a1_in1k": 16,
    "faster-rcnn-36": 2,
}
"""Images that an extractor takes at once here; also the extractors that are measured."""

CROPS = {"vgg19-10crop": 10, "vgg19-10crop-caffe": 10}
"""Crops of an image, where it is more than one."""

_SIDES = {"vgg19-grid": 448, "resnet152-grid": 448}
_SIDE = 224


def bare(extractor: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the model of an extractor, with random weights: channels last, of one type throughout; None of its preprocessing."""
    torch.manual_seed(0)
    if extractor == "resnet50-pool":
        model = torchvision.models.resnet50(weights=None)
        model.fc = nn.Identity()
    elif extractor.startswith("timm:"):
        import timm

        model = timm.create_model(extractor.removeprefix("timm:"), pretrained=False, num_classes=0)
    elif extractor == "resnet152-grid":
        model = nn.Sequential(*list(torchvision.models.resnet152(weights=None).children())[:-2])
    elif extractor == "vgg19-grid":
        model = torchvision.models.vgg19(weights=None).features
    else:
        model = torchvision.models.vgg19(weights=None)
        model.classifier = model.classifier[:5]
    return model.eval().requires_grad_(False).to(memory_format=torch.channels_last).to(dtype)


def inputs(extractor: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a batch of noise for the model of an extractor: ``[B * crops, 3, side, side]``, channels last."""
    side = _SIDES.get(extractor, _SIDE)
    batch = torch.randn(BATCH[extractor] * CROPS.get(extractor, 1), 3, side, side)
    return batch.contiguous(memory_format=torch.channels_last).to(dtype)


def folded(model: nn.Module) -> nn.Module:
    """Return the model with each batch norm folded into its convolution, by torch's own transformation."""
    from torch.fx.experimental.optimization import fuse

    return fuse(model, inplace=True).to(memory_format=torch.channels_last)


def compiled(model: nn.Module) -> Forward | str:
    """Compile the model with inductor and frozen weights; return in words why not, without a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler {compiler!r}"
    import torch._inductor.config

    torch._inductor.config.freezing = True
    torch._dynamo.reset()
    return torch.compile(model, backend="inductor", dynamic=False)

"""Images, and models that extractors are compared with: as one runs them over ready tensors, batch norm folded, compiled.

Letters in shapes: ``B`` images of a batch.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

import extractors
from extractors.regions.bottom_up.network import build_detector, pool_regions, suppress
from extractors.regions.bottom_up.preprocessing import preprocess_image, resized_wh, scale_of, send
from pipelines.demo.scenes import draw, make_scenes

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


def inputs(extractor: str, dtype: torch.dtype = torch.float32, images: int | None = None) -> Tensor:
    """Return a batch of noise for the model of an extractor, ``[B * crops, 3, side, side]``, channels last; B is of `BATCH`."""
    side = _SIDES.get(extractor, _SIDE)
    batch = torch.randn((images or BATCH[extractor]) * CROPS.get(extractor, 1), 3, side, side)
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


def make_photographs(folder: Path, count: int) -> None:
    """Draw scenes as large as a photograph of Flickr30k."""
    for name, scene in make_scenes(count):
        picture = draw(scene)
        picture.resize((500, 500 * picture.height // picture.width)).save(folder / f"{name}.jpg", quality=90)


def ready(folder: str) -> list[torch.Tensor]:
    """Decode the images of a folder."""
    return [
        torch.from_numpy(np.array(extractors.decode_image(path.read_bytes()))).permute(2, 0, 1)
        for path in sorted(Path(folder).iterdir())
    ]


def layer_by_layer() -> Callable[[list[torch.Tensor]], float]:
    """Return images per minute of the detector as ports of the original run it: in float32, one image after the other.

    All regions of an image go through the last stage together, as convolutions, with all threads at each layer, and there are 1,600
    calls of torchvision's suppression.
    """
    torch.manual_seed(0)
    detector = build_detector().eval().requires_grad_(False).to(memory_format=torch.channels_last)

    def detect(image: torch.Tensor) -> None:
        height, width = image.shape[1:]
        scale = scale_of(width, height)
        maps = detector.backbone(
            preprocess_image(send(image, torch.device("cpu"))).contiguous(memory_format=torch.channels_last)
        )
        candidates = detector.rpn.propose(maps, *resized_wh(width, height), torch.tensor([scale]))
        boxes, are_kept = suppress(*candidates)
        boxes = boxes[0, : int(are_kept.sum())]
        features = detector.head(pool_regions(maps, boxes[None]))
        classes, _ = detector.head.classify(features)
        corners = boxes / scale + torch.tensor([0, 0, 1, 1])
        best = torch.zeros(len(boxes))
        for scores in classes[:, 1:].t():
            kept = torchvision.ops.nms(corners, scores, 0.3)
            best[kept] = torch.maximum(best[kept], scores[kept])
        best.topk(min(36, len(best)))

    def run(pixels: list[torch.Tensor]) -> float:
        with torch.inference_mode():
            started = time.perf_counter()
            for image in pixels:
                detect(image)
            return 60 * len(pixels) / (time.perf_counter() - started)

    return run

"""What is measured: extractors with the sizes of their batches, and the bare models that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pipelines.demo.scenes import draw, make_scenes
from tests.benchmarks.baselines import bare, inputs

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PHOTOGRAPH_WH = (500, 375)  # As in Flickr30k.


@dataclass(frozen=True)
class Subject:
    """An extractor.

    Attributes:
        name: its name.
        batches: images of the batches that are measured.
        is_quick: whether a CPU runs it in a second.
    """

    name: str
    batches: tuple[int, ...]
    is_quick: bool = False


SUBJECTS = (
    Subject("resnet50-pool", (1, 16, 128, 256)),
    Subject("vgg19-10crop", (1, 4, 16)),
    Subject("vgg19-10crop-caffe", (16,)),
    Subject("vgg19-grid", (1, 16, 64)),
    Subject("resnet152-grid", (1, 16, 64)),
    Subject("faster-rcnn-36", (1, 2, 8, 16)),
    Subject("timm:resnet18", (1, 16, 128, 256), is_quick=True),
    Subject("timm:vit_tiny_patch16_224", (1, 16, 128, 256)),
)


def precisions_of(device: torch.device) -> tuple[str, ...]:
    """Return the precisions in which extractors compute on a device."""
    return ("fp32", "bf16") if device.type == "cpu" else PRECISIONS


def photographs(count: int) -> list[Image.Image]:
    """Draw scenes as large as photographs."""
    return [draw(scene).resize(PHOTOGRAPH_WH) for _, scene in make_scenes(count)]


def bare_model(
    name: str, device: torch.device, precision: str
) -> tuple[Callable[[Tensor], Any], Callable[[int], Tensor]] | None:
    """Return the model of an extractor as one would run it over ready tensors, and what makes a batch of those.

    None for the detector of regions, of which no package has a model.
    """
    if name == "faster-rcnn-36":
        return None
    model = bare(name, DTYPES[precision]).to(device)

    def make_batch(images: int) -> Tensor:
        return inputs(name, DTYPES[precision], images).to(device)

    return model, make_batch


@contextmanager
def fastest(precision: str) -> Iterator[None]:
    """Let a bare model be as fast as torch makes it: cuDNN tries its algorithms, and TF32 is as the precision says."""
    cudnn = torch.backends.cudnn
    switches: tuple[Any, ...] = (cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    before = cudnn.benchmark, cudnn.deterministic, [switch.fp32_precision for switch in switches]
    cudnn.benchmark, cudnn.deterministic = True, False
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        with torch.inference_mode():
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before[:2]
        for switch, value in zip(switches, before[2], strict=True):
            switch.fp32_precision = value

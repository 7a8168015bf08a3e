"""``faster-rcnn-36`` with ``--backend detectron2``, from detectron2's modules.

Network, config file (``faster_rcnn_vg.yaml``) and box arithmetic are detectron2's. Resizing and selection are
those of `extractors.regions.faster_rcnn`. Features of the two backends differ by rounding only.

Shapes: ``B`` images, ``H0`` and ``W0`` pixels of an image, ``H`` and ``W`` pixels of the uploaded image,
``P`` proposals of an image, ``D`` width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from detectron2.structures import Boxes
from PIL import Image
from torch import Tensor

from extractors.base import Description, RegionExtractor, sample_image
from extractors.computing.cpu_parallel import run_single_threaded
from extractors.computing.devices import cast_layers, precision_context
from extractors.computing.oom import BatchLimits, run_with_oom_retry
from extractors.images.preprocessing import check_resized
from extractors.options import ExtractorOptions
from extractors.regions import faster_rcnn
from extractors.regions.bottom_up.preprocessing import MIN_SIDE
from extractors.regions.bottom_up.weights import detectron2_names
from extractors.regions.detectron2_backend.networks import (
    CONFIG,
    Network,
    VisualGenomeNetwork,
    build_detectron2,
    read_model_config,
)
from extractors.regions.selection import SAMPLE_BOXES, Detections, columns, empty_regions, gather_regions
from extractors.weights.resolve import Weights
from schemas.errors import UsageError

_REGIONS = 20  # Regions per forward of res5 on a CPU.

_Result = TypeVar("_Result")


class Sized(NamedTuple):
    """RGB pixels of an image, uint8 ``[3, H, W]``, and original size, W0 and H0."""

    pixels: Tensor
    width: int
    height: int


class Detectron2Regions(RegionExtractor):
    """Region extractor of a detectron2 network; only res5 computes in 16 bits."""

    def __init__(self, description: Description, settings: ExtractorOptions, network: Network, device: torch.device) -> None:
        super().__init__(description, device)
        self._network = network
        self._options = settings.regions
        self._device = device
        self._precision = settings.precision
        self._limits = BatchLimits()
        model = network.model.eval().requires_grad_(False)
        self._dtype = cast_layers(model.roi_heads.res5, settings.precision)
        model.to(device).to(memory_format=torch.channels_last)

    def preprocess(self, image: Image.Image) -> Any:
        """Return a `Sized` of the pixels that the network uploads.

        Raises:
            DecodeError: the image is so thin that its shorter side would be less than `MIN_SIDE`.
        """
        check_resized(image, self._network.resized_wh(*image.size), min_side=MIN_SIDE)
        return Sized(self._network.pixels(image), *image.size)

    def extract_columns(self, batch: Sequence[Sized]) -> dict[str, np.ndarray]:
        """Detect the regions of B images from `preprocess`; B may be 0.

        Returns:
            Columns of kind ``regions`` except ``image_id``. On a CPU the bytes do not depend on batch and thread count.
        """
        with precision_context(self._precision, self._device), torch.inference_mode():
            regions = torch.cat([self._detect(image) for image in batch]) if batch else empty_regions(self.spec)
        return columns([(image.width, image.height) for image in batch], regions, self.spec)

    def sample(self) -> np.ndarray:
        """Compute the features of fixed boxes, since rounding may select other ones."""
        with precision_context(self._precision, self._device), torch.inference_mode():
            maps = self._run(self._maps, self.preprocess(sample_image()))
            return self._features(maps, SAMPLE_BOXES.to(self._device)).cpu().numpy()

    def _detect(self, image: Sized) -> Tensor:
        """Return the result of `gather_regions` for an image."""
        _, width, height = image
        maps = self._run(self._maps, image)
        boxes = self._run(self._network.propose, maps, width, height)
        features = self._features(maps, boxes)
        labels = self._run(self._network.classify, features)
        boxes = self._network.original(boxes, width, height)
        valid = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
        return gather_regions(Detections(*(values[None] for values in (boxes, valid, features, *labels))), self._options)

    def _run(self, function: Callable[..., _Result], *values: Any) -> _Result:
        if self._device.type != "cpu":
            return function(*values)
        return run_single_threaded(lambda item: function(*item), [values])[0]

    def _maps(self, image: Sized) -> Tensor:
        """Compute the feature map of an image: float32 ``[1, channels, h, w]``."""
        values = self._network.prepare(image.pixels, self._device).contiguous(memory_format=torch.channels_last)
        (maps,) = self._network.model.backbone(values).values()
        return maps

    def _features(self, maps: Tensor, boxes: Tensor) -> Tensor:
        """Compute the features of boxes: ``[P, 4]`` to float32 ``[P, D]``."""

        def extract(chunk: Tensor) -> Tensor:
            heads = self._network.model.roi_heads
            regions = heads.pooler([maps], [Boxes(chunk)]).to(self._dtype)
            return heads.res5(regions.contiguous(memory_format=torch.channels_last)).to(torch.float32).mean(dim=(2, 3))

        if not len(boxes):
            return boxes.new_zeros((0, self.spec.shape[1]))
        if self._device.type == "cpu":
            return torch.cat(run_single_threaded(extract, boxes.split(_REGIONS)))
        return run_with_oom_retry(extract, boxes, self._limits)


find_weights = faster_rcnn.find_weights


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    refuse_compile(settings)
    return faster_rcnn.describe(settings, weights)


def load(settings: ExtractorOptions, weights: Weights, device: torch.device) -> Detectron2Regions:
    """Create the extractor, see `extractors.catalogue.ExtractorModule`."""
    description = describe(settings, weights)
    with torch.random.fork_rng(devices=[]):
        model: Any = build_detectron2(read_model_config(CONFIG))
    model.load_state_dict({theirs: weights.state[ours] for ours, theirs in detectron2_names().items()})
    (anchors,) = model.proposal_generator.anchor_generator.cell_anchors
    anchors.copy_(weights.state["rpn.anchors"])
    return Detectron2Regions(description, settings, VisualGenomeNetwork(model), device)


def refuse_compile(settings: ExtractorOptions) -> None:
    """Raise `UsageError` for ``compile``."""
    if settings.compile:
        raise UsageError("--compile does not work with detectron2's models: leave it out, or pass --backend torchvision")

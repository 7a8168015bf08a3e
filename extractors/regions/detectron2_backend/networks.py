"""Detectron2 models with a ResNet C4, divided into the steps that `extractors.regions.detectron2_backend.extractor` runs.

`VisualGenomeNetwork` is the detector of bottom-up attention (see `modules`), `StockNetwork` a model from detectron2's own classes.

Letters in shapes: ``H0`` and ``W0`` pixels of an image, ``H`` and ``W`` of the network's input, ``h`` and ``w`` cells of a
feature map, ``P`` proposals of an image, ``N`` regions, ``D`` width of a feature, ``C`` classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from detectron2.config import get_cfg
from detectron2.data.transforms import ResizeShortestEdge, ResizeTransform
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.structures import ImageList
from PIL import Image
from torch import Tensor, nn

from extractors.computing.devices import upload
from extractors.regions.bottom_up.input import prepare, resized_wh, scale_of, send
from extractors.regions.detectron2_backend.modules import InputSize


class Network(Protocol):
    """The steps from an image to its regions. ``model`` is detectron2's ``GeneralizedRCNN``."""

    model: Any

    def resized_wh(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the input for an image of this size."""

    def pixels(self, image: Image.Image) -> Tensor:
        """Return what goes to the device, uint8 R, G, B: ``[3, H0, W0]`` if the device resizes, ``[3, H, W]`` if the host does."""

    def prepare(self, pixels: Tensor, device: torch.device) -> Tensor:
        """Make the input: what `pixels` returned to float32 ``[1, 3, H, W]`` on a device."""

    def propose(self, maps: Tensor, width: int, height: int) -> Tensor:
        """Return proposals ``[P, 4]`` in pixels of the input, given the map ``[1, channels, h, w]`` of an image of this size."""

    def original(self, boxes: Tensor, width: int, height: int) -> Tensor:
        """Convert boxes ``[P, 4]`` from pixels of the input to pixels of the image of this size."""

    def classify(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities of classes ``[N, 1 + C]``, background first, and of attributes, none first, for ``[N, D]``."""


def merged_config(path: Path) -> Any:
    """Merge a config file, and the files that it names as ``_BASE_``, into detectron2's defaults. Nothing in them is run."""
    cfg = get_cfg()
    cfg.merge_from_file(str(path), allow_unsafe=False)
    return cfg


def build(cfg: Any) -> nn.Module:
    """Build the model of a config with random weights, on the CPU or the device of a ``with torch.device`` block."""
    return META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE)(cfg)


class VisualGenomeNetwork:
    """The detector of bottom-up attention.

    Args:
        model: made by `build` of `extractors.regions.detectron2_backend.modules.CONFIG`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def resized_wh(self, width: int, height: int) -> tuple[int, int]:
        """Return what `extractors.regions.bottom_up.input.resized_wh` returns."""
        return resized_wh(width, height)

    def pixels(self, image: Image.Image) -> Tensor:
        """Return the pixels as they are, ``[3, H0, W0]``: the device resizes them."""
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def prepare(self, pixels: Tensor, device: torch.device) -> Tensor:
        """Make the input with `extractors.regions.bottom_up.input.prepare`: detectron2 has no such resizing."""
        return prepare(send(pixels, device))

    def propose(self, maps: Tensor, width: int, height: int) -> Tensor:
        """See `Network.propose`."""
        columns, rows = resized_wh(width, height)
        return _proposals(self.model, maps, InputSize(rows, columns, scale_of(width, height)))

    def original(self, boxes: Tensor, width: int, height: int) -> Tensor:
        """See `Network.original`."""
        return boxes / boxes.new_full((), scale_of(width, height))  # As `faster_rcnn` divides.

    def classify(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Network.classify`."""
        classes, attributes = self.model.roi_heads.box_predictor(features)
        return classes.softmax(dim=1), attributes.softmax(dim=1)


class StockNetwork:
    """A model from detectron2's own classes: its config says how images are resized and normalised.

    Args:
        model: made by `build`.
        inputs: the section ``INPUT`` of its config.
    """

    def __init__(self, model: Any, inputs: Any) -> None:
        self.model = model
        self._inputs = inputs

    def resized_wh(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that detectron2's ``ResizeShortestEdge`` makes."""
        if not self._inputs.MIN_SIZE_TEST:
            return width, height
        rows, columns = ResizeShortestEdge.get_output_shape(
            height, width, self._inputs.MIN_SIZE_TEST, self._inputs.MAX_SIZE_TEST
        )
        return columns, rows

    def pixels(self, image: Image.Image) -> Tensor:
        """Resize 8-bit values with Pillow, as detectron2's ``DefaultPredictor`` does, to ``[3, H, W]``."""
        columns, rows = self.resized_wh(*image.size)
        resize = ResizeTransform(image.height, image.width, rows, columns, Image.Resampling.BILINEAR)
        # A copy, since Pillow's memory must not be written to, and a tensor's can be.
        return torch.from_numpy(np.array(resize.apply_image(np.array(image)))).permute(2, 0, 1)

    def prepare(self, pixels: Tensor, device: torch.device) -> Tensor:
        """Normalise as detectron2's ``DefaultPredictor`` does."""
        values = upload(pixels.permute(1, 2, 0), device).to(torch.float32).permute(2, 0, 1)
        if self._inputs.FORMAT == "BGR":
            values = values.flip(0)
        return self.model.preprocess_image([{"image": values}]).tensor

    def propose(self, maps: Tensor, width: int, height: int) -> Tensor:
        """See `Network.propose`."""
        columns, rows = self.resized_wh(width, height)
        return _proposals(self.model, maps, (rows, columns))

    def original(self, boxes: Tensor, width: int, height: int) -> Tensor:
        """Convert boxes as detectron2's ``detector_postprocess`` does, see `Network.original`."""
        columns, rows = self.resized_wh(width, height)
        return boxes * boxes.new_tensor((width / columns, height / rows)).repeat(2)

    def classify(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Classify features, see `Network.classify`. As the model has no attributes, one that no region has stands in."""
        predictor = self.model.roi_heads.box_predictor
        (classes,) = predictor.predict_probs(predictor(features), [features])
        attributes = features.new_tensor((1.0, 0.0)).expand(len(features), 2)
        return classes.roll(1, dims=1), attributes


def _proposals(model: Any, maps: Tensor, size: tuple[float, ...]) -> Tensor:
    (name,) = model.proposal_generator.in_features
    (instances,), _ = model.proposal_generator(ImageList(maps, [size]), {name: maps}, None)
    return instances.proposal_boxes.tensor

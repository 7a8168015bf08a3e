"""``faster-rcnn-36``: the regions of bottom-up attention (Anderson et al. 2018) with their features, boxes, classes and attributes.

The regions are those that the original Caffe release and MILVLG/bottom-up-attention.pytorch find with the same weights: features
agree to 6e-6 of the largest. Class and attribute ids count from 1, the first line of the files with their names; 0 is background,
or no attribute. A box must be larger than 16 pixels of the image each way; an image without such a proposal has no regions.

In the 16-bit precisions only the last stage computes in 16 bits: the proposals are those of float32.

Letters in shapes: ``B`` images, ``P`` proposals of an image, at most 300, ``R`` = ``max_regions``, ``H0`` and ``W0`` pixels of an
image, ``D`` = 2048 width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from extractors.base import Description, RegionExtractor
from extractors.computing.devices import cast_layers, compiled, numerics, upload
from extractors.computing.memory import release_unused_memory
from extractors.computing.passes import Fitted, in_halves, run_single_threaded
from extractors.images.preprocess import check_resized
from extractors.regions.bottom_up.input import INPUT, LEAST_SIDE, prepare, resized_wh, scale_of
from extractors.regions.bottom_up.last_stage import LastStage
from extractors.regions.bottom_up.network import PROPOSALS, build, fold_norms, pool
from extractors.regions.bottom_up.weights import read_detector
from extractors.regions.class_names import ATTRIBUTES, CLASSES
from extractors.regions.selection import Detections, columns
from extractors.settings import RegionOptions, Settings
from extractors.weights.finding import Architecture, Weights, resolve_weights
from schemas.features import FeatureSpec

__all__ = ["ARCHITECTURE", "FasterRCNNRegions", "describe", "find_weights", "load"]

_BATCH = 2  # Images; more take memory and do not make a CPU faster.
_REGIONS = 10  # Regions of one pass of the last stage on a CPU; more are hardly faster and take memory in every thread.

ARCHITECTURE = Architecture(
    build=build,
    read=read_detector,
    without_default="no package distributes them. Pass with --weights PATH the original "
    "resnet101_faster_rcnn_final_iter_320000.caffemodel (github.com/peteanderson80/bottom-up-attention), "
    "bua-caffe-frcn-r101-k36.pth (github.com/MILVLG/bottom-up-attention.pytorch), faster_rcnn_from_caffe.pkl "
    "(github.com/airsplay/py-bottom-up-attention), or the pytorch_model.bin of huggingface.co/unc-nlp/frcnn-vg-finetuned; "
    "--weights random:0 runs without, untrained",
)


class FasterRCNNRegions(RegionExtractor):
    """The detector and the choice of its regions.

    Args:
        settings: what is asked of the extractor.
        weights: from `find_weights`.
        device: from `extractors.computing.devices.resolve_device`.
    """

    def __init__(self, settings: Settings, weights: Weights, device: torch.device) -> None:
        super().__init__(describe(settings, weights))
        self._options = settings.regions
        self._device = device
        self._precision = settings.precision
        self._fitted = Fitted()
        with torch.device("meta"):
            model = build()
        model.load_state_dict(weights.state, assign=True)
        model.eval().requires_grad_(False)
        fold_norms(model)
        # This stage is nine tenths of the work; in 16 bits the rest would move the proposals, and with them the boxes kept.
        cast_layers(model.head.layer4, settings.precision)
        self._model = model.to(device).to(memory_format=torch.channels_last)
        self._head: Callable[[Tensor], Tensor] = compiled(self._model.head, device, enabled=settings.compile)
        if device.type == "cpu" and settings.precision == "fp32":
            self._head = LastStage(model.head.layer4)
            release_unused_memory()

    def preprocess(self, image: Image.Image) -> Tensor:
        """Return the pixels as they are: the detector resizes them on the device.

        Returns:
            uint8 ``[3, H0, W0]``, channels R, G, B.

        Raises:
            DecodeError: the image is so thin that its shorter side would be less than `LEAST_SIDE`.
        """
        check_resized(image, resized_wh(*image.size), least=LEAST_SIDE)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def extract_columns(self, batch: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """Find the regions of each image.

        Args:
            batch: B tensors, uint8 ``[3, H0, W0]``, channels R, G, B; B may be 0.

        Returns:
            The columns of `schemas.kinds.regions_schema` except ``image_id``. On a CPU an image has the same bytes in any batch and
            with any number of threads.
        """
        detections = self._on_cpu(batch) if self._device.type == "cpu" else self._on_gpu(batch)
        return columns(detections, self._options, self.spec)

    def _on_cpu(self, batch: Sequence[Tensor]) -> list[Detections]:
        """Run passes in one thread each, on one image or on a few regions of one image."""
        maps = run_single_threaded(self._map, batch)
        release_unused_memory()
        boxes = run_single_threaded(lambda i: self._propose(batch[int(i)], maps[int(i)]), torch.arange(len(batch)))
        # The position of its image stands before each box.
        chunks = [
            part
            for i, of_image in enumerate(boxes)
            if len(of_image)
            for part in F.pad(of_image, (1, 0), value=i).split(_REGIONS)
        ]
        features = run_single_threaded(lambda part: self._head(pool(maps[int(part[0, 0])], part[:, 1:])), chunks)
        together = torch.cat([torch.zeros(0, self.spec.shape[1]), *features])
        per_image = together.split([len(of_image) for of_image in boxes])
        scores = run_single_threaded(lambda values: torch.cat(self._model.head.classify(values), dim=1), per_image)
        return [_detections(*of_image) for of_image in zip(batch, boxes, per_image, scores, strict=True)]

    def _on_gpu(self, batch: Sequence[Tensor]) -> list[Detections]:
        """Run the head on the regions of all images together, those of each image padded to `PROPOSALS`."""
        if not batch:
            return []
        with numerics(self._precision, self._device), torch.inference_mode():
            maps = [self._map(image) for image in batch]
            boxes = [self._propose(*of_image) for of_image in zip(batch, maps, strict=True)]
            padded = [F.pad(of_image, (0, 0, 0, PROPOSALS - len(of_image))) for of_image in boxes]

            def head(positions: Tensor) -> Tensor:
                return self._head(torch.cat([pool(maps[i], padded[i]) for i in positions])).view(len(positions), PROPOSALS, -1)

            features = in_halves(head, torch.arange(len(batch)), self._fitted)  # [B, P, D]
            scores = torch.cat(self._model.head.classify(features.flatten(0, 1)), dim=1).view(*features.shape[:2], -1)
            per_image = zip(batch, boxes, features, scores, strict=True)
            return [_detections(image, b, f[: len(b)], s[: len(b)]) for image, b, f, s in per_image]

    def _map(self, image: Tensor) -> Tensor:
        """Compute the feature map: uint8 ``[3, H0, W0]`` on any device to float32 ``[1, 1024, h, w]`` on the extractor's."""
        values = prepare(upload(image, self._device))
        return self._model.backbone(values.contiguous(memory_format=torch.channels_last))

    def _propose(self, image: Tensor, maps: Tensor) -> Tensor:
        """Return the proposals of an image and its map: float32 ``[P, 4]``, in pixels of the detector's input."""
        height, width = image.shape[1:]
        return self._model.rpn.propose(maps, *resized_wh(width, height), scale_of(width, height))


def _detections(image: Tensor, boxes: Tensor, features: Tensor, scores: Tensor) -> Detections:
    height, width = image.shape[1:]
    classes, attributes = scores.split((1 + CLASSES, 1 + ATTRIBUTES), dim=1)
    # Not by a number of the host: see `extractors.images.preprocess.Normalizer`.
    boxes = boxes / boxes.new_full((), scale_of(width, height))
    return Detections(width, height, boxes, features, classes, attributes)


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Find weights, see `extractors.catalogue.ExtractorModule`."""
    return resolve_weights(request, ARCHITECTURE)


def describe(settings: Settings, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    named, options = _named(settings.spec, settings.regions), settings.regions
    parameters = settings.parameters(
        weights, name=named.name, transform=INPUT, backend=options.backend, regions=options.parameters()
    )
    return Description(named, parameters, kind="regions", batch_size=_BATCH, classes=CLASSES, attributes=ATTRIBUTES)


load = FasterRCNNRegions


def _named(spec: FeatureSpec, regions: RegionOptions) -> FeatureSpec:
    """Return the spec with the name and shape of the regions asked for."""
    least, most = regions.min_regions, regions.max_regions
    if (most, spec.shape[1]) == spec.shape and least == most:
        return spec
    source = spec.source.replace(f"{spec.shape[0]} best", f"{least} to {most} best")
    return replace(spec, name=f"faster-rcnn-{least}-{most}", shape=(most, spec.shape[1]), source=source)

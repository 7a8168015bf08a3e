"""``faster-rcnn-36``: the regions of bottom-up attention (Anderson et al. 2018).

Regions equal those of the original Caffe release and of MILVLG/bottom-up-attention.pytorch. Class and
attribute ids count from 1, the first line of the files with their names; 0 is background or no attribute.
Sides of a box exceed 16 pixels of the image; an image without such a proposal has no regions.

In the 16-bit precisions only the res5 head computes in 16 bits, so that proposals are those of float32.

Shapes: ``B`` images, ``P`` proposals of an image, at most 300, ``Q`` boxes of an image before NMS, ``R`` =
``max_regions``, ``H0`` and ``W0`` pixels of an image, ``D`` = 2048 width of a feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from extractors.base import Description, RegionExtractor, sample_image
from extractors.computing.cpu_parallel import run_single_threaded
from extractors.computing.devices import cast_layers, precision_context
from extractors.computing.fused_conv2d import can_fuse_in
from extractors.computing.fusion import optimize_for_inference, trace
from extractors.computing.oom import BatchLimits, release_unused_memory, run_with_oom_retry
from extractors.computing.winograd import prefers_onednn
from extractors.images.preprocessing import check_resized
from extractors.options import ExtractorOptions
from extractors.regions.bottom_up.network import (
    ATTRIBUTES,
    CLASSES,
    POOLED,
    build_detector,
    fold_frozen_norms,
    pool_regions,
    suppress,
)
from extractors.regions.bottom_up.preprocessing import INPUT, MIN_SIDE, Original, preprocess_image, resized_wh, send
from extractors.regions.bottom_up.res5_head import (
    GroupedStage,
    LastStage,
    MergedStage,
    PlainStage,
    ProductStage,
    distinct_bins,
    pool_bins,
)
from extractors.regions.bottom_up.weights import read_detector
from extractors.regions.boxes import STRIDE
from extractors.regions.selection import SAMPLE_BOXES, SAMPLE_SIDE, Detections, columns, empty_regions, gather_regions
from extractors.weights.resolve import Architecture, Weights

_BATCH = 2  # Larger batches are not faster on a CPU.
_REGIONS = 10  # Regions per forward of the res5 head on a CPU; more take memory in every thread.
_BINS = _REGIONS * POOLED**2  # Distinct bins per forward of the shared layers.
_SHARED_BINS = 20_000  # Maximum number of distinct bins in memory, 0.2 GB in float32.
_COMPARED = (1, 3, 224, 224)  # Shape of the noise for the comparison of cuDNN's backbone with torch's.
_REGION = (1024, 14, 14)  # Shape of a pooled region.

ARCHITECTURE = Architecture(
    build=build_detector,
    read=read_detector,
    without_default="no package distributes them. Pass with --weights PATH the original "
    "resnet101_faster_rcnn_final_iter_320000.caffemodel (github.com/peteanderson80/bottom-up-attention), "
    "bua-caffe-frcn-r101-k36.pth (github.com/MILVLG/bottom-up-attention.pytorch), "
    "faster_rcnn_from_caffe.pkl (github.com/airsplay/py-bottom-up-attention), or the pytorch_model.bin of "
    "huggingface.co/unc-nlp/frcnn-vg-finetuned; --weights random:0 runs without, untrained",
)


class FasterRCNNRegions(RegionExtractor):
    """Detector with the selection of regions."""

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        super().__init__(describe(settings, weights), device)
        self._options = settings.regions
        self._device = device
        self._precision = settings.precision
        self._limits = BatchLimits()
        model = ARCHITECTURE.load(weights)
        fold_frozen_norms(model)
        # The head is most of the work. Other layers in 16 bits would change the proposals.
        model.head.dtype = cast_layers(model.head.layer4, settings.precision)
        self._model = model.to(device).to(memory_format=torch.channels_last)
        # Products and convolutions differ in their last bits, so the choice depends on the precision, not on a measurement.
        is_product = settings.precision == "fp32"
        if device.type == "cuda":
            if not settings.compile:
                self._fuse(is_product)
            head: Callable[[Tensor], Tensor] = ProductStage(self._model.head.layer4) if is_product else self._model.head
            self._head = torch.compile(head) if settings.compile else head
        else:
            self._head = self._stage = self._stage_on_cpu(is_product)
            release_unused_memory()

    def _fuse(self, is_product: bool) -> None:
        """Fuse the convolutions on a GPU except those that `ProductStage` replaces."""
        model, device, precision = self._model, self._device, self._precision
        model.backbone = optimize_for_inference(trace(model.backbone), _COMPARED, device, precision=precision, compile=False)
        if not is_product:
            stage = trace(model.head.layer4)
            model.head.layer4 = optimize_for_inference(stage, (_REGIONS, *_REGION), device, precision=precision, compile=False)

    def _stage_on_cpu(self, is_product: bool) -> LastStage:
        """Choose the implementation of the res5 head.

        The backbone keeps torch's layers: fused convolutions have other bits and need weights packed per image size.
        """
        head = self._model.head
        if not is_product and not (self._precision == "bf16" and can_fuse_in(head.dtype)):
            return PlainStage(head)
        layer4 = head.layer4
        del head.layer4  # The stage holds packed weights.
        if not is_product:
            return MergedStage(layer4, _REGIONS)
        return GroupedStage(layer4, _REGIONS) if prefers_onednn() else ProductStage(layer4)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Return the RGB pixels, uint8 ``[3, H0, W0]``, which the device resizes.

        Raises:
            DecodeError: the image is so thin that its shorter side would be less than `MIN_SIDE`.
        """
        check_resized(image, resized_wh(*image.size), min_side=MIN_SIDE)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def extract_columns(self, batch: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """Detect the regions of B images from `preprocess`; B may be 0.

        Returns:
            Columns of kind ``regions`` except ``image_id``. On a CPU the bytes do not depend on batch and thread count.
        """
        detect = self._detect_on_cpu if self._device.type == "cpu" else self._detect_on_gpu
        regions = detect(batch) if batch else empty_regions(self.spec)
        return columns([(image.shape[2], image.shape[1]) for image in batch], regions, self.spec)

    def sample(self) -> np.ndarray:
        """Compute the features of fixed boxes, since rounding may select other ones."""
        original = send(self.preprocess(sample_image()), self._device)
        with precision_context(self._precision, self._device), torch.inference_mode():
            pixels = preprocess_image(original)[:, :, :SAMPLE_SIDE, :SAMPLE_SIDE]
            maps = self._model.backbone(pixels.contiguous(memory_format=torch.channels_last))
            boxes = SAMPLE_BOXES.to(self._device)
            if self._device.type == "cpu":
                return self._features(maps.to(self._model.head.dtype), boxes).numpy()
            return self._head(pool_regions(maps, boxes[None])).float().cpu().numpy()

    def _detect_on_cpu(self, batch: Sequence[Tensor]) -> Tensor:
        """Run single-threaded forwards on one image or on a few regions of one image."""
        images = [send(image, self._device) for image in batch]
        maps = run_single_threaded(lambda image: self._maps([image]), images)
        release_unused_memory()

        def propose(i: int) -> Tensor:
            boxes, valid = suppress(*self._propose(maps[i], [images[i]]))
            return boxes[:, : int(valid.sum())]

        boxes = run_single_threaded(propose, range(len(batch)))  # [1, P, 4] each
        dtype = self._model.head.dtype  # Max pooling commutes with rounding.
        features = [self._features(maps[i].to(dtype), boxes[i][0]) for i in range(len(batch))]

        def select(i: int) -> Tensor:
            return self._select(boxes[i], torch.ones(boxes[i].shape[:2], dtype=torch.bool), features[i][None], [images[i]])

        return torch.cat(run_single_threaded(select, range(len(batch))))

    def _features(self, maps: Tensor, boxes: Tensor) -> Tensor:
        """Compute an image's features on a CPU: per distinct bin, then per region.

        Args:
            maps: ``[1, 1024, h, w]``.
            boxes: float32 ``[P, 4]``, in pixels of the detector's input.

        Returns:
            float32 ``[P, 2048]``.
        """
        if not len(boxes):
            return torch.zeros(0, self.spec.shape[1])
        bins, index = distinct_bins(boxes, POOLED, 1 / STRIDE, *maps.shape[2:])
        if len(bins) > _SHARED_BINS and len(boxes) > _REGIONS:
            return torch.cat([self._features(maps, half) for half in boxes.tensor_split(2)])
        parts = run_single_threaded(lambda part: self._stage.share(pool_bins(maps, part)), bins.split(_BINS))
        shared = tuple(torch.cat(tables) for tables in zip(*parts, strict=True))
        return torch.cat(run_single_threaded(lambda part: self._stage.finish(shared, part), index.split(_REGIONS)))

    def _detect_on_gpu(self, batch: Sequence[Tensor]) -> Tensor:
        """Run all steps on as many images as fit into the GPU memory."""
        with precision_context(self._precision, self._device), torch.inference_mode():
            indices = torch.arange(len(batch))  # Images of different sizes do not fit into one tensor.
            return run_with_oom_retry(lambda part: self._detect([batch[i] for i in part.tolist()]), indices, self._limits).cpu()

    def _detect(self, batch: Sequence[Tensor]) -> Tensor:
        """Detect regions without synchronization: the numbers of boxes remain on the GPU.

        The backbone runs per group of images with one size, later steps run on all images.
        """
        sizes = [resized_wh(image.shape[2], image.shape[1]) for image in batch]
        order = sorted(range(len(batch)), key=sizes.__getitem__)
        images: list[Original] = []
        maps, candidates = [], []
        for _, indices in groupby(order, key=sizes.__getitem__):
            group = [send(batch[i], self._device) for i in indices]
            images += group
            maps.append(self._maps(group))
            candidates.append(self._propose(maps[-1], group))
        boxes, valid = suppress(*(_concatenate(parts) for parts in zip(*candidates, strict=True)))
        groups = boxes.split([len(group) for group in maps])
        pooled = [pool_regions(*group) for group in zip(maps, groups, strict=True)]
        features = self._head(torch.cat(pooled)).unflatten(0, boxes.shape[:2])
        regions = self._select(boxes, valid, features, images)
        return torch.stack([regions[order.index(i)] for i in range(len(batch))])

    def _maps(self, images: Sequence[Original]) -> Tensor:
        """Compute maps of B images with one input size: float32 ``[B, 1024, h, w]``."""
        values = torch.cat([preprocess_image(image) for image in images])
        return self._model.backbone(values.contiguous(memory_format=torch.channels_last))

    def _propose(self, maps: Tensor, images: Sequence[Original]) -> tuple[Tensor, Tensor]:
        """Return boxes before NMS and their validity, see `RegionProposals.propose`."""
        height, width = images[0].rows.shape[1], images[0].columns.shape[1]
        return self._model.rpn.propose(maps, width, height, _scales(images))

    def _select(self, boxes: Tensor, valid: Tensor, features: Tensor, images: Sequence[Original]) -> Tensor:
        """Classify features ``[B, P, D]`` of boxes ``[B, P, 4]``, and select regions."""
        classes, attributes = (
            scores.unflatten(0, boxes.shape[:2]) for scores in self._model.head.classify(features.flatten(0, 1))
        )
        # A tensor as divisor: on a GPU, division by a host scalar is a multiplication by its rounded reciprocal.
        return gather_regions(
            Detections(boxes / _scales(images)[:, None, None], valid, features, classes, attributes), self._options
        )


def _scales(images: Sequence[Original]) -> Tensor:
    """Return float32 ``[B]``, pixels of the input per pixel of the original image."""
    return torch.cat([image.scale for image in images]).to(torch.float32)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate ``[B, Q, ...]`` of different Q, padded with zeros."""
    length = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, 0) * (part.dim() - 2) + (0, length - part.shape[1])) for part in parts])


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    spec, options = settings.spec, settings.regions
    low, high = options.min_regions, options.max_regions
    if (low, high) != (spec.shape[0], spec.shape[0]):
        source = spec.source.replace(f"{spec.shape[0]} best", f"{low} to {high} best")
        spec = replace(spec, name=f"faster-rcnn-{low}-{high}", shape=(high, spec.shape[1]), source=source)
    parameters = settings.parameters(
        weights, name=spec.name, transform=INPUT, backend=options.backend, regions=options.parameters()
    )
    return Description(spec, parameters, kind="regions", batch_size=_BATCH, classes=CLASSES, attributes=ATTRIBUTES)


find_weights = ARCHITECTURE.find_weights
load = FasterRCNNRegions

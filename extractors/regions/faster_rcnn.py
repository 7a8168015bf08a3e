"""``faster-rcnn-36``: the regions of bottom-up attention (Anderson et al. 2018) with their features, boxes, classes and attributes.

The regions are those that the original Caffe release and MILVLG/bottom-up-attention.pytorch find with the same weights: features
agree to 6e-6 of the largest. Class and attribute ids count from 1, the first line of the files with their names; 0 is background,
or no attribute. A box must be larger than 16 pixels of the image each way; an image without such a proposal has no regions.

In the 16-bit precisions only the last stage computes in 16 bits, so that the proposals are those of float32; with
``half_backbone`` the backbone does, too.

Letters in shapes: ``B`` images, ``P`` proposals of an image, at most 300, ``Q`` boxes of an image before suppression, ``R`` =
``max_regions``, ``H0`` and ``W0`` pixels of an image, ``D`` = 2048 width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from extractors.base import Description, RegionExtractor
from extractors.computing.cpu_parallel import run_single_threaded
from extractors.computing.devices import cast_layers, precision_context
from extractors.computing.fused_conv2d import can_fuse_in
from extractors.computing.fusion import optimize_for_inference, trace
from extractors.computing.oom import BatchLimits, release_unused_memory, run_with_oom_retry
from extractors.computing.winograd import prefers_onednn
from extractors.images.preprocessing import check_resized
from extractors.options import ExtractorOptions, RegionOptions
from extractors.regions.bottom_up.network import ATTRIBUTES, CLASSES, POOLED, build, fold_norms, pool, suppress
from extractors.regions.bottom_up.preprocessing import INPUT, LEAST_SIDE, Original, prepare, resized_wh, send
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
from extractors.regions.selection import Detections, columns, empty_regions, gather_regions
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from schemas.errors import UsageError
from schemas.features import FeatureSpec

_BATCH = 2  # Images; more take memory and do not make a CPU faster.
_REGIONS = 10  # Regions of one pass of the last stage on a CPU; more are hardly faster and take memory in every thread.
_BINS = _REGIONS * POOLED**2  # Distinct bins of one pass of what regions share.
_SHARED_BINS = 20_000  # Distinct bins whose results are held at once, 0.2 GB of them in float32.
_COMPARED = (1, 3, 224, 224)  # Shape of the noise on which cuDNN's backbone is compared with torch's; images have any.
_REGION = (1024, 14, 14)  # Shape of a pooled region.

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
    """The detector and the choice of its regions."""

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        super().__init__(describe(settings, weights), device)
        self._options = settings.regions
        self._device = device
        self._precision = settings.precision
        self._limits = BatchLimits()
        model = ARCHITECTURE.load(weights)
        fold_norms(model)
        # This stage is most of the work; in 16 bits the rest would move the proposals, and with them the boxes kept.
        model.head.dtype = cast_layers(model.head.layer4, settings.precision)
        if settings.regions.half_backbone:
            cast_layers(model.backbone, settings.precision)
            cast_layers(model.rpn.conv, settings.precision)
        self._model = model.to(device).to(memory_format=torch.channels_last)
        # Products and convolutions differ in their last bits, so the precision decides, not a measurement.
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
        """Let convolutions on a GPU compute what follows them, but for those of the last stage if that is matrix products."""
        model, device, precision = self._model, self._device, self._precision
        model.backbone = optimize_for_inference(trace(model.backbone), _COMPARED, device, precision=precision, compile=False)
        if not is_product:
            stage = trace(model.head.layer4)
            model.head.layer4 = optimize_for_inference(stage, (_REGIONS, *_REGION), device, precision=precision, compile=False)

    def _stage_on_cpu(self, is_product: bool) -> LastStage:
        """Choose the form of the last stage.

        The backbone is left to torch's layers in any precision, because merged convolutions have other bits, and images of other
        sizes would need weights in other layouts.
        """
        head = self._model.head
        if not is_product and not (self._precision == "bf16" and can_fuse_in(head.dtype)):
            return PlainStage(head)
        layer4 = head.layer4
        del head.layer4  # The stage has its weights, laid out otherwise.
        if not is_product:
            return MergedStage(layer4, _REGIONS)
        return GroupedStage(layer4, _REGIONS) if prefers_onednn() else ProductStage(layer4)

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
            The columns of kind ``regions`` except ``image_id``. On a CPU an image has the same bytes in any batch and
            with any number of threads.
        """
        find = self._on_cpu if self._device.type == "cpu" else self._on_gpu
        regions = find(batch) if batch else empty_regions(self.spec)
        return columns([(image.shape[2], image.shape[1]) for image in batch], regions, self.spec)

    def _on_cpu(self, batch: Sequence[Tensor]) -> Tensor:
        """Run passes in one thread each, on one image or on a few regions of one image."""
        images = [send(image, self._device) for image in batch]
        maps = run_single_threaded(lambda image: self._maps([image]), images)
        release_unused_memory()

        def proposals(i: int) -> Tensor:
            boxes, are_kept = suppress(*self._propose(maps[i], [images[i]]))
            return boxes[:, : int(are_kept.sum())]

        boxes = run_single_threaded(proposals, range(len(batch)))  # [1, P, 4] each
        dtype = self._model.head.dtype  # What is rounded before pooling is what would be rounded after it.
        features = [self._features(of_image.to(dtype), found[0]) for of_image, found in zip(maps, boxes, strict=True)]

        def chosen(i: int) -> Tensor:
            return self._choose(boxes[i], torch.ones(boxes[i].shape[:2], dtype=torch.bool), features[i][None], [images[i]])

        return torch.cat(run_single_threaded(chosen, range(len(batch))))

    def _features(self, maps: Tensor, boxes: Tensor) -> Tensor:
        """Compute the features of the regions of an image on a CPU: what they share, then each.

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
        parts = run_single_threaded(lambda some: self._stage.share(pool_bins(maps, some)), bins.split(_BINS))
        shared = tuple(torch.cat(tables) for tables in zip(*parts, strict=True))
        return torch.cat(run_single_threaded(lambda some: self._stage.finish(shared, some), index.split(_REGIONS)))

    def _on_gpu(self, batch: Sequence[Tensor]) -> Tensor:
        """Run everything on as many images at once as the memory of the device holds."""
        with precision_context(self._precision, self._device), torch.inference_mode():
            # Images of different sizes do not fit in one tensor, so their positions in the list stand in for them.
            positions = torch.arange(len(batch))
            return run_with_oom_retry(
                lambda some: self._detect([batch[i] for i in some.tolist()]), positions, self._limits
            ).cpu()

    def _detect(self, batch: Sequence[Tensor]) -> Tensor:
        """Find the regions of images without knowing how many boxes are left at any step: their number stays on the device.

        The backbone computes the images of one size together, all later steps all images.
        """
        sizes = [resized_wh(image.shape[2], image.shape[1]) for image in batch]
        order = sorted(range(len(batch)), key=sizes.__getitem__)
        images: list[Original] = []
        maps, candidates = [], []
        for _, positions in groupby(order, key=sizes.__getitem__):
            of_size = [send(batch[i], self._device) for i in positions]
            images += of_size
            maps.append(self._maps(of_size))
            candidates.append(self._propose(maps[-1], of_size))
        boxes, are_kept = suppress(*(_stacked(parts) for parts in zip(*candidates, strict=True)))
        groups = boxes.split([len(of_size) for of_size in maps])
        pooled = [pool(*of_size) for of_size in zip(maps, groups, strict=True)]
        features = self._head(torch.cat(pooled)).unflatten(0, boxes.shape[:2])
        chosen = self._choose(boxes, are_kept, features, images)
        return torch.stack([chosen[order.index(i)] for i in range(len(batch))])

    def _maps(self, images: Sequence[Original]) -> Tensor:
        """Compute the feature maps of B images of one size, once resized: float32 ``[B, 1024, h, w]``."""
        values = torch.cat([prepare(image) for image in images])
        return self._model.backbone(values.contiguous(memory_format=torch.channels_last))

    def _propose(self, maps: Tensor, images: Sequence[Original]) -> tuple[Tensor, Tensor]:
        """Return the boxes that go into suppression, and which of them are usable, see `RegionProposals.propose`."""
        height, width = images[0].rows.shape[1], images[0].columns.shape[1]
        return self._model.rpn.propose(maps, width, height, _scales(images))

    def _choose(self, boxes: Tensor, usable: Tensor, features: Tensor, images: Sequence[Original]) -> Tensor:
        """Classify features ``[B, P, D]`` of boxes ``[B, P, 4]`` and choose the regions, see `gather_regions`."""
        classes, attributes = (
            scores.unflatten(0, boxes.shape[:2]) for scores in self._model.head.classify(features.flatten(0, 1))
        )
        # On a GPU, dividing by a number of the host would be a multiplication by its reciprocal, rounded otherwise.
        return gather_regions(
            Detections(boxes / _scales(images)[:, None, None], usable, features, classes, attributes), self._options
        )


def _scales(images: Sequence[Original]) -> Tensor:
    """Return float32 ``[B]``, pixels of the input per pixel of the original image."""
    return torch.cat([image.scale for image in images]).to(torch.float32)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Put ``[B, Q, ...]`` of several Q together, padded with zeros to the greatest Q."""
    most = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, 0) * (part.dim() - 2) + (0, most - part.shape[1])) for part in parts])


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Find weights, see `extractors.catalogue.ExtractorModule`."""
    return resolve_weights(request, ARCHITECTURE)


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    named, options = _named(settings.spec, settings.regions), settings.regions
    if options.half_backbone and settings.precision not in ("bf16", "fp16"):
        raise UsageError(
            f"--half-backbone computes the backbone in 16 bits, but --precision is {settings.precision}: pass bf16 or fp16, or "
            "leave --half-backbone out"
        )
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

"""detectron2 models with a ResNet C4, split into the steps of `extractor`.

`VisualGenomeNetwork` is the detector of bottom-up attention. Its classes, named in ``faster_rcnn_vg.yaml``,
each change one property of a detectron2 class to match Caffe. Tensor names are those of
MILVLG/bottom-up-attention.pytorch. `StockNetwork` is a model of detectron2's own classes.

Shapes: ``B`` images, ``H0`` and ``W0`` pixels of an image, ``H`` and ``W`` of the network's input, ``A`` = 12 anchors of a cell,
``h`` and ``w`` cells of a feature map, ``P`` proposals of an image, ``N`` regions, ``D`` width of a feature, ``C`` classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from detectron2.config import get_cfg
from detectron2.data.transforms import ResizeShortestEdge, ResizeTransform
from detectron2.modeling import (
    ANCHOR_GENERATOR_REGISTRY,
    BACKBONE_REGISTRY,
    META_ARCH_REGISTRY,
    PROPOSAL_GENERATOR_REGISTRY,
    ROI_HEADS_REGISTRY,
)
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone.resnet import BasicStem, BottleneckBlock, ResNet, build_resnet_backbone
from detectron2.modeling.proposal_generator.rpn import RPN, RPN_HEAD_REGISTRY, StandardRPNHead
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.roi_heads import Res5ROIHeads
from detectron2.structures import Boxes, ImageList, Instances
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from extractors.regions.bottom_up.network import ATTRIBUTES
from extractors.regions.bottom_up.preprocessing import preprocess_image, resized_wh, scale_of, send
from extractors.regions.boxes import cell_anchors
from extractors.regions.nms import nms
from schemas.process.devices import upload

CONFIG = Path(__file__).with_name("faster_rcnn_vg.yaml")
"""Config file of the detector."""

_EMBEDDING, _HIDDEN = 256, 512  # Layers cls_embedding and fc_attr of test.prototxt.
_FAR_CORNER = (0.0, 0.0, 1.0, 1.0)  # Caffe's boxes include their far corners, detectron2's do not.


class InputSize(NamedTuple):
    """Size of an input, and its ``scale``: pixels of the input per pixel of the image."""

    height: int
    width: int
    scale: float


class CaffeStem(BasicStem):
    """detectron2's stem with a pooling that has no padding and rounds up."""

    def forward(self, images: Tensor) -> Tensor:
        """Compute the first feature maps: ``[B, 3, H, W]`` to ``[B, 64, H / 4, W / 4]``."""
        return F.max_pool2d(F.relu_(self.conv1(images)), kernel_size=3, stride=2, padding=0, ceil_mode=True)


@BACKBONE_REGISTRY.register()
def build_caffe_resnet_backbone(cfg: Any, input_shape: Any) -> ResNet:
    """Build detectron2's ResNet with `CaffeStem`."""
    backbone = build_resnet_backbone(cfg, input_shape)
    resnets = cfg.MODEL.RESNETS
    backbone.stem = CaffeStem(in_channels=input_shape.channels, out_channels=resnets.STEM_OUT_CHANNELS, norm=resnets.NORM)
    return backbone


@ANCHOR_GENERATOR_REGISTRY.register()
class CaffeAnchorGenerator(DefaultAnchorGenerator):
    """detectron2's anchor generator with the fixed anchors of `cell_anchors`."""

    def generate_cell_anchors(self, sizes: Any = None, aspect_ratios: Any = None) -> Tensor:
        """Return the anchors, float32 ``[A, 4]``."""
        return cell_anchors()


@RPN_HEAD_REGISTRY.register()
class CaffeRPNHead(StandardRPNHead):
    """detectron2's head with two scores per anchor: all backgrounds, then all objects."""

    objectness_logits: nn.Conv2d

    def __init__(self, cfg: Any, input_shape: Any) -> None:
        super().__init__(cfg, input_shape)
        single = self.objectness_logits
        self.objectness_logits = nn.Conv2d(single.in_channels, 2 * single.out_channels, kernel_size=1)

    def forward(self, features: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return object probabilities ``[B, A, h, w]`` and deltas ``[B, A * 4, h, w]``."""
        scores, deltas = super().forward(features)
        pairs = [score.unflatten(1, (2, -1)) for score in scores]  # [B, 2, A, h, w]
        return [pair.softmax(dim=1)[:, 1] for pair in pairs], deltas


@PROPOSAL_GENERATOR_REGISTRY.register()
class CaffeRPN(RPN):
    """detectron2's RPN with boxes that include their far corners.

    Small boxes are dropped before the top-k selection.
    """

    def predict_proposals(
        self,
        anchors: list[Boxes],
        pred_objectness_logits: list[Tensor],
        pred_anchor_deltas: list[Tensor],
        image_sizes: list[InputSize],
    ) -> list[Instances]:
        """Return the proposals of each image, best first.

        Args:
            anchors: one element, ``[h * w * A, 4]``.
            pred_objectness_logits: one element, object probabilities ``[B, h * w * A]``.
            pred_anchor_deltas: one element, ``[B, h * w * A, 4]``.
            image_sizes: sizes of B images.
        """
        (grid,), (scores,), (deltas,) = anchors, pred_objectness_logits, pred_anchor_deltas
        return [self._propose(grid.tensor, *parts) for parts in zip(scores, deltas, image_sizes, strict=True)]

    def _propose(self, anchors: Tensor, scores: Tensor, deltas: Tensor, size: InputSize) -> Instances:
        far_corner = anchors.new_tensor(_FAR_CORNER)
        boxes = Boxes(self.box2box_transform.apply_deltas(deltas, anchors + far_corner))
        boxes.clip((size.height - 1, size.width - 1))
        large = boxes.nonempty() & Boxes(boxes.tensor + far_corner).nonempty(threshold=self.min_box_size * size.scale)
        boxes, scores = boxes[large], scores[large]
        best = scores.sort(descending=True, stable=True).indices[: self.pre_nms_topk[False]]
        candidates = boxes.tensor[best][None]
        valid = torch.ones(candidates.shape[:2], dtype=torch.bool, device=candidates.device)
        (positions,), count = nms(candidates, valid, self.nms_thresh, self.post_nms_topk[False])
        survivors = best[positions[: int(count)]]
        proposals = Instances((size.height, size.width))
        proposals.proposal_boxes, proposals.objectness_logits = boxes[survivors], scores[survivors]
        return proposals


class AttributePredictor(FastRCNNOutputLayers):
    """detectron2's predictor with attributes and without box regression."""

    def __init__(self, cfg: Any, input_shape: Any) -> None:
        super().__init__(cfg, input_shape)
        del self.bbox_pred
        classes, width = self.cls_score.weight.shape
        self.cls_embed = nn.Embedding(classes, _EMBEDDING)
        self.attr_linear1 = nn.Linear(width + _EMBEDDING, _HIDDEN)
        self.attr_linear2 = nn.Linear(_HIDDEN, 1 + ATTRIBUTES)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return class and attribute logits of ``[N, 2048]``, see `network.Head.classify`."""
        scores = self.cls_score(features)
        embedded = self.cls_embed(scores.argmax(dim=1))
        hidden = F.relu(self.attr_linear1(torch.cat((features, embedded), dim=1)))
        return scores, self.attr_linear2(hidden)


@ROI_HEADS_REGISTRY.register()
class AttributeRes5ROIHeads(Res5ROIHeads):
    """detectron2's heads with `AttributePredictor` and a dilated res5."""

    @classmethod
    def from_config(cls, cfg: Any, input_shape: Any) -> dict[str, Any]:
        """Return detectron2's arguments with `AttributePredictor`."""
        arguments = super().from_config(cfg, input_shape)
        width = arguments["res5"][-1].out_channels
        return arguments | {"box_predictor": AttributePredictor(cfg, width)}

    @classmethod
    def _build_res5_block(cls, cfg: Any) -> tuple[nn.Sequential, int]:
        resnets = cfg.MODEL.RESNETS
        channels = 8 * resnets.RES2_OUT_CHANNELS
        blocks = ResNet.make_stage(
            BottleneckBlock,
            3,
            in_channels=channels // 2,
            bottleneck_channels=channels // 4,
            out_channels=channels,
            norm=resnets.NORM,
            stride_in_1x1=resnets.STRIDE_IN_1X1,
            dilation=resnets.RES5_DILATION,
        )
        return nn.Sequential(*blocks), channels


def read_model_config(path: Path) -> Any:
    """Merge a config file into detectron2's defaults, without running code."""
    cfg = get_cfg()
    cfg.merge_from_file(str(path), allow_unsafe=False)
    return cfg


def build_detectron2(cfg: Any) -> nn.Module:
    """Build the model of a config with random weights, on torch's default device."""
    return META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE)(cfg)


class VisualGenomeNetwork:
    """Detector of bottom-up attention, from `build_detectron2` and `CONFIG`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    resized_wh = staticmethod(resized_wh)

    def pixels(self, image: Image.Image) -> Tensor:
        """Return the RGB pixels, uint8 ``[3, H0, W0]``, which the device resizes."""
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def prepare(self, pixels: Tensor, device: torch.device) -> Tensor:
        """Upload, resize and normalise `pixels`: float32 ``[1, 3, H, W]``."""
        return preprocess_image(send(pixels, device))

    def propose(self, maps: Tensor, width: int, height: int) -> Tensor:
        """Return proposals ``[P, 4]`` of ``[1, channels, h, w]``, in pixels of the input."""
        columns, rows = resized_wh(width, height)
        return _proposals(self.model, maps, InputSize(rows, columns, scale_of(width, height)))

    def original(self, boxes: Tensor, width: int, height: int) -> Tensor:
        """Convert boxes ``[P, 4]`` from pixels of the input to pixels of the image."""
        return boxes / boxes.new_full((), scale_of(width, height))  # As `faster_rcnn` divides.

    def classify(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities of classes ``[N, 1 + C]`` and attributes for ``[N, D]``.

        Background and "none" come first.
        """
        classes, attributes = self.model.roi_heads.box_predictor(features)
        return classes.softmax(dim=1), attributes.softmax(dim=1)


class StockNetwork:
    """Model of detectron2's classes, with preprocessing by ``INPUT`` of its config."""

    def __init__(self, model: Any, inputs: Any) -> None:
        self.model = model
        self._inputs = inputs

    def resized_wh(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after detectron2's ``ResizeShortestEdge``."""
        if not self._inputs.MIN_SIZE_TEST:
            return width, height
        rows, columns = ResizeShortestEdge.get_output_shape(
            height, width, self._inputs.MIN_SIZE_TEST, self._inputs.MAX_SIZE_TEST
        )
        return columns, rows

    def pixels(self, image: Image.Image) -> Tensor:
        """Resize with Pillow to uint8 ``[3, H, W]``, as ``DefaultPredictor`` does."""
        columns, rows = self.resized_wh(*image.size)
        resize = ResizeTransform(image.height, image.width, rows, columns, Image.Resampling.BILINEAR)
        # A copy, since Pillow's memory is read-only.
        return torch.from_numpy(np.array(resize.apply_image(np.array(image)))).permute(2, 0, 1)

    def prepare(self, pixels: Tensor, device: torch.device) -> Tensor:
        """Normalise as detectron2's ``DefaultPredictor`` does."""
        values = upload(pixels.permute(1, 2, 0), device).to(torch.float32).permute(2, 0, 1)
        if self._inputs.FORMAT == "BGR":
            values = values.flip(0)
        return self.model.preprocess_image([{"image": values}]).tensor

    def propose(self, maps: Tensor, width: int, height: int) -> Tensor:
        """See `VisualGenomeNetwork.propose`."""
        columns, rows = self.resized_wh(width, height)
        return _proposals(self.model, maps, (rows, columns))

    def original(self, boxes: Tensor, width: int, height: int) -> Tensor:
        """Convert boxes as detectron2's ``detector_postprocess`` does."""
        columns, rows = self.resized_wh(width, height)
        return boxes * boxes.new_tensor((width / columns, height / rows)).repeat(2)

    def classify(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Classify features; all regions get the attribute "none"."""
        predictor = self.model.roi_heads.box_predictor
        (classes,) = predictor.predict_probs(predictor(features), [features])
        attributes = features.new_tensor((1.0, 0.0)).expand(len(features), 2)
        return classes.roll(1, dims=1), attributes


def _proposals(model: Any, maps: Tensor, size: tuple[float, ...]) -> Tensor:
    (name,) = model.proposal_generator.in_features
    (instances,), _ = model.proposal_generator(ImageList(maps, [size]), {name: maps}, None)
    return instances.proposal_boxes.tensor


Network = VisualGenomeNetwork | StockNetwork

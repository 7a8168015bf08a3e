"""Weights of bottom-up attention's detector, converted from all released formats.

Our names are torchvision's for the ResNet (``backbone.layer3.0.conv1.weight``), and ``rpn.*`` and ``head.*``,
see `extractors.regions.bottom_up.network`. A file may have our names or those of

- the original, ``resnet101_faster_rcnn_final.caffemodel`` and ``…_final_iter_320000.caffemodel``: layers as in
  ``models/vg/ResNet-101/faster_rcnn_end2end_final/test.prototxt`` of peteanderson80/bottom-up-attention. Caffe's BatchNorm holds
  sums of means and variances and their divisor; its Scale holds weight and bias.
- MILVLG/bottom-up-attention.pytorch, ``bua-caffe-frcn-r101*.pth``: detectron2's names, with 24 scores of proposals (background
  first), class 0 the background, and ``cls_embed``, ``attr_linear1``, ``attr_linear2`` (``bua/caffe/modeling``).
- airsplay/py-bottom-up-attention, ``faster_rcnn_from_caffe*.pkl``, and its copy ``unc-nlp/frcnn-vg-finetuned``
  (``modeling_frcnn.py`` of the LXMERT project in huggingface/transformers): detectron2's names with one logit per proposal,
  background and "no attribute" last, and ``cls_embedding``, ``fc_attr``, ``attr_score``
  (``detectron2/modeling/roi_heads/fast_rcnn.py``).

Conversion does not change results: a single logit becomes the pair (0, logit), since its sigmoid is the
softmax of the pair. Box regression by class and counters of training steps are dropped.

Shapes: ``A`` = 12 anchors of a cell.
"""

from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from extractors.regions.bottom_up.network import Head
from extractors.regions.boxes import cell_anchors
from extractors.weights.caffemodel import read_layers
from extractors.weights.checkpoints import COUNTER, Choice, checkpoint_format, list_names, read_entries
from schemas.errors import InputError

_BLOCKS = {2: 3, 3: 4, 4: 23, 5: 3}  # Blocks of ResNet-101 by Caffe's stage number.
_NORM = ("weight", "bias", "running_mean", "running_var")

_PROPOSALS = "proposal_generator.rpn_head."
_PREDICTOR = "roi_heads.box_predictor."
_ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
# Layers by our names; all have weight and bias, but the embedding has no bias.
_MILVLG = {
    "rpn.conv": _PROPOSALS + "conv",
    "rpn.scores": _PROPOSALS + "objectness_logits",
    "rpn.deltas": _PROPOSALS + "anchor_deltas",
    "head.classes": _PREDICTOR + "cls_score",
    "head.attribute_embedding": _PREDICTOR + "cls_embed",
    "head.attribute_hidden": _PREDICTOR + "attr_linear1",
    "head.attributes": _PREDICTOR + "attr_linear2",
}
_AIRSPLAY = _MILVLG | {
    "head.attribute_embedding": _PREDICTOR + "cls_embedding",
    "head.attribute_hidden": _PREDICTOR + "fc_attr",
    "head.attributes": _PREDICTOR + "attr_score",
}
_AIRSPLAY_SIGNS = tuple(set(_AIRSPLAY.values()) - set(_MILVLG.values()))
_CAFFE = {
    "rpn.conv": "rpn_conv/3x3",
    "rpn.scores": "rpn_cls_score",
    "rpn.deltas": "rpn_bbox_pred",
    "head.classes": "cls_score",
    "head.attribute_embedding": "cls_embedding",
    "head.attribute_hidden": "fc_attr",
    "head.attributes": "attr_score",
}
_DETECTRON2_SIGNS = ("backbone.stem.", "backbone.res", "proposal_generator.", "roi_heads.res5.")
_OUR_SIGNS = ("backbone.layer", "rpn.scores.", "head.")
# Entries that are dropped.
_BOX_REGRESSION = (_PREDICTOR + "bbox_pred.weight", _PREDICTOR + "bbox_pred.bias", "bbox_pred[0]", "bbox_pred[1]")
# Checked and dropped: the preprocessing has its own values, from cfgs/*.yml and the configs of both ports.
_PIXELS = {"pixel_mean": (102.9801, 115.9465, 122.7717), "pixel_std": (1.0, 1.0, 1.0)}

# Logit that leaves the others a probability of exactly 0 in float32.
_CERTAIN = 200.0


class _Convolution(NamedTuple):
    """Names of a convolution and its norm in each naming scheme."""

    ours: str
    our_norm: str
    detectron2: str
    caffe: str
    caffe_norm: str


def read_detector(path: Path, choice: Choice | None = None) -> dict[str, Tensor]:
    """Read the weights of the detector, or a chosen set of them, from any release.

    The format (Caffe, safetensors, ``torch.save`` or a pickle of arrays) is detected from the content. No code is run.

    Returns:
        All tensors by our names, with unchecked shapes. ``rpn.anchors`` ``[A, 4]`` are the file's anchors, else those of the
        release. A file without attributes (``faster_rcnn_from_caffe.pkl``) gets a head that always returns "none".

    Raises:
        InputError: the file is unsafe, corrupt, incomplete, or of another model.
    """
    if checkpoint_format(path) == "caffe":
        entries = {f"{layer}[{i}]": blob for layer, blobs in read_layers(path).items() for i, blob in enumerate(blobs)}
        return _from_caffe(entries, path)
    entries = read_entries(path, choice, arrays=True)
    if any(name.startswith(_DETECTRON2_SIGNS) for name in entries):
        return _from_detectron2(entries, path)
    if any(name.startswith(_OUR_SIGNS) for name in entries):
        return {name: _tensor(value, name, path) for name, value in entries.items()}
    raise InputError(
        f"the weights in {str(path)!r} are of another model: no release of the detector has tensors such as "
        f"{list_names(entries)}. Pass bottom-up attention's Faster-RCNN with ResNet-101 from its authors "
        "(.caffemodel), MILVLG (.pth), airsplay (.pkl) or unc-nlp (.bin)"
    )


def _from_detectron2(entries: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    for name, expected in _PIXELS.items():
        if name not in entries:
            continue
        values = tuple(round(value, 4) for value in _tensor(entries[name], name, path).flatten().tolist())
        if len(values) != len(expected) or not np.allclose(values, expected, rtol=0, atol=1e-3):
            raise InputError(
                f"the weights in {str(path)!r} were trained with {name} {values}, expected {expected} "
                "(blue, green, red): features would be wrong; pass the file of this extractor"
            )
    logits = entries.get(_MILVLG["rpn.scores"] + ".bias")
    has_signs = any(name.startswith(_AIRSPLAY_SIGNS) for name in entries)
    if has_signs or (logits is not None and len(logits) == len(_centred_anchors())):
        return _from_airsplay(entries, path)
    state = _rename(entries, detectron2_names(), path)
    return state | {"rpn.anchors": _tensor(entries[_ANCHORS], _ANCHORS, path) if _ANCHORS in entries else cell_anchors()}


def _from_airsplay(entries: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Convert weights with one logit per proposal, and the background last."""
    layers = dict(_AIRSPLAY)
    attributes = [ours for ours in layers if ours.startswith("head.attribute")]
    has_attributes = any(name.startswith(layers[ours]) for name in entries for ours in attributes)
    if not has_attributes:
        layers = {ours: theirs for ours, theirs in layers.items() if ours not in attributes}
    state = _rename(entries, detectron2_names(layers), path)
    if has_attributes:
        for name in ("attribute_embedding.weight", "attributes.weight", "attributes.bias"):
            state[f"head.{name}"] = state[f"head.{name}"].roll(1, dims=0)
    for name in ("weight", "bias"):
        state[f"head.classes.{name}"] = state[f"head.classes.{name}"].roll(1, dims=0)
        logits = state[f"rpn.scores.{name}"]
        state[f"rpn.scores.{name}"] = torch.cat([torch.zeros_like(logits), logits])
    anchors = _tensor(entries[_ANCHORS], _ANCHORS, path) if _ANCHORS in entries else _centred_anchors()
    # A width is x2 - x1 + 1 in our decoding, x2 - x1 in theirs: moving the far corner by one gives equal boxes.
    state["rpn.anchors"] = anchors - torch.tensor([0.0, 0.0, 1.0, 1.0])
    return state if has_attributes else state | _no_attributes()


def _from_caffe(entries: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    names = _layer_names(_CAFFE, weight="[0]", bias="[1]")
    for conv in _convolutions():
        names[f"{conv.ours}.weight"] = f"{conv.caffe}[0]"
        for layer, parts in (("bn", ("running_mean", "running_var", "divisor")), ("scale", ("weight", "bias"))):
            names |= {f"{conv.our_norm}.{part}": f"{layer}{conv.caffe_norm}[{i}]" for i, part in enumerate(parts)}
    state = _rename(entries, names, path)
    for conv in _convolutions():
        divisor = state.pop(f"{conv.our_norm}.divisor")
        factor = torch.where(divisor == 0, 0.0, 1 / divisor)  # As in batch_norm_layer.cpp.
        for part in ("running_mean", "running_var"):
            state[f"{conv.our_norm}.{part}"] = state[f"{conv.our_norm}.{part}"] * factor
    return state | {"rpn.anchors": cell_anchors()}


def _convolutions() -> Iterator[_Convolution]:
    """Yield the convolutions of the ResNet-101; its last stage belongs to the head."""
    yield _Convolution("backbone.conv1", "backbone.bn1", "backbone.stem.conv1", "conv1", "_conv1")
    for stage, blocks in _BLOCKS.items():
        ours = "head.layer4" if stage == 5 else f"backbone.layer{stage - 1}"
        theirs = "roi_heads.res5" if stage == 5 else f"backbone.res{stage}"
        for block in range(blocks):
            # Caffe's blocks: a, b, c in short stages; a, b1, b2, … in long ones.
            letter = "abc"[block] if blocks == 3 else f"b{block}" if block else "a"
            caffe, prefix, other = f"{stage}{letter}_branch", f"{ours}.{block}", f"{theirs}.{block}"
            if block == 0:
                names = f"{prefix}.downsample.0", f"{prefix}.downsample.1", f"{other}.shortcut"
                yield _Convolution(*names, f"res{caffe}1", f"{caffe}1")
            for i in (1, 2, 3):
                branch = f"{caffe}2{' abc'[i]}"
                yield _Convolution(f"{prefix}.conv{i}", f"{prefix}.bn{i}", f"{other}.conv{i}", f"res{branch}", branch)


def detectron2_names(layers: Mapping[str, str] = _MILVLG) -> dict[str, str]:
    """Return detectron2's names (by default those of MILVLG's port) by ours."""
    names = _layer_names(layers, weight=".weight", bias=".bias")
    for conv in _convolutions():
        names[f"{conv.ours}.weight"] = f"{conv.detectron2}.weight"
        for part in _NORM:
            names[f"{conv.our_norm}.{part}"] = f"{conv.detectron2}.norm.{part}"
    return names


def _layer_names(layers: Mapping[str, str], *, weight: str, bias: str) -> dict[str, str]:
    names = {f"{ours}.weight": theirs + weight for ours, theirs in layers.items()}
    return names | {f"{ours}.bias": theirs + bias for ours, theirs in layers.items() if not ours.endswith("embedding")}


def _rename(entries: Mapping[str, Any], names: Mapping[str, str], path: Path) -> dict[str, Tensor]:
    """Rename tensors, given theirs by ours, and refuse missing and unexpected ones."""
    expected = {*names.values(), *_BOX_REGRESSION, *_PIXELS, _ANCHORS}
    missing = [theirs for theirs in names.values() if theirs not in entries]
    unexpected = [name for name in entries if name not in expected and not name.endswith(COUNTER)]
    problems = (("missing", missing), ("unexpected", unexpected))
    if missing or unexpected:
        listed = "; ".join(f"{len(group)} {problem}: {list_names(group)}" for problem, group in problems if group)
        raise InputError(
            f"the weights in {str(path)!r} are not bottom-up attention's Faster-RCNN with ResNet-101 and attributes: {listed}. The "
            "file is incomplete, or of another model with similar names: download it again"
        )
    return {ours: _tensor(entries[theirs], theirs, path) for ours, theirs in names.items()}


def _tensor(value: Any, name: str, path: Path) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.itemsize <= 8:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach()
    raise InputError(f"the weights in {str(path)!r} have type {value.dtype} in {name!r}, expected floating point")


def _centred_anchors() -> Tensor:
    """Return detectron2's anchors ``[A, 4]`` for airsplay's ``configs/VG-Detection``."""
    sides = [(sqrt(size**2 / ratio), ratio) for size in (64, 128, 256, 512) for ratio in (0.5, 1.0, 2.0)]
    return torch.tensor([(-width / 2, -ratio * width / 2, width / 2, ratio * width / 2) for width, ratio in sides])


def _no_attributes() -> dict[str, Tensor]:
    """Return an attribute head that always predicts 0, none."""
    with torch.device("meta"):
        parts = Head().state_dict().items()
    state = {f"head.{name}": torch.zeros(part.shape) for name, part in parts if name.startswith("attribute")}
    state["head.attributes.bias"][0] = _CERTAIN
    return state

"""``detectron2:CONFIG+WEIGHTS``: regions of a Faster R-CNN with a ResNet C4.

CONFIG is the config file of the training (``.yaml``), WEIGHTS the checkpoint (``.pth``, or ``.pkl`` as in detectron2's model zoo)
or ``random:SEED``. No code in either is run. Images are preprocessed by the config's test settings. Regions are selected from the
model's proposals by the rule of ``faster-rcnn-36`` (`extractors.regions.selection`), without box regression by class; the config's
detection thresholds are ignored. A feature is the mean of res5 over its box, an attribute always 0, none.

The name in a dataset is ``detectron2:``, the stem of the config file, and the number of regions. The model
and input sections of the config are part of the fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import build_anchor_generator
from torch import Tensor

from extractors.base import Description
from extractors.options import ExtractorOptions, RegionOptions
from extractors.regions.detectron2_backend.extractor import Detectron2Regions, refuse_compile
from extractors.regions.detectron2_backend.networks import StockNetwork, build_detectron2, read_model_config
from extractors.weights.checkpoints import COUNTER, Choice, read_state_dict
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec
from schemas.storage.locations import local_path

_PREFIX = "detectron2:"
_FORM = re.compile(r"(?P<config>.+?\.ya?ml)\+(?P<weights>.+)")
_ANCHORS = "proposal_generator.anchor_generator.cell_anchors."
_STRIDE = 16
_BATCH = 2
_INPUTS = ("FORMAT", "MIN_SIZE_TEST", "MAX_SIZE_TEST")
_PIXELS = ("pixel_mean", "pixel_std")  # In old checkpoints; the config has them, too.
# Supported config values.
_REQUIRED = {
    "MODEL.META_ARCHITECTURE": ("GeneralizedRCNN",),
    "MODEL.BACKBONE.NAME": ("build_resnet_backbone",),
    "MODEL.PROPOSAL_GENERATOR.NAME": ("RPN",),
    "MODEL.ROI_HEADS.NAME": ("Res5ROIHeads",),
    "MODEL.RESNETS.OUT_FEATURES": (["res4"],),
    "MODEL.RPN.IN_FEATURES": (["res4"],),
    "MODEL.ROI_HEADS.IN_FEATURES": (["res4"],),
    "MODEL.KEYPOINT_ON": (False,),
    "INPUT.FORMAT": ("BGR", "RGB"),
}


def spec(name: str) -> FeatureSpec:
    """Return the feature spec of a model ``CONFIG+WEIGHTS``, without its weights.

    Raises:
        UsageError: the name has another form, or the model is unsupported.
        InputError: the config file is missing or corrupt.
    """
    config, _ = _paths(_PREFIX + name)
    return FeatureSpec(
        name=_PREFIX + name,
        shape=(RegionOptions().max_regions, 8 * _supported_config(config).MODEL.RESNETS.RES2_OUT_CHANNELS),
        source=f"detectron2, github.com/facebookresearch/detectron2: {config.stem}, mean of the last stage over each region",
    )


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Resolve the weights in the name, see `extractors.catalogue.ExtractorModule`."""
    config, weights = _paths(spec.name)
    if request != "default":
        raise UsageError(
            f"weights are given twice, as {weights!r} in the extractor's name and with --weights {request!r}: leave --weights out"
        )
    cfg = _supported_config(config)
    architecture = Architecture(
        build=partial(build_detectron2, cfg),
        read=partial(_read_model_state, cfg=cfg),
        without_default="name a checkpoint behind the '+'",
    )
    return resolve_weights(weights, architecture)


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    refuse_compile(settings)
    spec, options = settings.spec, settings.regions
    config, _ = _paths(spec.name)
    named = replace(spec, name=f"{_PREFIX}{config.stem}-{options.count}", shape=(options.max_regions, spec.shape[1]))
    parameters = settings.parameters(weights, name=named.name, config=_settings(config), regions=options.parameters())
    classes = _supported_config(config).MODEL.ROI_HEADS.NUM_CLASSES
    return Description(named, parameters, kind="regions", batch_size=_BATCH, classes=classes)


def load(settings: ExtractorOptions, weights: Weights, device: torch.device) -> Detectron2Regions:
    """Create the extractor, see `extractors.catalogue.ExtractorModule`."""
    description = describe(settings, weights)
    cfg = _supported_config(_paths(settings.spec.name)[0])
    with torch.random.fork_rng(devices=[]):
        model = build_detectron2(cfg)
    model.load_state_dict(weights.state)
    return Detectron2Regions(description, settings, StockNetwork(model, cfg.INPUT), device)


def _paths(name: str) -> tuple[Path, str]:
    match = _FORM.fullmatch(name.removeprefix(_PREFIX))
    if match is None:
        raise UsageError(
            f"there is no extractor {name!r}, expected {_PREFIX}CONFIG+WEIGHTS with a config file (.yaml) of detectron2 and a "
            f"checkpoint (.pth or .pkl) or random:SEED, e.g. {_PREFIX}faster_rcnn_R_101_C4.yaml+model_final.pth"
        )
    return local_path(match["config"]), match["weights"]


def _supported_config(path: Path) -> Any:
    """Read a config, and check that its model is supported."""
    cfg = _read_config(path, read_model_config)
    for key, allowed in _REQUIRED.items():
        value = cfg
        for part in key.split("."):
            value = value[part]
        if value not in allowed:
            raise UsageError(
                f"the model of {str(path)!r} has {key} {value!r}, expected {' or '.join(map(repr, allowed))}: use a config of "
                "detectron2's own Faster R-CNN with a ResNet C4, without feature pyramid"
            )
    return cfg


def _settings(path: Path) -> dict[str, Any]:
    """Read the model and input sections of a config, without paths and devices."""
    loaded = _read_config(path, partial(CfgNode.load_yaml_with_base, allow_unsafe=False))
    model = {key: value for key, value in loaded.get("MODEL", {}).items() if key not in ("WEIGHTS", "DEVICE")}
    inputs = {key: value for key, value in loaded.get("INPUT", {}).items() if key in _INPUTS}
    return {"MODEL": model, "INPUT": inputs}


def _read_config(path: Path, read: Callable[[Any], Any]) -> Any:
    if not path.is_file():
        raise InputError(f"there is no config file {str(path)!r}: check the spelling and the working folder")
    try:
        return read(str(path))
    except (OSError, KeyError, ValueError, TypeError, AttributeError, AssertionError, yaml.YAMLError) as error:
        raise InputError(
            f"the config file {str(path)!r} is not a detectron2 config ({type(error).__name__}: {error}): it is corrupt, has "
            "settings of another project, or contains code; pass the config file of the training"
        ) from error


def _read_model_state(path: Path, choice: Choice | None = None, *, cfg: Any) -> dict[str, Tensor]:
    """Read a state dict with the model's names, without entries that are not weights."""
    state = read_state_dict(path, choice)
    for i, expected in enumerate(build_anchor_generator(cfg, [ShapeSpec(stride=_STRIDE)]).cell_anchors):
        anchors = state.pop(f"{_ANCHORS}{i}", expected)
        # detectron2 0.5 and later would ignore the file's anchors.
        if anchors.shape != expected.shape or not torch.allclose(anchors.to(expected.dtype), expected, atol=1e-3):
            raise InputError(
                f"the weights in {str(path)!r} were trained with anchors {anchors.tolist()}, but the config "
                f"has {expected.tolist()}: set MODEL.ANCHOR_GENERATOR to its value in training"
            )
    frozen = cfg.MODEL.RESNETS.NORM == "FrozenBN"
    return {name: tensor for name, tensor in state.items() if name not in _PIXELS and not (frozen and name.endswith(COUNTER))}

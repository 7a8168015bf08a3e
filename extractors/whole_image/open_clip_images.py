"""``open_clip:NAME`` and ``open_clip:FOLDER``: the image encoder of a joint model.

See `extractors.weights.open_clip_models` for names and folders. The feature is open_clip's ``encode_image``,
after the projection, not normalised. Preprocessing has the bytes of the model's transform. The parameter
``checkpoint`` is the digest of both encoders, which text vectors of the model have, too.
"""

from dataclasses import replace

import torch

from extractors.base import Description
from extractors.computing.compile import compile_model
from extractors.computing.devices import AUTOCAST_DTYPES, cache_casts
from extractors.fixed_size import CropExtractor
from extractors.images.preprocessing import Preprocessing
from extractors.options import ExtractorOptions
from extractors.weights import open_clip_models as models
from extractors.weights.resolve import Weights
from schemas.errors import UsageError
from schemas.features import FeatureSpec


class OpenClipImages(CropExtractor):
    """Image encoder of open_clip; 16-bit precisions use ``torch.autocast``."""

    forward_images = 4

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        model = settings.spec.name.removeprefix(models.PREFIX)
        super().__init__(describe(settings, weights), _preprocessing(model), settings, device)
        network = models.load_network(model, weights).visual.to(device, memory_format=torch.channels_last)
        cache_casts(network, AUTOCAST_DTYPES.get(settings.precision))
        self._network = compile_model(network, device, enabled=settings.compile)
        self.warm_up_compile(enabled=settings.compile)


def spec(name: str) -> FeatureSpec:
    """Return the feature spec of a model, without its weights."""
    model = models.full_name(name.removeprefix(models.PREFIX))
    source = f"open_clip, github.com/mlfoundations/open_clip: {models.short_name(model).removeprefix(models.PREFIX)}"
    return FeatureSpec(name=models.PREFIX + model, shape=(models.model_on_meta(model).config["embed_dim"],), source=source)


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Resolve weights, see `extractors.catalogue.ExtractorModule`."""
    return models.find_weights(spec.name.removeprefix(models.PREFIX), request)


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    model = settings.spec.name.removeprefix(models.PREFIX)
    named = replace(settings.spec, name=models.short_name(model))
    joint = {"checkpoint": weights.sha256, "similarity": "cosine", "config": models.config_sha256(model)}
    parameters = settings.parameters(weights, transform=_preprocessing(model).parameters(), **joint)
    return Description(named, parameters | {"name": named.name}, batch_size=32)


load = OpenClipImages


def _preprocessing(model: str) -> Preprocessing:
    config = models.model_on_meta(model).visual.preprocess_cfg
    side, *others = set(config["size"]) if isinstance(config["size"], (tuple, list)) else (config["size"],)
    if others or config["resize_mode"] not in ("shortest", "squash"):
        raise UsageError(
            f"the model {model!r} resizes images by {config['resize_mode']!r} to {config['size']}, expected "
            "'shortest' or 'squash' to a square: choose another model"
        )
    return Preprocessing(
        resize_short=side if config["resize_mode"] == "shortest" else None,
        crop=side,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
    )

"""``timm:NAME``: the pooled feature of any image model of the package timm.

Preprocessing follows ``timm.data.resolve_model_data_config``, with the bytes of timm's transform; pixels are
normalised on the device. The feature is the model's output with ``num_classes=0``. Weights files may have
timm's tensor names or those of the model's origin, which timm translates; a classifier is dropped.

With ``unpooled`` the feature is the output of timm's ``forward_features`` in row-major order: feature maps,
or the patch tokens of transformers (without class, distillation and register tokens).

In traceable models, batch norms after plain convolutions are folded (see `extractors.computing.fusion`),
including timm's batch norm with an activation. Other models run as in timm.

Shapes: ``B`` images, ``H`` and ``W`` pixels of the input, ``T`` tokens, ``D`` width of the feature.
"""

import difflib
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.transforms import MaybePILToTensor
from timm.models import get_pretrained_cfg
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Resize

from extractors.base import Description
from extractors.computing.compile import compile_model
from extractors.computing.devices import AUTOCAST_DTYPES, cache_casts
from extractors.computing.fusion import fuse_onednn, infer_shapes, optimize_for_inference
from extractors.fixed_size import FixedSizeExtractor
from extractors.images.decoding import DecodeError
from extractors.images.preprocessing import Normalizer, Preprocessing, check_resized, cropped_pixels
from extractors.options import ExtractorOptions
from extractors.weights.checkpoints import Choice, read_state_dict
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from extractors.whole_image.timm_networks import MapModel, UnpooledModel, fold_timm_norms, grid_hw
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec

_PREFIX = "timm:"
_BATCH = 32
_EFFICIENTNET = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_SQUEEZE = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
_SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2", **_SQUEEZE}
_INVERTED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
    **_SQUEEZE,
}


class TimmModel(FixedSizeExtractor):
    """timm model without its classifier; 16-bit precisions use ``torch.autocast``."""

    forward_images = 4  # Faster than two for small networks.

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        name = settings.spec.name.removeprefix(_PREFIX)
        self._config = _preprocessing_config(name)
        super().__init__(describe(settings, weights), self._config["input_size"][1:], settings, device)
        self._transform = create_transform(**self._config, is_training=False, normalize=False)
        self._preprocessing = _translate(self._transform, self._config)
        # Not on the meta device: some models have values outside their state dict.
        with torch.random.fork_rng(devices=[]):
            model = _create_model(name)
        model.load_state_dict(weights.state)
        network = (MapModel(model) if settings.unpooled else model).eval().requires_grad_(False).to(device)
        network = self._optimize(network.to(memory_format=torch.channels_last), settings, device)
        self._network = UnpooledModel(model, network, _grid(name)[0]) if settings.unpooled else network
        self._normalize = Normalizer(self._config["mean"], self._config["std"], device)
        self.warm_up_compile(enabled=settings.compile)

    def _optimize(self, network: nn.Module, settings: ExtractorOptions, device: torch.device) -> nn.Module:
        """Fold norms and fuse layers where possible; in 16 bits fuse on a CPU only."""
        graph, dtype = fold_timm_norms(network), AUTOCAST_DTYPES.get(settings.precision)
        shape = (self.forward_images, *self._input_shape)
        if graph is not None and dtype is None:
            return optimize_for_inference(graph, shape, device, precision=settings.precision, compile=settings.compile)
        if graph is not None and device.type == "cpu" and not settings.compile:
            fuse_onednn(graph, infer_shapes(graph, shape, torch.float32), dtype)
        network = graph or network
        cache_casts(network, dtype)
        return compile_model(network, device, enabled=settings.compile)

    @property
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray]:
        """Picklable function with the result of timm's transform."""
        if self._preprocessing is not None:
            return partial(cropped_pixels, preprocessing=self._preprocessing)
        return partial(_transformed_pixels, transform=self._transform, config=self._config)


def spec(model: str, *, unpooled: bool = False) -> FeatureSpec:
    """Return the feature spec of a model, without its weights.

    timm's name of the model may have a tag after the dot.

    Raises:
        UsageError: the model is unknown, takes other input than RGB, or returns no vector (unpooled: no grid) per image.
    """
    config = _pretrained_config(model)
    name = f"{model.partition('.')[0]}.{config.tag}" if config.tag else model
    input_size = _preprocessing_config(name)["input_size"]
    if input_size[0] != 3:
        raise UsageError(f"timm's model {name!r} takes {input_size[0]} channels, expected 3 (RGB): choose another model")
    source = f"timm, github.com/huggingface/pytorch-image-models: {name}"
    if unpooled:
        (height, width), channels = _grid(name)
        source += f", not pooled, {height}x{width} in row-major order"
        return FeatureSpec(name=_PREFIX + name, shape=(height * width, channels), source=source)
    return FeatureSpec(name=_PREFIX + name, shape=(_width(name, input_size),), source=source)


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Resolve weights, see `extractors.catalogue.ExtractorModule`."""
    name = spec.name.removeprefix(_PREFIX)
    if request == "default":
        return Weights(_load_pretrained(name).state_dict())
    return resolve_weights(request, Architecture(build=partial(_create_model, name), read=partial(_read_timm, name=name)))


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    name = settings.spec.name.removeprefix(_PREFIX)
    config, grid = _preprocessing_config(name), {"grid": list(_grid(name)[0])} if settings.unpooled else {}
    norms = {"norms": "folded"} if _has_foldable_norms(name, unpooled=settings.unpooled) else {}
    transform = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    transform |= {"divisor": 255.0, "channel_order": "RGB", "resize_with": "pillow"}
    parameters = settings.parameters(weights, transform=transform, **grid, **norms)
    return Description(settings.spec, parameters, batch_size=_BATCH)


load = TimmModel


def _pretrained_config(model: str) -> Any:
    if timm.is_model(model):
        with suppress(RuntimeError):  # Unknown tag.
            return get_pretrained_cfg(model, allow_unregistered=False)
    names = [*timm.list_models(), *timm.list_models(pretrained=True)]
    close = difflib.get_close_matches(model, names, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists them"
    raise UsageError(f"timm {timm.__version__} has no model {model!r}: {hint}")


def _preprocessing_config(name: str) -> dict[str, Any]:
    """Return a model's preprocessing; ``input_size`` is channels, height, width."""
    config = resolve_data_config(pretrained_cfg=_pretrained_config(name).to_dict())
    return config | {"input_size": tuple(config["input_size"])}


def _create_model(name: str) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=0)


def _width(name: str, input_size: tuple[int, ...]) -> int:
    # Not ``num_features``: heads may widen the output.
    with torch.device("meta"), torch.inference_mode():
        shape = _create_model(name).eval()(torch.empty(1, *input_size)).shape
    if len(shape) != 2:
        raise UsageError(
            f"timm's model {name!r} returns {list(shape)} for one image, expected one vector: choose another model"
        )
    return shape[1]


@lru_cache(maxsize=8)
def _grid(name: str) -> tuple[tuple[int, int], int]:
    """Return rows and columns of a model's unpooled features, and their width."""
    with torch.device("meta"), torch.inference_mode():
        model: Any = _create_model(name).eval()
        features = model.forward_features(torch.empty(1, *_preprocessing_config(name)["input_size"]))
    grid = grid_hw(model, features)
    if grid is None:
        output = list(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
        raise UsageError(
            f"timm's model {name!r} returns {output} before its pooling, expected a feature map, or one "
            "token per patch: leave --unpooled out, or choose another model"
        )
    return grid, model.num_features


@lru_cache(maxsize=8)
def _has_foldable_norms(name: str, *, unpooled: bool) -> bool:
    with torch.device("meta"):
        model = _create_model(name).eval()
        return fold_timm_norms(MapModel(model) if unpooled else model) is not None


def _load_pretrained(name: str) -> nn.Module:
    """Load timm's weights, after a download if they are not cached."""
    try:
        with torch.random.fork_rng(devices=[]):
            return timm.create_model(name, pretrained=True, num_classes=0)
    except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError for a model without weights.
        text = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"cannot download timm's weights of {name!r} ({type(error).__name__}: {text}): there is probably no network, or timm "
            f"has no weights for this model. Download model.safetensors of huggingface.co/timm/{name} elsewhere, and pass it with "
            "--weights PATH; --weights random:0 runs the untrained model"
        ) from error


def _read_timm(path: Path, choice: Choice | None = None, *, name: str) -> dict[str, Tensor]:
    """Read a state dict with timm's tensor names, without a classifier."""
    state = read_state_dict(path, choice)
    with torch.device("meta"):
        model = _create_model(name)
    if "_conv_stem.weight" in state:
        state = _rename_efficientnet(state, model)
    expected = model.state_dict().keys()
    translate: Callable[..., dict[str, Tensor]] | None = getattr(
        sys.modules[type(model).__module__], "checkpoint_filter_fn", None
    )
    if translate is not None and not expected <= state.keys():
        try:
            state = translate(state, model)
        except (KeyError, IndexError, AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise InputError(
                f"the weights file {str(path)!r} is of another model than {name!r}: timm cannot translate "
                f"its tensor names ({type(error).__name__}: {error}); pass the model's own file"
            ) from error
    classifiers = _pretrained_config(name).classifier or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    dropped = {f"{layer}.{kind}" for layer in classifiers for kind in ("weight", "bias")} - expected
    return {key: tensor for key, tensor in state.items() if key not in dropped}


def _rename_efficientnet(state: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Rename tensors of EfficientNet-PyTorch, which numbers blocks without stages."""
    stages = enumerate(getattr(model, "blocks", ()))
    names = (f"blocks.{stage}.{block}" for stage, layers in stages for block in range(len(layers)))
    blocks = {str(index): name for index, name in enumerate(names)}

    def rename(name: str) -> str:
        layer, *rest = name.split(".")
        if layer != "_blocks" or len(rest) != 3 or rest[0] not in blocks:
            return ".".join((_EFFICIENTNET.get(layer, layer), *rest))
        index, layer, part = rest
        layers = _INVERTED if f"_blocks.{index}._expand_conv.weight" in state else _SEPARABLE
        return f"{blocks[index]}.{layers.get(layer, layer)}.{part}"

    return {rename(name): tensor for name, tensor in state.items()}


def _translate(transform: Callable[[Image.Image], Tensor], config: dict[str, Any]) -> Preprocessing | None:
    """Return a transform of resize and centre crop as `Preprocessing`, else None."""
    steps = getattr(transform, "transforms", [])
    if [type(step) for step in steps] != [Resize, CenterCrop, MaybePILToTensor]:
        return None
    resize, crop, _ = steps
    side, interpolation = config["input_size"][1], resize.interpolation.value
    is_plain = isinstance(resize.size, int) and resize.max_size is None and resize.antialias is True
    if not is_plain or interpolation not in ("bilinear", "bicubic") or tuple(crop.size) != (side, side):
        return None
    return Preprocessing(
        resize_short=resize.size, crop=side, mean=config["mean"], std=config["std"], interpolation=interpolation
    )


def _transformed_pixels(image: Image.Image, transform: Callable[[Image.Image], Tensor], config: dict[str, Any]) -> np.ndarray:
    if image.mode != "RGB":
        raise ValueError(f"image is of mode {image.mode!r}, expected 'RGB'; use `decode_image`")
    check_resized(image, _resized_wh(image.size, config))
    pixels = transform(image)
    if pixels.dtype != torch.uint8 or pixels.shape != config["input_size"]:
        raise DecodeError(
            "unsupported",
            f"timm made {pixels.dtype} {list(pixels.shape)} of the image of {image.width}×{image.height} "
            f"pixels, expected torch.uint8 {list(config['input_size'])}",
        )
    return pixels.numpy()


def _resized_wh(image_wh: tuple[int, int], config: dict[str, Any]) -> tuple[int, int]:
    """Return the approximate size of the image after timm's resize."""
    target_wh = [math.floor(side / config["crop_pct"]) for side in (config["input_size"][2], config["input_size"][1])]
    if config["crop_mode"] == "squash":
        return target_wh[0], target_wh[1]
    ratios = [side / target for side, target in zip(image_wh, target_wh, strict=True)]
    ratio = max(ratios) if config["crop_mode"] == "border" else min(ratios)
    return round(image_wh[0] / ratio), round(image_wh[1] / ratio)

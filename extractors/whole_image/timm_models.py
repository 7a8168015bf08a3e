"""``timm:NAME``: the pooled feature of any image model of the package timm, with the preprocessing of that model.

Sizes, crop, interpolation, mean and standard deviation are those of ``timm.data.resolve_model_data_config``; timm's own transform,
or what makes the same bytes, makes the 8-bit pixels, which are normalised on the device. The feature is the output of the model
with ``num_classes=0``. The tensors of a file may have timm's names or those of the model's origin, which timm translates; a
classifier is left out.

On request the feature is the output of timm's ``forward_features``, "the unpooled features": of convolutional and hierarchical
networks a map, of transformers the tokens of the patches, after the final norm where the model has it before the pooling. Class,
distillation and register tokens are left out. Cells go row by row from the top, and from left to right in a row.

Where a model can be traced, plain batch norms behind plain convolutions are folded (see `extractors.computing.fusion`), among them
timm's own norm that ends with an activation. Other models run as timm runs them.

Letters in shapes: ``B`` images, ``H`` and ``W`` pixels of the model's input, ``G`` cells of a map, ``T`` tokens, ``D`` width of
the feature.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable
from copy import copy
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
from timm.layers import BatchNormAct2d, get_notrace_functions, is_notrace_module
from timm.models import get_pretrained_cfg
from torch import Tensor, fx, nn
from torchvision.transforms import CenterCrop, Resize

from extractors.base import Description
from extractors.computing.compile import compile_model
from extractors.computing.devices import AUTOCAST_DTYPES, cache_casts, upload
from extractors.computing.fusion import fold_norms, fuse_onednn, infer_shapes, optimize_for_inference, recompile
from extractors.fixed_size import FixedSizeExtractor
from extractors.images.decoding import DecodeError
from extractors.images.preprocessing import Normalizer, Preprocessing, check_resized, cropped_pixels, resize_and_crop
from extractors.options import ExtractorOptions
from extractors.weights.checkpoints import Choice, read_state
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec

_PREFIX = "timm:"
_BATCH = 32  # As many passes on a CPU as of other extractors.
_FORWARD_IMAGES = 4  # Images of one pass on a CPU: 1.1 (ResNet18) to 1.4 times (MobileNetV3) as fast as two.
# Errors of a failed download: those of the hub are OSErrors; timm raises RuntimeError for a model without weights.
_DOWNLOAD_ERRORS = (OSError, HTTPException, RuntimeError)


class TimmModel(FixedSizeExtractor):
    """A model of timm without its classifier.

    The 16-bit precisions use ``torch.autocast``, because these models have many kinds of layers.
    """

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        name = settings.spec.name.removeprefix(_PREFIX)
        self._config = _config(name)
        super().__init__(describe(settings, weights), self._config["input_size"][1:], settings, device, _FORWARD_IMAGES)
        self._transform = create_transform(**self._config, is_training=False, normalize=False)
        self._preprocessing = _plain(self._transform, self._config)
        # Not on the meta device: some models keep values outside their state dict.
        with torch.random.fork_rng(devices=[]):
            model = _build(name)
        model.load_state_dict(weights.state)
        network = (MapModel(model) if settings.unpooled else model).eval().requires_grad_(False).to(device)
        network = self._optimize(network.to(memory_format=torch.channels_last), settings, device)
        self._model = UnpooledModel(model, network, _grid(name)[0]) if settings.unpooled else network
        self._normalize = Normalizer(self._config["mean"], self._config["std"], device)
        self.warm_up_compile(enabled=settings.compile)

    def _optimize(self, network: nn.Module, settings: ExtractorOptions, device: torch.device) -> nn.Module:
        """Return a network, on its device, folded where that can be done, and its layers merged, in 16 bits on a CPU alone."""
        graph, dtype = fold_timm_norms(network), AUTOCAST_DTYPES.get(settings.precision)
        shape = (self._forward_images, *self._input_shape)
        if graph is not None and dtype is None:
            return optimize_for_inference(graph, shape, device, precision=settings.precision, compile=settings.compile)
        if graph is not None and device.type == "cpu" and not settings.compile:
            fuse_onednn(graph, infer_shapes(graph, shape, torch.float32), dtype)
        network = graph or network
        cache_casts(network, dtype)
        return compile_model(network, device, enabled=settings.compile)

    @property
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray]:
        """The function `preprocess` without the model."""
        if self._preprocessing is not None:
            return partial(cropped_pixels, preprocessing=self._preprocessing)
        return partial(_array, transform=self._transform, config=self._config)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Resize and crop with timm's transform for the model.

        Returns:
            uint8 ``[3, H, W]``, channels R, G, B.
        """
        return _pixels(image, self._transform, self._config)

    def preprocess_single_threaded(self, image: Image.Image) -> Tensor:
        """Return what `preprocess` does, in less time where a single thread does so, if timm's transform is as most are."""
        if self._preprocessing is not None:
            return resize_and_crop(image, self._preprocessing, single_threaded=True)
        return self.preprocess(image)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute features: uint8 ``[B, 3, H, W]`` on any device to float32 ``[B, *spec.shape]`` on that of the extractor."""
        pixels = upload(pixels, self._device).contiguous(memory_format=torch.channels_last)
        values = self._normalize(pixels)
        dtype = AUTOCAST_DTYPES.get(self._precision)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            return self._model(values).to(torch.float32)


def spec(model: str, *, unpooled: bool = False) -> FeatureSpec:
    """Return name, shape and type of the feature of a model, without its weights.

    Args:
        model: timm's name of the model, with or without the part behind the dot (the tag of the weights).
        unpooled: whether the feature is the map before the pooling.

    Raises:
        UsageError: timm has no such model, or the model does not make one vector, or one map, of an RGB image.
    """
    config = _pretrained_config(model)
    name = f"{model.partition('.')[0]}.{config.tag}" if config.tag else model
    input_size = _config(name)["input_size"]
    if input_size[0] != 3:
        raise UsageError(f"timm's model {name!r} takes {input_size[0]} channels, expected 3 (RGB): choose another model")
    source = f"timm, github.com/huggingface/pytorch-image-models: {name}"
    if unpooled:
        (height, width), channels = _grid(name)
        source += f", not pooled, {height}x{width} in row-major order"
        return FeatureSpec(name=_PREFIX + name, shape=(height * width, channels), source=source)
    return FeatureSpec(name=_PREFIX + name, shape=(_width(name, input_size),), source=source)


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Find weights, see `extractors.catalogue.ExtractorModule`."""
    name = spec.name.removeprefix(_PREFIX)
    if request == "default":
        return Weights(_download(name).state_dict())
    return resolve_weights(request, Architecture(build=partial(_build, name), read=partial(_read, name=name)))


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    name = settings.spec.name.removeprefix(_PREFIX)
    config, grid = _config(name), {"grid": list(_grid(name)[0])} if settings.unpooled else {}
    norms = {"norms": "folded"} if _folds(name, unpooled=settings.unpooled) else {}
    transform = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    transform |= {"divisor": 255.0, "channel_order": "RGB", "resize_with": "pillow"}
    parameters = settings.parameters(weights, transform=transform, **grid, **norms)
    return Description(settings.spec, parameters, batch_size=_BATCH)


load = TimmModel


def _pretrained_config(model: str) -> Any:
    """Return timm's record of a model and its weights."""
    if timm.is_model(model):
        try:
            return get_pretrained_cfg(model, allow_unregistered=False)
        except RuntimeError:  # an unknown tag
            pass
    known = [*timm.list_models(), *timm.list_models(pretrained=True)]
    close = difflib.get_close_matches(model, known, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists them"
    raise UsageError(f"timm {timm.__version__} has no model {model!r}: {hint}")


def _config(name: str) -> dict[str, Any]:
    """Return how timm preprocesses images for a model; ``input_size`` is channels, height, width."""
    config = resolve_data_config(pretrained_cfg=_pretrained_config(name).to_dict())
    return config | {"input_size": tuple(config["input_size"])}


def _build(name: str) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=0)


def _width(name: str, input_size: tuple[int, ...]) -> int:
    """Return the width of a model's output, without memory for its weights. ``num_features`` differs if a head widens it."""
    with torch.device("meta"), torch.inference_mode():
        shape = _build(name).eval()(torch.empty(1, *input_size)).shape
    if len(shape) != 2:
        raise UsageError(
            f"timm's model {name!r} returns {list(shape)} for one image, expected one vector: choose another model"
        )
    return shape[1]


@lru_cache(maxsize=8)
def _grid(name: str) -> tuple[tuple[int, int], int]:
    """Return rows and columns of a model's map and the width of its vectors, without memory for its weights."""
    with torch.device("meta"), torch.inference_mode():
        model: Any = _build(name).eval()
        found = model.forward_features(torch.empty(1, *_config(name)["input_size"]))
    grid = grid_hw(model, found)
    if grid is None:
        made = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise UsageError(
            f"timm's model {name!r} returns {made} before its pooling, expected a map, or one token for each patch: leave "
            "--unpooled out, or choose another model"
        )
    return grid, model.num_features


@lru_cache(maxsize=8)
def _folds(name: str, *, unpooled: bool) -> bool:
    """Return whether batch norms of a model are folded, without memory for its weights."""
    with torch.device("meta"):
        model = _build(name).eval()
        return fold_timm_norms(MapModel(model) if unpooled else model) is not None


def _download(name: str) -> nn.Module:
    """Let timm download its weights if they are not there yet, and load them."""
    try:
        with torch.random.fork_rng(devices=[]):
            return timm.create_model(name, pretrained=True, num_classes=0)
    except _DOWNLOAD_ERRORS as error:
        text = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"cannot get timm's weights of {name!r} ({type(error).__name__}: {text}): probably there is no network here, or timm "
            f"has no weights for this model. Fetch model.safetensors of huggingface.co/timm/{name} elsewhere and pass it with "
            "--weights PATH; --weights random:0 runs without, untrained"
        ) from error


def _read(path: Path, choice: Choice | None = None, *, name: str) -> dict[str, Tensor]:
    """Read a state dict by the names that the model has, without a classifier."""
    state = read_state(path, choice)
    with torch.device("meta"):
        model = _build(name)
    expected = model.state_dict().keys()
    translate: Callable[..., dict[str, Tensor]] | None = getattr(
        sys.modules[type(model).__module__], "checkpoint_filter_fn", None
    )
    if translate is not None and not expected <= state.keys():
        try:
            state = translate(state, model)
        except (KeyError, IndexError, AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise InputError(
                f"the weights file {str(path)!r} is not one of {name!r}: timm cannot translate its names "
                f"({type(error).__name__}: {error}); pass the file that belongs to the model"
            ) from error
    classifiers = _pretrained_config(name).classifier or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    dropped = {f"{layer}.{kind}" for layer in classifiers for kind in ("weight", "bias")} - expected
    return {key: tensor for key, tensor in state.items() if key not in dropped}


def _plain(transform: Callable[[Image.Image], Tensor], config: dict[str, Any]) -> Preprocessing | None:
    """Return what a transform of timm does, if that is what ours do: the shorter side is resized, and the centre cut out."""
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


def _pixels(image: Image.Image, transform: Callable[[Image.Image], Tensor], config: dict[str, Any]) -> Tensor:
    """Resize and crop an image with timm's transform, to uint8 ``[3, H, W]``."""
    if image.mode != "RGB":
        raise ValueError(f"image is of mode {image.mode!r}, expected 'RGB'; use `decode`")
    check_resized(image, _resized_wh(image.size, config))
    pixels = transform(image)
    if pixels.dtype != torch.uint8 or pixels.shape != config["input_size"]:
        raise DecodeError(
            "unsupported",
            f"timm made {pixels.dtype} {list(pixels.shape)} of the image of {image.width}×{image.height} pixels, expected "
            f"torch.uint8 {list(config['input_size'])}",
        )
    return pixels


def _array(image: Image.Image, transform: Callable[[Image.Image], Tensor], config: dict[str, Any]) -> np.ndarray:
    return _pixels(image, transform, config).numpy()


def _resized_wh(image_wh: tuple[int, int], config: dict[str, Any]) -> tuple[int, int]:
    """Return the width and height to which timm's transform resizes in each mode of cropping, give or take a pixel."""
    target_wh = [math.floor(side / config["crop_pct"]) for side in (config["input_size"][2], config["input_size"][1])]
    if config["crop_mode"] == "squash":
        return target_wh[0], target_wh[1]
    ratios = [side / target for side, target in zip(image_wh, target_wh, strict=True)]
    ratio = max(ratios) if config["crop_mode"] == "border" else min(ratios)
    return round(image_wh[0] / ratio), round(image_wh[1] / ratio)


# What the code of hundreds of networks raises where it meets a placeholder instead of a tensor.
_UNTRACEABLE = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, NameError, AssertionError)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)


def fold_timm_norms(model: nn.Module) -> fx.GraphModule | None:
    """Return a model, traced, with batch norms folded; None if it cannot be traced or has none. The model is changed, too.

    Args:
        model: in evaluation, on the device where it will run, in float32; on the meta device to find out whether it folds.
    """
    tracer = _Tracer(autowrap_functions=tuple(get_notrace_functions()))
    try:
        traced = tracer.trace(model)
    except _UNTRACEABLE:
        return None
    graph = fx.GraphModule(tracer.root, traced)
    _take_norms_apart(graph)
    return graph if fold_norms(graph) else None


class _Tracer(fx.Tracer):
    """Takes for one layer what timm says cannot be traced, such as norms with an activation."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_notrace_module(type(m)) or super().is_leaf_module(m, module_qualified_name)


def _take_norms_apart(graph: fx.GraphModule) -> None:
    """Make of each norm with an activation a norm and an activation, and drop what does nothing in evaluation."""
    layers = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        layer: Any = layers.get(str(node.target)) if node.op == "call_module" else None
        if type(layer) in _NOTHING:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif type(layer) is BatchNormAct2d:
            activation = layer.act
            node.target = f"{node.name}_norm"
            norm = copy(layer)  # Of the same tensors, without the activation.
            norm.__class__, norm._modules = nn.BatchNorm2d, {}
            graph.add_submodule(node.target, norm)
            if type(activation) not in _NOTHING:
                graph.add_submodule(f"{node.name}_act", activation)
                with graph.graph.inserting_after(node):
                    active = graph.graph.call_module(f"{node.name}_act")
                node.replace_all_uses_with(active)
                active.args = (node,)
    recompile(graph)


class MapModel(nn.Module):
    """A model of timm up to its pooling, from its input ``[B, 3, ...]`` to its map or its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor) -> Tensor:
        """Run the model."""
        return self.model.forward_features(values)


class UnpooledModel(nn.Module):
    """The output of `MapModel` as vectors of a grid.

    Args:
        model: the model of timm.
        network: a `MapModel` of it, or what was made of one.
        grid_hw: rows and columns of its grid, from `grid_hw`.
    """

    def __init__(self, model: Any, network: nn.Module, grid_hw: tuple[int, int]) -> None:
        super().__init__()
        self._network = network
        self._cells = grid_hw[0] * grid_hw[1]
        self._output_fmt, self._width = _output_fmt(model), model.num_features

    def forward(self, values: Tensor) -> Tensor:
        """Run the model: its input ``[B, 3, ...]`` to ``[B, H * W, D]``."""
        found: Tensor = self._network(values)
        if found.ndim == 3:
            return found[:, found.shape[1] - self._cells :]  # [B, T, D]; tokens of no patch come first
        if not _channels_last(self._output_fmt, self._width, found):
            found = found.permute(0, 2, 3, 1)
        return found.flatten(1, 2)


def grid_hw(model: Any, found: Any) -> tuple[int, int] | None:
    """Return rows and columns of the grid of a model's unpooled features.

    Args:
        model: a model of timm.
        found: what its ``forward_features`` returns.

    Returns:
        Rows and columns; None if the features are not such a grid, or nothing says in which order their tokens are.
    """
    if not isinstance(found, Tensor) or model.num_features not in found.shape[1:]:
        return None
    if found.ndim == 4:
        height, width = found.shape[1:3] if _channels_last(_output_fmt(model), model.num_features, found) else found.shape[2:]
        return height, width
    # Where tokens are merged on the way, as in Hiera, their order is the model's own.
    patches = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    grid = getattr(patches, "grid_size", None)
    if found.ndim != 3 or grid is None or grid[0] * grid[1] + getattr(model, "num_prefix_tokens", 0) != found.shape[1]:
        return None
    return grid[0], grid[1]


def _output_fmt(model: Any) -> str | None:
    return getattr(model, "output_fmt", None)


def _channels_last(output_fmt: str | None, width: int, found: Tensor) -> bool:
    """Return whether a map is ``[B, H, W, D]``: models say so, or the width tells."""
    return output_fmt == "NHWC" or found.shape[1] != width

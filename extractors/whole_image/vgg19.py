"""``vgg19-10crop`` and ``vgg19-10crop-caffe``: VGG19's fc7, mean of ten crops.

The layer is the second fully connected one, after ReLU. With ``keep_crops`` the feature is ``[K, D]`` in the
order of `extractors.images.preprocessing.ten_crop_views`.

The two extractors have incompatible feature spaces:

====================  ======================================  =====================================================
..                    ``vgg19-10crop``                        ``vgg19-10crop-caffe``
====================  ======================================  =====================================================
weights               torchvision's, of 2017                  Oxford's ``VGG_ILSVRC_19_layers``, of 2014
input                 RGB / 255, less mean, by std            BGR in 0…255, less (103.939, 116.779, 123.68)
resize                Pillow, bilinear with antialiasing      bilinear without antialiasing
centre crop           as torchvision's ``TenCrop``            rounded down, as Caffe's ``oversample``
====================  ======================================  =====================================================

The second follows ``extract_cnn_features.py`` of github.com/ivendrov/order-embedding, the source of the
papers' features: the ReLU is taken per crop, then the mean. Two differences remain:

- That script divided each feature by its length; here features are unnormalised.
- It resized floats; here the resized image is rounded to 8 bits (cosine of features 0.999999).

Shapes: ``B`` images, ``K`` = 10 crops, ``H`` and ``W`` pixels of a resized image, ``D`` = 4096 width of the feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from extractors.base import Description, Extractor, sample_image
from extractors.computing.compile import warm_up_compile
from extractors.computing.cpu_parallel import run_in_chunks, run_single_threaded
from extractors.computing.devices import cast_layers, precision_context
from extractors.computing.fusion import optimize_for_inference, trace_and_fold
from extractors.computing.oom import BatchLimits, run_with_oom_retry
from extractors.images.preprocessing import CROPS, Preprocessing, resized_pixels, ten_crop
from extractors.networks import VGG19, VGG19_WEIGHTS
from extractors.options import ExtractorOptions
from extractors.weights.caffemodel import read_layers
from extractors.weights.checkpoints import Choice, checkpoint_format, read_state_dict
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from schemas.errors import InputError
from schemas.features import FeatureSpec
from schemas.process.devices import upload

FORWARD_CROPS = 1
"""Crops per forward of the convolutions on a CPU, a divisor of `CROPS`. See `extractors.computing.cpu_parallel`."""

# Torchvision's layer names by Caffe's.
_CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34)
_CONVOLUTIONS_OF_BLOCK = (2, 2, 4, 4, 4)
_CAFFE_NAMES = [f"conv{block + 1}_{i + 1}" for block, count in enumerate(_CONVOLUTIONS_OF_BLOCK) for i in range(count)]
_LAYERS = {name: f"features.{index}" for name, index in zip(_CAFFE_NAMES, _CONVOLUTIONS, strict=True)}
_LAYERS |= {"fc6": "classifier.0", "fc7": "classifier.3"}
# Torchvision's layer names until January 2017, used in conversions of that time.
_OLD_NAMES = {"classifier.1": "classifier.0", "classifier.4": "classifier.3"}


def build_vgg19() -> nn.Module:
    """Build VGG19 without its last layer."""
    model = VGG19()
    model.classifier = model.classifier[:5]
    return model


def _read_vgg19(path: Path, choice: Choice | None = None) -> dict[str, Tensor]:
    """Read a state dict with today's names, without the last layer."""
    state = read_state_dict(path, choice)
    if "classifier.1.weight" in state and "classifier.0.weight" not in state:
        parts = ((name.rpartition("."), tensor) for name, tensor in state.items())
        state = {f"{_OLD_NAMES.get(layer, layer)}.{kind}": tensor for (layer, _, kind), tensor in parts}
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] != "classifier.6"}


def _read_torchvision(path: Path, choice: Choice | None = None) -> dict[str, Tensor]:
    if checkpoint_format(path) == "caffe":
        raise InputError(
            f"the weights file {str(path)!r} is a Caffe model, but vgg19-10crop needs torchvision's VGG19: "
            "use it with --extractor vgg19-10crop-caffe"
        )
    return _read_vgg19(path, choice)


def _read_caffe(path: Path, choice: Choice | None = None) -> dict[str, Tensor]:
    if checkpoint_format(path) != "caffe":
        return _read_vgg19(path, choice)
    layers = read_layers(path)
    missing = [name for name in _LAYERS if len(layers.get(name, ())) != 2]
    if missing:
        raise InputError(
            f"the weights file {str(path)!r} lacks weight and bias of {len(missing)} layers of VGG19 ({', '.join(missing)}), it "
            f"has {', '.join(list(layers)[:20])}: pass VGG_ILSVRC_19_layers.caffemodel"
        )
    kinds = ("weight", "bias")
    return {f"{_LAYERS[name]}.{kind}": torch.from_numpy(layers[name][i]) for name in _LAYERS for i, kind in enumerate(kinds)}


@dataclass(frozen=True)
class Variant:
    """Model and preprocessing of an extractor.

    Attributes:
        preprocessing: preprocessing with ten crops in place of the centre crop.
        center: position of the centre crop, see `extractors.images.preprocessing.ten_crop_views`.
    """

    architecture: Architecture
    preprocessing: Preprocessing
    center: str


VARIANTS = {
    "vgg19-10crop": Variant(
        Architecture(
            build=build_vgg19,
            default=VGG19_WEIGHTS,
            refused={
                "d01eb7cb": "these are Oxford's VGG19 weights of 2014 in torchvision's format (jcjohnson/pytorch-vgg), which see "
                "BGR in 0…255. Use the extractor vgg19-10crop-caffe with them",
            },
            read=_read_torchvision,
        ),
        Preprocessing(resize_short=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        center="nearest",
    ),
    "vgg19-10crop-caffe": Variant(
        Architecture(
            build=build_vgg19,
            refused={
                "dcbb9e9d": "these are torchvision's own VGG19 weights, another training run that sees RGB in 0…1. Use the "
                "extractor vgg19-10crop with them",
            },
            read=_read_caffe,
            without_default="it stands for Oxford's VGG_ILSVRC_19_layers of 2014, which torchvision does not have. Pass with "
            "--weights PATH the original VGG_ILSVRC_19_layers.caffemodel "
            "(www.robots.ox.ac.uk/~vgg/software/very_deep/caffe/), or a conversion of it with torchvision's names, such as "
            "vgg19-d01eb7cb.pth (github.com/jcjohnson/pytorch-vgg), as .pth, .pt or .safetensors; --weights random:0 runs "
            "without, untrained. Torchvision's own VGG19 is the extractor vgg19-10crop",
        ),
        Preprocessing(
            resize_short=256,
            crop=224,
            mean=(103.939, 116.779, 123.68),
            std=(1.0, 1.0, 1.0),
            divisor=1.0,
            channel_order="BGR",
            antialias=False,
        ),
        center="floor",
    ),
}


class VGG19TenCrop(Extractor):
    """VGG19 up to the ReLU of its second fully connected layer, for ten crops."""

    def __init__(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> None:
        super().__init__(describe(settings, weights), device)
        self._variant = VARIANTS[settings.spec.name]
        self._device = device
        self._normalize = self._variant.preprocessing.normalizer(device)
        self._limits = BatchLimits()
        self._precision = settings.precision
        self._keep_crops = settings.keep_crops
        model = self._variant.architecture.load(weights)
        self._dtype = cast_layers(model, settings.precision)
        shape = (FORWARD_CROPS, 3, self._variant.preprocessing.crop, self._variant.preprocessing.crop)
        self._convolutions: Any = optimize_for_inference(
            trace_and_fold(model.features), shape, device, precision=settings.precision, compile=settings.compile
        )
        self._connected: Any = model.classifier.to(device)
        if settings.compile and device.type == "cpu":
            warm_up_compile(self._convolve, torch.zeros(shape, dtype=torch.uint8))

    @property
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray]:
        """Picklable `preprocess` without the model."""
        return partial(resized_pixels, preprocessing=self._variant.preprocessing)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Resize the shorter side to 256: uint8 ``[3, H, W]``, channels R, G, B."""
        return torch.from_numpy(resized_pixels(image, self._variant.preprocessing))

    def collate(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Return the images as a list, since image sizes differ."""
        return list(images)

    def extract(self, batch: Sequence[Tensor]) -> np.ndarray:
        """Run the model on the ten crops of B images from `preprocess`; B may be 0.

        Returns:
            ``[B, D]`` or ``[B, K, D]`` in the spec's dtype, not negative, unnormalised. On a CPU the bytes do
            not depend on batch and thread count.
        """
        short = self._variant.preprocessing.resize_short
        for image in batch:
            if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3 or min(image.shape[1:]) != short:
                raise ValueError(
                    f"an image of the batch is {image.dtype} {list(image.shape)}, expected torch.uint8 [3, "
                    f"H, W] with the smaller of H and W {short}"
                )
        if not len(batch):
            return np.zeros((0, *self.spec.shape), dtype=self.spec.dtype)
        if self._device.type == "cpu":
            return self.spec.rounded(self._extract_on_cpu(batch).numpy())
        with precision_context(self._precision, self._device), torch.inference_mode():
            indices = torch.arange(len(batch))  # Images of different sizes do not fit into one tensor.
            features = run_with_oom_retry(lambda part: self._forward([batch[i] for i in part]), indices, self._limits)
            return self.spec.rounded(features.numpy())

    def sample(self) -> np.ndarray:
        """Compute the features of some crops: all ten take seconds on a CPU."""
        with precision_context(self._precision, self._device), torch.inference_mode():
            crops = self._crops(self.preprocess(sample_image()))[:FORWARD_CROPS]
            return self._connected(self._convolve(crops)).float().cpu().numpy()

    def _extract_on_cpu(self, batch: Sequence[Tensor]) -> Tensor:
        """Run convolutions on `FORWARD_CROPS` crops per thread, other layers on ten."""
        crops = torch.cat([self._crops(image) for image in batch])  # [B * K, 3, 224, 224]
        maps = run_in_chunks(self._convolve, crops, FORWARD_CROPS)
        return torch.cat(run_single_threaded(self._connect, maps.split(CROPS)))

    def _forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute float32 ``[B, *spec.shape]`` on the CPU from uint8 on any device."""
        crops = torch.cat([self._crops(image) for image in images])  # [B * K, 3, 224, 224]
        return self._connect(self._convolve(crops)).cpu()

    def _crops(self, image: Tensor) -> Tensor:
        """Crop uint8 ``[3, H, W]`` to ``[K, 3, 224, 224]`` on the extractor's device."""
        return ten_crop(upload(image, self._device), crop=self._variant.preprocessing.crop, center=self._variant.center)

    def _convolve(self, crops: Tensor) -> Tensor:
        """Normalise and convolve: uint8 ``[N, 3, 224, 224]`` to ``[N, 25088]``."""
        values = self._normalize(crops.contiguous(memory_format=torch.channels_last))
        return self._convolutions(values.to(self._dtype)).flatten(1)  # [N, 512, 7, 7] in Caffe's order, channels first

    def _connect(self, maps: Tensor) -> Tensor:
        """Compute float32 ``[B, D]`` or ``[B, K, D]`` from maps ``[B * K, 25088]``."""
        crops = self._connected(maps).view(-1, CROPS, self.spec.shape[-1])  # [B, K, D]
        if self._keep_crops:
            return crops.to(torch.float32)
        total = torch.zeros_like(crops[:, 0], dtype=torch.float64)
        for crop in crops.unbind(1):
            total += crop
        # A tensor as divisor: see `extractors.images.preprocessing.Normalizer`.
        return (total / total.new_full((), CROPS)).to(torch.float32)


def find_weights(spec: FeatureSpec, request: str) -> Weights:
    """Resolve weights, see `extractors.catalogue.ExtractorModule`."""
    return resolve_weights(request, VARIANTS[spec.name].architecture)


def describe(settings: ExtractorOptions, weights: Weights) -> Description:
    """Describe the extractor, see `extractors.catalogue.ExtractorModule`."""
    variant = VARIANTS[settings.spec.name]
    transform = variant.preprocessing.parameters() | {"crops": CROPS, "center": variant.center}
    separate = {"separate": True} if settings.keep_crops else {}
    return Description(settings.spec, settings.parameters(weights, transform=transform, **separate))


load = VGG19TenCrop

"""Registry of extractors by name. Importing this loads no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from extractors.base import Description, Extractor
from extractors.options import ExtractorOptions
from schemas.errors import UsageError
from schemas.features import FeatureSpec

if TYPE_CHECKING:
    import torch

    from extractors.weights.resolve import Weights

ENTRY_POINTS = "imagepivot.extractors"
"""Entry points of modules that register extractors, by the extractor's name."""

_TIMM = "timm:"
OPEN_CLIP = "open_clip:"
DETECTRON2 = "detectron2:"
# Extras by package.
_EXTRAS = dict.fromkeys(("PIL", "numpy", "safetensors", "torch", "torchvision"), "extractors")
_EXTRAS |= {"timm": "timm", "open_clip": "clip"}
_DETECTRON2_INSTALLATION = (
    "detectron2 is not on PyPI. Install torch and a C++ compiler, then build it (a few minutes): "
    "pip install 'setuptools>=70.1,<82' ninja && pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git@02b5c4e295e990042a714712c21dc79b731e8833'"
)


class ExtractorModule(Protocol):
    """Interface of an extractor's module."""

    def find_weights(self, spec: FeatureSpec, request: str) -> Weights:
        """Resolve and check the requested weights: ``default``, a path or ``random:SEED``."""

    def describe(self, settings: ExtractorOptions, weights: Weights) -> Description:
        """Describe the extractor that `load` would create, without a device."""

    def load(self, settings: ExtractorOptions, weights: Weights, device: torch.device) -> Extractor:
        """Create the extractor on a device that supports the precision of the settings."""


@dataclass(frozen=True)
class Entry:
    """Extractor of the catalogue.

    Attributes:
        spec: spec of its feature without options.
        module: name of its `ExtractorModule`; for a registered extractor the `ExtractorModule` itself.
        weights: accepted weights, for the list of extractors.
        detectron2_module: its `ExtractorModule` for the backend detectron2; empty if unsupported.
        crops: number of crops for ``--keep-crops``; 0 if unsupported.
        gpu_rate: images per second from files to shards on an H200 in fp32, see docs/internals/h200.md.
        core_rate: images per second of a core with AVX-512 in fp32, see docs/internals/performance.md.
    """

    spec: FeatureSpec
    module: str | ExtractorModule
    weights: str = ""
    makes_regions: bool = False
    detectron2_module: str = ""
    crops: int = 0
    gpu_rate: float = 0
    core_rate: float = 0


ENTRIES = {
    entry.spec.name: entry
    for entry in (
        Entry(
            FeatureSpec(
                name="resnet50-pool",
                shape=(2048,),
                source="Multi30K, github.com/multi30k/dataset, scripts/feature-extractor: ResNet50, global average pool",
            ),
            module="extractors.whole_image.resnet50",
            gpu_rate=716,
            core_rate=12.8,
            weights="default: torchvision's ResNet50_Weights.IMAGENET1K_V1; or that model as .pth, .pt or .safetensors",
        ),
        Entry(
            FeatureSpec(
                name="vgg19-10crop",
                shape=(4096,),
                source="torchvision's VGG19: second fully connected layer after ReLU, mean of ten crops",
            ),
            module="extractors.whole_image.vgg19",
            weights="default: torchvision's VGG19_Weights.IMAGENET1K_V1; or that model as .pth, .pt or .safetensors",
            crops=10,
            gpu_rate=67,
            core_rate=0.4,
        ),
        Entry(
            FeatureSpec(
                name="vgg19-10crop-caffe",
                shape=(4096,),
                source="github.com/ivendrov/order-embedding, extract_cnn_features.py, before its L2 normalisation: Oxford's "
                "VGG_ILSVRC_19_layers, fc7 after ReLU, mean of ten crops",
            ),
            module="extractors.whole_image.vgg19",
            weights="no default: VGG_ILSVRC_19_layers.caffemodel, or a conversion of it as .pth, .pt or .safetensors",
            crops=10,
            gpu_rate=67,  # That of the same network from torchvision.
            core_rate=0.46,
        ),
        Entry(
            FeatureSpec(
                name="vgg19-grid",
                shape=(196, 512),
                source="Nam, Ha, Kim 2017 (DAN): VGG19 at 448x448 pixels, last pooling layer, 14x14 in row-major order",
            ),
            module="extractors.whole_image.conv_grids",
            gpu_rate=108,
            core_rate=1.2,
            weights="default: torchvision's VGG19_Weights.IMAGENET1K_V1; or that model as .pth, .pt or .safetensors",
        ),
        Entry(
            FeatureSpec(
                name="resnet152-grid",
                shape=(196, 2048),
                source="Nam, Ha, Kim 2017 (DAN): ResNet152 at 448x448 pixels, below the last pooling layer, 14x14 in row-major "
                "order",
            ),
            module="extractors.whole_image.conv_grids",
            gpu_rate=94,
            core_rate=1.2,
            weights="default: torchvision's ResNet152_Weights.IMAGENET1K_V1; or that model as .pth, .pt or .safetensors",
        ),
        Entry(
            FeatureSpec(
                name="faster-rcnn-36",
                shape=(36, 2048),
                source="github.com/peteanderson80/bottom-up-attention, tools/generate_tsv.py: Faster R-CNN on ResNet-101, Visual "
                "Genome, pool5_flat of the 36 best regions",
            ),
            module="extractors.regions.faster_rcnn",
            weights="no default: any release of bottom-up attention's detector, as .caffemodel, .pkl, .pth or .safetensors",
            makes_regions=True,
            gpu_rate=20,
            core_rate=0.085,
            detectron2_module="extractors.regions.detectron2_backend.extractor",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """Listing of an extractor or a family of extractors, without weights.

    Attributes:
        shape: shape of the feature of one image; None if it depends on the model.
        weights: accepted weights, in words; all extractors also accept ``random:SEED``.
        preprocessing: steps from an RGB image to the model's input; None if they depend on the model.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"
    source: str
    weights: str
    preprocessing: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"shape": None if self.shape is None else list(self.shape)}


_FAMILIES = (
    CatalogueEntry(
        name="timm:NAME",
        kind="features",
        source="the pooled output of one of timm's models, e.g. timm:resnet18.a1_in1k; with --unpooled the map before the pooling",
        weights="default: timm's of that name; or that model as .pth, .pt or .safetensors",
    ),
    CatalogueEntry(
        name="open_clip:NAME",
        kind="features",
        source="the image encoder of a joint model of open_clip by name, e.g. open_clip:ViT-B-32, or by folder",
        weights="default: open_clip's of that name, or those in the folder; or that model as .pt, .bin or .safetensors",
    ),
    CatalogueEntry(
        name="detectron2:CONFIG+WEIGHTS",
        kind="regions",
        source="the regions of one of detectron2's models, given by the paths of its config file and its checkpoint",
        weights="in the name",
    ),
)


def list_extractors(*names: str) -> tuple[CatalogueEntry, ...]:
    """List extractors without their weights; imports torch.

    Args:
        names: names of extractors, also ``timm:NAME``, ``open_clip:NAME`` and ``detectron2:CONFIG+WEIGHTS``;
            without any all, and the families.

    Examples:
        >>> [listed] = imagepivot.list_extractors("timm:resnet18")
        >>> listed.shape, listed.preprocessing["input_size"]
        ((512,), [3, 224, 224])

    Raises:
        UsageError: a name is unknown, or a required package is not installed.
    """
    return tuple(map(_catalogue_entry, names)) if names else (*map(_catalogue_entry, extractor_names()), *_FAMILIES)


def _catalogue_entry(name: str) -> CatalogueEntry:
    entry = entry_of(name)
    module = import_module(entry.module, name)
    from extractors.weights.resolve import Weights

    prefix = name.partition(":")[0]
    description = module.describe(ExtractorOptions(entry.spec), Weights(state={}))  # The preprocessing ignores weights.
    return CatalogueEntry(
        name=name,
        kind=description.kind,
        shape=entry.spec.shape,
        dtype=entry.spec.dtype,
        source=entry.spec.source,
        weights=entry.weights or next(family.weights for family in _FAMILIES if family.name.startswith(prefix)),
        preprocessing=description.parameters.get("transform"),
    )


def extractor_names() -> tuple[str, ...]:
    """Return the sorted names of the extractors and their entry points, not families."""
    return tuple(sorted({*ENTRIES, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def entry_of(name: str, *, unpooled: bool = False) -> Entry:
    """Return the entry of an extractor or of a family's model.

    Raises:
        UsageError: the name is unknown, the extractor does not support ``unpooled``, or a required package is not installed.
    """
    if name not in ENTRIES and ":" not in name:  # Registered names have no colons.
        for point in entry_points(group=ENTRY_POINTS, name=name):
            point.load()
    if name.startswith(_TIMM):
        module = import_module("extractors.whole_image.timm_models", name)
        return Entry(module.spec(name.removeprefix(_TIMM), unpooled=unpooled), module="extractors.whole_image.timm_models")
    if unpooled and (name in ENTRIES or name.startswith((OPEN_CLIP, DETECTRON2))):
        raise UsageError(
            f"--unpooled works with {_TIMM}NAME only, not with extractor {name!r}: leave it out; vgg19-grid "
            "and resnet152-grid are always unpooled"
        )
    if name.startswith(OPEN_CLIP):
        own = "extractors.whole_image.open_clip_images"
        return Entry(import_module(own, name).spec(name), module=own)
    if name.startswith(DETECTRON2):
        own = "extractors.regions.detectron2_backend.stock_models"
        spec = import_module(own, name).spec(name.removeprefix(DETECTRON2))
        return Entry(spec, module=own, makes_regions=True, detectron2_module=own)
    if name not in ENTRIES:
        similar = get_close_matches(name, extractor_names(), n=1, cutoff=0.5)
        guess = f"did you mean {similar[0]!r}? Extractors are" if similar else "choose one of"
        raise UsageError(
            f"there is no extractor {name!r}: {guess} {', '.join(extractor_names())}, {_TIMM}NAME for timm "
            f"models, {OPEN_CLIP}NAME or {OPEN_CLIP}FOLDER for open_clip models, and "
            f"{DETECTRON2}CONFIG+WEIGHTS for detectron2 models. --import MODULE registers one of your own"
        )
    return ENTRIES[name]


def import_module(module: str | ExtractorModule, name: str) -> Any:
    """Import a module for an extractor; a registered one is returned.

    Raises:
        UsageError: a required package is not installed.
    """
    if not isinstance(module, str):
        return module
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(package)
        if extra is None and module.startswith("extractors.regions.detectron2_backend."):
            raise UsageError(
                f"extractor {name!r} with detectron2 needs the package {package!r}, which is not installed. "
                + _DETECTRON2_INSTALLATION
            ) from error
        if extra is None:
            raise
        raise UsageError(
            f"extractor {name!r} needs the package {error.name!r}, which is not installed: pip install 'imagepivot[{extra}]'"
        ) from error

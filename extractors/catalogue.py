"""The extractors by name. The shapes of those with a fixed name are known without importing torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from extractors.base import Description, Extractor
from extractors.settings import RegionOptions, Settings
from schemas.errors import UsageError
from schemas.features import FeatureSpec
from schemas.locations import absolute_location

if TYPE_CHECKING:
    import torch

    from extractors.weights.finding import Weights

__all__ = ["CatalogueEntry", "ExtractorModule", "ExtractorRequest", "describe", "entries", "load", "names", "spec"]

_TIMM = "timm:"
_DETECTRON2 = "detectron2:"
_CONFIG_END = re.compile(r"(?<=\.yaml)\+|(?<=\.yml)\+")
# Packages that an extractor may need, and the extra that installs them.
_EXTRAS = dict.fromkeys(("PIL", "numpy", "safetensors", "torch", "torchvision"), "extractors") | {"timm": "timm"}
_DETECTRON2_INSTALLATION = (
    "detectron2 is not on the package index. With torch and a C++ compiler installed, this builds it in a few minutes: "
    "pip install 'setuptools>=70.1,<82' ninja && pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git@02b5c4e295e990042a714712c21dc79b731e8833'"
)


class ExtractorModule(Protocol):
    """The functions that the module of an extractor provides."""

    def find_weights(self, spec: FeatureSpec, request: str) -> Weights:
        """Find and check the weights that a user asks for: ``default``, a path or ``random:SEED``."""

    def describe(self, settings: Settings, weights: Weights) -> Description:
        """Describe what `load` would make, without a device."""

    def load(self, settings: Settings, weights: Weights, device: torch.device) -> Extractor:
        """Make the extractor on a device that computes in the precision of the settings."""


@dataclass(frozen=True)
class _Entry:
    """An extractor that can be loaded: its spec, for each backend the `ExtractorModule` that makes it, its weights in words."""

    spec: FeatureSpec
    module: str
    weights: str = ""
    makes_regions: bool = False
    detectron2_module: str = ""


_ENTRIES = {
    entry.spec.name: entry
    for entry in (
        _Entry(
            FeatureSpec(
                name="resnet50-pool",
                shape=(2048,),
                source="Multi30K, github.com/multi30k/dataset, scripts/feature-extractor: ResNet50, global average pool",
            ),
            module="extractors.pooled.resnet50",
            weights="default: torchvision's ResNet50_Weights.IMAGENET1K_V1; or that model as .pth, .pt or .safetensors",
        ),
        _Entry(
            FeatureSpec(
                name="vgg19-10crop",
                shape=(4096,),
                source="torchvision's VGG19: second fully connected layer after ReLU, mean of ten crops",
            ),
            module="extractors.pooled.vgg19",
            weights="default: torchvision's VGG19_Weights.IMAGENET1K_V1; or that model as .pth, .pt or .safetensors",
        ),
        _Entry(
            FeatureSpec(
                name="vgg19-10crop-caffe",
                shape=(4096,),
                source="github.com/ivendrov/order-embedding, extract_cnn_features.py, before its L2 normalisation: Oxford's "
                "VGG_ILSVRC_19_layers, fc7 after ReLU, mean of ten crops",
            ),
            module="extractors.pooled.vgg19",
            weights="no default: VGG_ILSVRC_19_layers.caffemodel, or a conversion of it as .pth, .pt or .safetensors",
        ),
        _Entry(
            FeatureSpec(
                name="faster-rcnn-36",
                shape=(36, 2048),
                source="github.com/peteanderson80/bottom-up-attention, tools/generate_tsv.py: Faster R-CNN on ResNet-101, Visual "
                "Genome, pool5_flat of the 36 best regions",
            ),
            module="extractors.regions.faster_rcnn",
            weights="no default: any release of bottom-up attention's detector, as .caffemodel, .pkl, .pth or .safetensors",
            makes_regions=True,
            detectron2_module="extractors.regions.detectron2_backend.extractor",
        ),
    )
}


@dataclass(frozen=True)
class CatalogueEntry:
    """What there is to know about an extractor before its weights are at hand.

    Attributes:
        name: its name, or the form of the names of a family.
        kind: kind of dataset that it fills, ``features`` or ``regions``.
        shape: shape of the feature of one image; None if it depends on the model.
        dtype: type of its values.
        source: what it reproduces.
        weights: the weights that it takes, in words; besides these ``random:SEED``, untrained.
        preprocessing: the steps from an RGB image to the model's input; None if they depend on the model.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    source: str
    weights: str
    preprocessing: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"shape": None if self.shape is None else list(self.shape)}


_FAMILIES = (
    CatalogueEntry(
        name="timm:NAME",
        kind="features",
        shape=None,
        dtype="float32",
        source="the pooled output of one of timm's models, e.g. timm:resnet18.a1_in1k",
        weights="default: timm's of that name; or that model as .pth, .pt or .safetensors",
        preprocessing=None,
    ),
    CatalogueEntry(
        name="detectron2:CONFIG+WEIGHTS",
        kind="regions",
        shape=None,
        dtype="float32",
        source="the regions of one of detectron2's models, given by the paths of its config file and its checkpoint",
        weights="in the name",
        preprocessing=None,
    ),
)


def entries() -> tuple[CatalogueEntry, ...]:
    """Describe all extractors: those of `names`, and the two families. Imports torch, and reads no weights.

    Raises:
        UsageError: a package that the extractors need is not installed.
    """
    return (*map(_catalogue_entry, names()), *_FAMILIES)


def _catalogue_entry(name: str) -> CatalogueEntry:
    entry = _ENTRIES[name]
    module = _import(entry.module, name)
    from extractors.weights.finding import Weights

    # Of the weights only the digest enters a description, and it does not decide the preprocessing.
    description = module.describe(Settings(entry.spec), Weights(state={}))
    return CatalogueEntry(
        name=name,
        kind=description.kind,
        shape=entry.spec.shape,
        dtype=entry.spec.dtype,
        source=entry.spec.source,
        weights=entry.weights,
        preprocessing=description.parameters["transform"],
    )


def names() -> tuple[str, ...]:
    """Return the names of the extractors, sorted; besides these there are ``timm:NAME`` and ``detectron2:CONFIG+WEIGHTS``."""
    return tuple(sorted(_ENTRIES))


@dataclass(frozen=True)
class ExtractorRequest:
    """An extractor as a user asks for it. Making one reads nothing and checks nothing; its methods do.

    Attributes:
        name: one of `names`, or ``timm:NAME`` with the name of one of timm's models, e.g. ``timm:resnet18.a1_in1k``. Without the
            part behind the dot it is the model's default there; the spec always has the full name. Or
            ``detectron2:CONFIG+WEIGHTS`` with the paths of a config file and a checkpoint of detectron2, see
            `extractors.regions.detectron2_backend.stock_models`.
        weights: ``default`` (torchvision's or timm's of that name, downloaded once; ``vgg19-10crop-caffe`` has none), the path of
            a ``.pth``, ``.pt`` or ``.safetensors`` file (``vgg19-10crop-caffe`` and ``faster-rcnn-36`` also read ``.caffemodel``,
            the latter every release of its detector), its ``gs://``, ``s3://``, ``http://`` or ``https://`` address (fetched once
            per machine), or ``random:SEED`` (untrained).
        precision: ``fp32`` or ``bf16``; on a GPU also ``tf32`` and ``fp16``.
        compile: run the model through ``torch.compile``, on a GPU only: the first batches take a minute, and the last digits of
            the features may differ, so it is part of the fingerprint.
        regions: which regions to keep, for an extractor of regions; None for its defaults.
    """

    name: str
    weights: str = "default"
    precision: str = "fp32"
    compile: bool = False
    regions: RegionOptions | None = None

    def spec(self) -> FeatureSpec:
        """Return name, shape and type of the feature that the extractor makes by default, without weights.

        Raises:
            UsageError: there is no extractor of that name, or it needs a package that is not installed.
        """
        return _entry(self.name).spec

    def describe(self) -> Description:
        """Describe what `load` would make, without a device: for the machine that plans a run and does not extract.

        The weights are hashed and checked, so missing or wrong ones are an error here already, but their values are not copied
        into memory where the format allows that. Whether a device computes in the precision is left to `load`. Weights stay at
        hand for a `load` that follows in the same process, see `extractors.weights.keeping`.

        Raises:
            UsageError: the name or an option is not one of those listed.
            InputError: the weights are missing, broken, or another model's.
        """
        module, settings = self._resolve()
        from extractors.computing.devices import check_precision
        from extractors.weights.keeping import keep

        check_precision(self.precision)
        weights = module.find_weights(settings.spec, self.weights)
        description = module.describe(settings, weights)
        keep(self._weights_key(module, settings), weights)
        return description

    def load(self, device: str = "cpu") -> Extractor:
        """Load the extractor, ready to use.

        Args:
            device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (a GPU if there is one).

        Raises:
            UsageError: the name or an option is not one of those listed, or this machine lacks the device.
            InputError: the weights are missing, broken, or another model's.
        """
        module, settings = self._resolve()
        from extractors.computing.devices import check_request
        from extractors.weights.keeping import take

        torch_device = check_request(device, self.precision, compile=self.compile)
        weights = take(self._weights_key(module, settings)) or module.find_weights(settings.spec, self.weights)
        return module.load(settings, weights.in_memory(), torch_device)

    def files(self) -> tuple[str, ...]:
        """Return the locations of the files that every process reads which loads the extractor; none for weights by name."""
        return tuple(filter(_names_file, (*_stock_model(self.name), self.weights)))

    def located(self) -> ExtractorRequest:
        """Return the same request with absolute paths, which mean the same to a process in another folder."""
        model = _stock_model(self.name)
        name = f"{_DETECTRON2}{'+'.join(map(_absolute, model))}" if model else self.name
        return replace(self, name=name, weights=_absolute(self.weights))

    def _resolve(self) -> tuple[ExtractorModule, Settings]:
        """Import the module that makes the extractor: afterwards torch is known to be installed."""
        entry = _entry(self.name)
        if self.regions is not None and not entry.makes_regions:
            raise UsageError(
                f"extractor {self.name!r} makes one feature per image and no regions: leave the options of regions out"
            )
        options = self.regions or RegionOptions()
        module = entry.detectron2_module if options.backend == "detectron2" else entry.module
        return _import(module, entry.spec.name), Settings(entry.spec, self.precision, self.compile, options)

    def _weights_key(self, module: ExtractorModule, settings: Settings) -> tuple[object, ...]:
        """Return what decides which weights are found."""
        return module, settings.spec.name, self.weights


def spec(name: str) -> FeatureSpec:
    """Return name, shape and type of the feature that an extractor makes, see `ExtractorRequest.spec`."""
    return ExtractorRequest(name).spec()


def describe(
    name: str,
    *,
    weights: str = "default",
    precision: str = "fp32",
    compile: bool = False,  # noqa: A002
    regions: RegionOptions | None = None,
) -> Description:
    """Describe what `load` would make of the same arguments, see `ExtractorRequest.describe`."""
    return ExtractorRequest(name, weights, precision, compile, regions).describe()


def load(
    name: str,
    *,
    weights: str = "default",
    device: str = "cpu",
    precision: str = "fp32",
    compile: bool = False,  # noqa: A002
    regions: RegionOptions | None = None,
) -> Extractor:
    """Load an extractor, ready to use: an `ExtractorRequest` of these arguments, on a device.

    Example:
        >>> extractor = load("resnet50-pool", weights="random:0")  # doctest: +SKIP
        >>> pixels = [extractor.preprocess(decode(data)) for data in files]  # doctest: +SKIP
        >>> extractor.extract(extractor.collate(pixels)).shape  # doctest: +SKIP
        (16, 2048)
    """
    return ExtractorRequest(name, weights, precision, compile, regions).load(device)


def _stock_model(name: str) -> tuple[str, ...]:
    """Return the config and the weights in the name of an extractor, if it is one of detectron2's models."""
    return tuple(_CONFIG_END.split(name.removeprefix(_DETECTRON2), maxsplit=1)) if name.startswith(_DETECTRON2) else ()


def _names_file(weights: str) -> bool:
    return weights not in ("", "default") and not weights.startswith("random:")


def _absolute(weights: str) -> str:
    return absolute_location(weights) if _names_file(weights) else weights


def _entry(name: str) -> _Entry:
    if name.startswith(_TIMM):
        module = _import("extractors.pooled.timm_models", name)
        return _Entry(module.spec(name.removeprefix(_TIMM)), module="extractors.pooled.timm_models")
    if name.startswith(_DETECTRON2):
        own = "extractors.regions.detectron2_backend.stock_models"
        spec = _import(own, name).spec(name.removeprefix(_DETECTRON2))
        return _Entry(spec, module=own, makes_regions=True, detectron2_module=own)
    if name not in _ENTRIES:
        raise UsageError(
            f"there is no extractor {name!r}; choose one of {', '.join(names())}, {_TIMM}NAME for timm's models, or "
            f"{_DETECTRON2}CONFIG+WEIGHTS for detectron2's"
        )
    return _ENTRIES[name]


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(package)
        if extra is None and module.startswith("extractors.regions.detectron2_backend."):
            raise UsageError(
                f"extractor {name!r} with detectron2 needs the package {package!r}, which is not installed here. "
                + _DETECTRON2_INSTALLATION
            ) from error
        if extra is None:
            raise
        raise UsageError(
            f"extractor {name!r} needs the package {error.name!r}, which is not installed here: pip install 'imagepivot[{extra}]'"
        ) from error

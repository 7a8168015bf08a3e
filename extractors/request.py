"""An extractor as a user asks for it: by name, with its weights and options. Importing this loads no torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from extractors.base import Description, Extractor, warn_once
from extractors.catalogue import DETECTRON2, ENTRIES, Entry, ExtractorModule, entry_of, import_module, names
from extractors.description_cache import FileStamp, cache_folder, cached_description
from extractors.options import ExtractorOptions, RegionOptions
from schemas.errors import UsageError
from schemas.features import DTYPES, FeatureSpec
from schemas.options import Opt
from schemas.storage.locations import absolute_location, is_remote

if TYPE_CHECKING:
    import torch


_MODEL = "Model"
_CONFIG_END = re.compile(r"(?<=\.yaml)\+|(?<=\.yml)\+")


Precision: TypeAlias = Annotated[
    str, Opt("Compute in fp32 or bf16; on a GPU also tf32 or fp16.", panel=_MODEL, completion=("fp32", "bf16", "tf32", "fp16"))
]
DType: TypeAlias = Literal["float32", "float16"]
StoredType: TypeAlias = Annotated[DType, Opt("Store values as float32, or rounded to float16 (half the size).", panel=_MODEL)]
Weights: TypeAlias = Annotated[
    str,
    Opt(
        "Load [i]default[/i] (downloaded once), a file or address, [i]FILE#NAME[/i] (one of its sets), or [i]random:SEED[/i] "
        "(untrained).",
        completion=("default", "random:0"),
    ),
]


def extractor_names() -> tuple[str, ...]:
    """Return names of extractors, and the beginnings of others."""
    return (*names(), "timm:", DETECTRON2)


@dataclass(frozen=True)
class ExtractorRequest:
    """An extractor as a user asks for it. Making one reads nothing and checks nothing; its methods do.

    Attributes:
        name: one of `names`, or ``timm:NAME`` with the name of one of timm's models, e.g. ``timm:resnet18.a1_in1k``. Without the
            part behind the dot it is the model's default there; the spec always has the full name. Or
            ``detectron2:CONFIG+WEIGHTS`` with the paths of a config file and a checkpoint of detectron2.
        weights: ``default`` are torchvision's or timm's of that name, of which ``vgg19-10crop-caffe`` has none. The format of a
            file is told by its content. An address is fetched once per machine.
        compile: not for regions on a CPU. The last digits of the features may differ, so it is part of the fingerprint.
        regions: for an extractor of regions; None for its defaults.
        dtype: features are computed in float32 and then rounded; beyond the range of float16 the image becomes a failure.
        unpooled: the map is ``[H * W, D]`` in row-major order.
        keep_crops: the crops are ``[10, D]``.
    """

    name: Annotated[
        str,
        Opt("Run this extractor; [i]imagepivot extractors[/i] lists them.", name="extractor", completion=extractor_names),
    ]
    weights: Weights = "default"
    precision: Precision = "fp32"
    compile: Annotated[bool, Opt("Compile the model, which takes minutes (needs a C++ compiler on a CPU).", panel=_MODEL)] = (
        False
    )
    regions: RegionOptions | None = None
    dtype: StoredType = "float32"
    unpooled: Annotated[bool, Opt("Store the feature map before pooling (timm only).", panel=_MODEL)] = False
    keep_crops: Annotated[bool, Opt("Store a vector per crop, not the mean (ten-crop only).", panel=_MODEL)] = False

    def spec(self) -> FeatureSpec:
        """Return name, shape and type of the feature that the extractor makes, without weights; of regions by default.

        Raises:
            UsageError: there is no extractor of that name, it needs a package that is not installed, or it does not have an
                option.
        """
        return self._entry().spec

    def describe(self) -> Description:
        """Describe what `load` would make, without a device: for the machine that plans a run and does not extract.

        The weights are hashed and checked, so missing or wrong ones are an error here already, but their values are not copied
        into memory where the format allows that. Whether a device computes in the precision is left to `load`. Weights stay at
        hand for a `load` that follows in the same process, see `extractors.weights.resolve`. What this machine has described
        before is not read again, see `extractors.description_cache`.

        Raises:
            UsageError: the name or an option is not one of those listed.
            InputError: the weights are missing, broken, or another model's.
        """
        located = self.located()
        if _stock_model(self.name) or is_remote(located.weights):  # Of several files, or of whatever is there now.
            return self._described()[0]
        return cached_description(asdict(located), self._described)

    def _described(self) -> tuple[Description, Path | None, FileStamp | None]:
        module, settings = self._resolve()
        from extractors.computing.devices import check_precision
        from extractors.weights.resolve import store_weights

        check_precision(self.precision)
        weights = module.find_weights(settings.spec, self.weights)
        description = replace(module.describe(settings, weights), remark=weights.remark)
        store_weights(self._weights_key(module, settings), weights)
        return description, weights.path, weights.stamp

    def load(self, device: str = "cpu") -> Extractor:
        """Load the extractor, ready to use.

        Args:
            device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (a GPU if there is one).

        Raises:
            UsageError: the name or an option is not one of those listed, or this machine lacks the device or a compiler.
            InputError: the weights are missing, broken, or another model's.
        """
        module, settings = self._resolve()
        from extractors.weights.resolve import pop_weights

        torch_device = self.check_device(device)
        if self.compile and torch_device.type == "cpu":
            from extractors.computing.compile import set_compile_cache

            set_compile_cache(cache_folder("compiled"))
        weights = pop_weights(self._weights_key(module, settings)) or module.find_weights(settings.spec, self.weights)
        if weights.remark:
            warn_once(weights.remark)
        return module.load(settings, weights.in_memory(), torch_device)

    def check_device(self, device: str) -> torch.device:
        """Return a device after checking that this machine has it, and that it does what is asked.

        Raises:
            UsageError: it has not, or does not.
        """
        from extractors.computing.devices import check_request

        found = check_request(device, self.precision, compile=self.compile)
        if self.compile and found.type == "cpu" and self._entry().makes_regions:
            raise UsageError("--compile needs a GPU for regions, but the device is 'cpu': leave it out, or choose a GPU")
        return found

    def files(self) -> tuple[str, ...]:
        """Return the locations of the files that every process reads which loads the extractor; none for weights by name."""
        from extractors.weights.download import split_choice

        return tuple(split_choice(name)[0] for name in (*_stock_model(self.name), self.weights) if _names_file(name))

    def located(self) -> ExtractorRequest:
        """Return the same request with absolute paths, which mean the same to a process in another folder."""
        model = _stock_model(self.name)
        name = f"{DETECTRON2}{'+'.join(map(_absolute, model))}" if model else self.name
        return replace(self, name=name, weights=_absolute(self.weights))

    def _resolve(self) -> tuple[ExtractorModule, ExtractorOptions]:
        """Import the module that makes the extractor: afterwards torch is known to be installed."""
        entry = self._entry()
        if self.regions is not None and not entry.makes_regions:
            raise UsageError(
                f"extractor {self.name!r} makes one feature per image and no regions: leave the options of regions out"
            )
        options = self.regions or RegionOptions()
        module = entry.detectron2_module if options.backend == "detectron2" else entry.module
        settings = ExtractorOptions(entry.spec, self.precision, self.compile, options, self.unpooled, self.keep_crops)
        return import_module(module, entry.spec.name), settings

    def _entry(self) -> Entry:
        """Return the entry of the extractor, with the spec that the options ask for."""
        entry = entry_of(self.name, unpooled=self.unpooled)
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.keep_crops and not entry.crops:
            several = ", ".join(name for name in names() if ENTRIES[name].crops)
            raise UsageError(
                f"--keep-crops keeps the features of crops apart, and extractor {self.name!r} makes none of several crops: leave "
                f"it out, or choose one of {several}"
            )
        spec = replace(entry.spec, dtype=self.dtype)
        if self.keep_crops:
            source = spec.source.replace("mean of ten crops", "each of ten crops")
            spec = replace(spec, shape=(entry.crops, *spec.shape), source=source)
        return replace(entry, spec=spec)

    def _weights_key(self, module: ExtractorModule, settings: ExtractorOptions) -> tuple[object, ...]:
        """Return what decides which weights are found."""
        return module, settings.spec.name, self.weights


def load(
    name: str,
    *,
    weights: str = "default",
    device: str = "cpu",
    precision: str = "fp32",
    compile: bool = False,  # noqa: A002
    regions: RegionOptions | None = None,
    dtype: DType = "float32",
    unpooled: bool = False,
    keep_crops: bool = False,
) -> Extractor:
    """Load an extractor, ready to use: an `ExtractorRequest` of these arguments, on a device.

    Example:
        >>> extractor = load("resnet50-pool", weights="random:0")  # doctest: +SKIP
        >>> pixels = [extractor.preprocess(decode(data)) for data in files]  # doctest: +SKIP
        >>> extractor.extract(extractor.collate(pixels)).shape  # doctest: +SKIP
        (16, 2048)
    """
    return ExtractorRequest(name, weights, precision, compile, regions, dtype, unpooled, keep_crops).load(device)


def _stock_model(name: str) -> tuple[str, ...]:
    """Return the config and the weights in the name of an extractor, if it is one of detectron2's models."""
    return tuple(_CONFIG_END.split(name.removeprefix(DETECTRON2), maxsplit=1)) if name.startswith(DETECTRON2) else ()


def _names_file(weights: str) -> bool:
    return weights not in ("", "default") and not weights.startswith("random:")


def _absolute(weights: str) -> str:
    return absolute_location(weights) if _names_file(weights) else weights

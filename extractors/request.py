"""Requests for extractors by name and options; importing loads no torch."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from extractors.base import Description, Extractor, warn_once
from extractors.catalogue import (
    DETECTRON2,
    ENTRIES,
    OPEN_CLIP,
    Entry,
    ExtractorModule,
    entry_of,
    extractor_names,
    import_module,
)
from extractors.description_cache import FileStamp, cache_folder, cached_description
from extractors.options import ExtractorOptions, RegionOptions
from extractors.registration import registered_extractor
from schemas.errors import UsageError
from schemas.features import FeatureSpec
from schemas.options import Opt, Options
from schemas.sample_outputs import SampleOutputs
from schemas.storage.locations import absolute_location, is_remote, local_path

if TYPE_CHECKING:
    import torch


_MODEL = "Model"
_CONFIG_END = re.compile(r"(?<=\.yaml)\+|(?<=\.yml)\+")


Precision: TypeAlias = Annotated[
    Literal["fp32", "bf16", "tf32", "fp16"], Opt("Compute in fp32 or bf16; on a GPU also tf32 or fp16.", panel=_MODEL)
]
DType: TypeAlias = Literal["float32", "float16"]
StoredType: TypeAlias = Annotated[DType, Opt("Store values as float32, or rounded to float16 (half the size).", panel=_MODEL)]
WeightsRequest: TypeAlias = Annotated[
    str,
    Opt(
        "Load [i]default[/i] (downloaded once), a file or address, [i]FILE#NAME[/i] (one of its sets), or "
        "[i]random:SEED[/i] (untrained).",
        completion=("default", "random:0"),
    ),
]


def extractor_completions() -> tuple[str, ...]:
    """Return extractor names and the prefixes of families, for completion."""
    return (*extractor_names(), "timm:", OPEN_CLIP, DETECTRON2)


@dataclass(frozen=True, repr=False)
class ExtractorRequest(Options):
    """Request for an extractor. Its methods check and read, the constructor does not.

    Attributes:
        name: one of `extractor_names`; ``timm:NAME``, e.g. ``timm:resnet18.a1_in1k``, or ``timm:resnet18``
            for the model's default tag; ``open_clip:NAME`` or ``open_clip:FOLDER``; or
            ``detectron2:CONFIG+WEIGHTS`` with the paths of a config file and a checkpoint.
        weights: ``default`` weights are torchvision's or timm's. The format of a file is detected from its
            content. Remote files are downloaded once per machine.
        compile: unsupported for regions on a CPU. Last digits of features may differ, so it is part of the fingerprint.
        regions: options of region extractors; None for the defaults.
        dtype: features are rounded from float32. An image with values beyond the range of float16 becomes a failure.
        unpooled: extract ``[H * W, D]`` in row-major order.
        keep_crops: extract ``[10, D]``.

    Examples:
        >>> request = imagepivot.ExtractorRequest("vgg19-10crop", weights="random:0", dtype="float16")
        >>> request.spec().shape
        (4096,)
    """

    name: Annotated[
        str,
        Opt("Run this extractor; [i]imagepivot extractors[/i] lists them.", name="extractor", completion=extractor_completions),
    ]
    weights: WeightsRequest = "default"
    precision: Precision = "fp32"
    compile: Annotated[bool, Opt("Compile the model, which takes minutes (needs a C++ compiler on a CPU).", panel=_MODEL)] = (
        False
    )
    regions: RegionOptions | None = None
    dtype: StoredType = "float32"
    unpooled: Annotated[bool, Opt("Store the feature map before pooling (timm only).", panel=_MODEL)] = False
    keep_crops: Annotated[bool, Opt("Store a vector per crop, not their mean.", panel=_MODEL)] = False

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a registered extractor with the request, for other processes."""
        return {**vars(self), "registered": registered_extractor(self.name)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (registered := state.pop("registered")) is not None:
            registered.register()
        vars(self).update(state)

    def spec(self) -> FeatureSpec:
        """Return the feature spec, without weights and options of regions.

        Raises:
            UsageError: the name is unknown, a required package is not installed, or an option is unsupported.
        """
        return self._entry().spec

    def describe(self) -> Description:
        """Describe the extractor that `load` would create, without a device.

        Weights are read, hashed and checked. Descriptions are cached, see `extractors.description_cache`.

        Raises:
            UsageError: the name or an option is invalid.
            InputError: the weights are missing, corrupt, or of another model.
        """
        located = self.located()
        is_uncached = _stock_model(self.name) or _model_folder(self.name) or registered_extractor(self.name)
        if is_uncached or is_remote(located.weights):
            return self._describe()[0]
        return cached_description(asdict(located), self._describe)

    def _describe(self) -> tuple[Description, Path | None, FileStamp | None]:
        module, settings = self._resolve()
        weights = module.find_weights(settings.spec, self.weights)
        description = replace(module.describe(settings, weights), remark=weights.remark)
        return description, weights.path, weights.stamp

    def load(self, device: str = "cpu") -> Extractor:
        """Load the extractor, ready to use.

        Args:
            device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (a GPU if available).

        Raises:
            UsageError: the name or an option is invalid, or this machine lacks the device or a compiler.
            InputError: the weights are missing, corrupt, or of another model.
        """
        module, settings = self._resolve()
        torch_device = self.check_device(device)
        if self.compile and torch_device.type == "cpu":
            from extractors.computing.compile import set_compile_cache

            with suppress(FileNotFoundError):  # Without a home folder torch's own cache is used.
                set_compile_cache(cache_folder("compiled"))
        weights = module.find_weights(settings.spec, self.weights)
        if weights.remark:
            warn_once(weights.remark)
        return module.load(settings, weights, torch_device)

    def sample_outputs(self, device: str) -> SampleOutputs:
        """Return the sample outputs on a device, by `load` if not cached; raise as `load`."""
        from extractors.sample_outputs import sample_outputs, stored_sample_outputs

        cached = stored_sample_outputs(self.describe().fingerprint, self.check_device(device))
        return cached or sample_outputs(self.load(device))

    def check_device(self, device: str) -> torch.device:
        """Return a device that this machine has and that supports the request.

        Raises:
            UsageError: the device is missing, or does not support the request.
        """
        from extractors.computing.devices import check_request

        torch_device = check_request(device, self.precision, compile=self.compile)
        if self.compile and torch_device.type == "cpu" and self._entry().makes_regions:
            raise UsageError("--compile needs a GPU for regions, but the device is 'cpu': leave it out, or choose a GPU")
        return torch_device

    def files(self) -> tuple[str, ...]:
        """Return the locations of the files that `load` reads; none for weights by name."""
        from extractors.weights.download import split_choice

        names = (*_stock_model(self.name), _model_folder(self.name), self.weights)
        return tuple(split_choice(name)[0] for name in names if names_file(name))

    def located(self) -> ExtractorRequest:
        """Return the request with absolute paths, for processes in other folders."""
        model = _stock_model(self.name)
        name = f"{DETECTRON2}{'+'.join(map(_absolute, model))}" if model else self.name
        if folder := _model_folder(name):
            name = OPEN_CLIP + absolute_location(folder)
        return replace(self, name=name, weights=_absolute(self.weights))

    def _resolve(self) -> tuple[ExtractorModule, ExtractorOptions]:
        """Import the extractor's module, which checks that torch is installed."""
        entry = self._entry()
        if self.regions is not None and not entry.makes_regions:
            raise UsageError(f"extractor {self.name!r} extracts no regions: leave the options of regions out")
        options = self.regions or RegionOptions()
        module = entry.detectron2_module if options.backend == "detectron2" else entry.module
        settings = ExtractorOptions(entry.spec, self.precision, self.compile, options, self.unpooled, self.keep_crops)
        return import_module(module, entry.spec.name), settings

    def _entry(self) -> Entry:
        """Return the catalogue entry with the requested spec."""
        entry = entry_of(self.name, unpooled=self.unpooled)
        if self.keep_crops and not entry.crops:
            ten_crop = ", ".join(name for name in sorted(ENTRIES) if ENTRIES[name].crops)
            raise UsageError(
                f"--keep-crops needs one of the extractors {ten_crop}, not {self.name!r}: leave it out, or choose one"
            )
        spec = replace(entry.spec, dtype=self.dtype)
        if self.keep_crops:
            source = spec.source.replace("mean of ten crops", "each of ten crops")
            spec = replace(spec, shape=(entry.crops, *spec.shape), source=source)
        return replace(entry, spec=spec)


def load_extractor(
    name: str,
    *,
    weights: str = "default",
    device: str = "cpu",
    precision: Precision = "fp32",
    compile: bool = False,  # noqa: A002
    regions: RegionOptions | None = None,
    dtype: DType = "float32",
    unpooled: bool = False,
    keep_crops: bool = False,
) -> Extractor:
    """Load an extractor, see `ExtractorRequest`; `Extractor` has an example."""
    return ExtractorRequest(name, weights, precision, compile, regions, dtype, unpooled, keep_crops).load(device)


def _stock_model(name: str) -> tuple[str, ...]:
    """Return config and weights of a detectron2 model's name, else an empty tuple."""
    return tuple(_CONFIG_END.split(name.removeprefix(DETECTRON2), maxsplit=1)) if name.startswith(DETECTRON2) else ()


def _model_folder(name: str) -> str:
    """Return the folder in the name of an open_clip model, else an empty string."""
    folder = name.removeprefix(OPEN_CLIP)
    return folder if name != folder and os.path.isdir(local_path(folder)) else ""  # noqa: PTH112 -- False for invalid paths, too.


def names_file(weights: str) -> bool:
    """Return whether weights are a file or address, not a name."""
    return weights not in ("", "default") and not weights.startswith("random:")


def _absolute(weights: str) -> str:
    return absolute_location(weights) if names_file(weights) else weights

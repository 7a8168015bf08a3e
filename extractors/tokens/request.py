"""Requests for text encoders of Hugging Face; importing loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from extractors.base import Description
from extractors.description_cache import cached_folder_description
from schemas.errors import InputError, UsageError
from schemas.features import DTYPES
from schemas.sample_outputs import SampleOutputs
from schemas.storage.locations import is_remote, local_path

if TYPE_CHECKING:
    from extractors.tokens.transformer import TokenExtractor

Pooling = Literal["mean", "first"]

_ADAPTER = "adapter_config.json"  # Refers to a base model outside of the folder.
_LIBRARIES = ("transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class TokenRequest:
    """Request for a text model.

    Attributes:
        model: folder with config, tokenizer and weights as saved by transformers, or a name in Hugging Face's cache.
        pooling: ``mean`` of a token's sub-word vectors, or its ``first`` one.
        dtype: stored dtype, ``float32`` or ``float16``, rounded from float32.
        precision: ``fp32`` or ``bf16``; on a GPU also ``tf32`` and ``fp16``.

    Raises:
        UsageError: a value is invalid.
    """

    model: str
    pooling: Pooling = "mean"
    dtype: str = "float32"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("--model is missing: give a folder with a model, or a name in Hugging Face's cache")
        for option, value, choices in (("--sub-words", self.pooling, get_args(Pooling)), ("--dtype", self.dtype, DTYPES)):
            if value not in choices:
                raise UsageError(f"{option} is {value!r}, expected one of {', '.join(choices)}")

    def describe(self, device: str = "cpu") -> Description:
        """Describe the model from the cache, else by loading it; raise as `load`."""
        folder = find_folder(self.model)
        if Path(folder, _ADAPTER).exists():
            return self.load(device).description
        request = {"sub_words": self.pooling, "dtype": self.dtype, "precision": self.precision}
        return cached_folder_description(request, folder, lambda: self.load(device).description, libraries=_LIBRARIES)

    def sample_outputs(self, device: str) -> SampleOutputs:
        """Return the sample outputs on a device, by `load` if not cached; raise as `load`."""
        from extractors.computing.devices import check_request
        from extractors.sample_outputs import sample_outputs, stored_sample_outputs

        cached = stored_sample_outputs(self.describe(device).fingerprint, check_request(device, self.precision))
        return cached or sample_outputs(self.load(device))

    def load(self, device: str = "cpu") -> TokenExtractor:
        """Load the model on ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.

        Raises:
            UsageError: transformers is not installed, or this host lacks the device or the precision.
            InputError: the model is missing, corrupt, or unsupported.
        """
        folder = find_folder(self.model)
        try:
            from extractors.tokens.transformer import TokenExtractor

            return TokenExtractor(folder, self.model, self.pooling, self.dtype, self.precision, device)
        except ModuleNotFoundError as error:
            raise _not_installed() from error


def is_folder(model: str) -> bool:
    """Return whether a model is a folder, not a name in Hugging Face's cache."""
    return is_remote(model) or os.path.isdir(local_path(model))  # noqa: PTH112 -- False for invalid paths, too.


def find_folder(model: str) -> Path:
    """Return the folder of a model on this machine.

    Raises:
        InputError: the model is missing.
        UsageError: huggingface_hub is not installed.
    """
    if is_remote(model):
        raise InputError(f"--model {model!r} is in an object store, expected a local folder: copy it to this machine first")
    if is_folder(model):
        return local_path(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise _not_installed() from error
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as error:
        raise InputError(
            f"there is no model {model!r}: neither a folder nor Hugging Face's cache on this machine has that name. Download it "
            "on a machine with a network (command hf of huggingface_hub), and give its folder"
        ) from error


def _not_installed() -> UsageError:
    return UsageError("text models need the package transformers, which is not installed: pip install 'imagepivot[bert]'")

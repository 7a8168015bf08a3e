"""A model of text as a user asks for it, and its folder on this machine. Importing this loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from extractors.base import Description
from extractors.description_cache import cached_folder_description
from schemas.errors import InputError, UsageError
from schemas.features import DTYPES
from schemas.storage.locations import is_remote, local_path

if TYPE_CHECKING:
    from extractors.tokens.transformer import TokenExtractor

Pooling = Literal["mean", "first"]
POOLINGS: tuple[Pooling, ...] = ("mean", "first")
"""The vector of a token: the mean of those of its sub-words, or that of the first."""

_ADAPTER = "adapter_config.json"  # Names another model, wherever that is.
_LIBRARIES = ("transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class TokenRequest:
    """A model of text as a user asks for it. Making one reads nothing.

    Attributes:
        model: a folder with a config, a tokenizer and weights as transformers saves them, or a name in Hugging Face's cache.
        pooling: what a token gets: the ``mean`` of the vectors of its sub-words, or the vector of the ``first``.
        dtype: type in which vectors are stored, ``float32`` or ``float16``; they are computed in float32 and then rounded.
        precision: ``fp32`` or ``bf16``; on a GPU also ``tf32`` and ``fp16``.

    Raises:
        UsageError: a value is none of these.
    """

    model: str
    pooling: Pooling = "mean"
    dtype: str = "float32"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("--model is missing: give a folder with a model, or a name in Hugging Face's cache")
        for option, value, known in (("--sub-words", self.pooling, POOLINGS), ("--dtype", self.dtype, DTYPES)):
            if value not in known:
                raise UsageError(f"{option} is {value!r}, expected one of {', '.join(known)}")

    def describe(self, device: str = "cpu") -> Description:
        """Describe the model, from the cache if this machine has described it before, else by loading it on a device.

        Raises:
            UsageError: as `load` raises it.
            InputError: likewise.
        """
        folder = find_folder(self.model)
        if Path(folder, _ADAPTER).exists():
            return self.load(device).description
        request = {"sub_words": self.pooling, "dtype": self.dtype, "precision": self.precision}
        return cached_folder_description(request, folder, lambda: self.load(device).description, libraries=_LIBRARIES)

    def load(self, device: str = "cpu") -> TokenExtractor:
        """Load the model.

        Args:
            device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.

        Raises:
            UsageError: transformers is not installed, or this host lacks the device or the precision.
            InputError: there is no such model here, it is damaged, or no model whose tokens could be told apart.
        """
        folder = find_folder(self.model)
        try:
            from extractors.tokens.transformer import TokenExtractor

            return TokenExtractor(folder, self.model, self.pooling, self.dtype, self.precision, device)
        except ModuleNotFoundError as error:
            raise _not_installed() from error


def is_folder(model: str) -> bool:
    """Return whether a model is given by a folder, and not by a name in Hugging Face's cache."""
    return is_remote(model) or os.path.isdir(local_path(model))  # noqa: PTH112 -- false, too, where no folder can be


def find_folder(model: str) -> Path:
    """Return the folder of a model on this machine.

    Raises:
        InputError: there is no such model.
        UsageError: the package is not installed that looks for it.
    """
    if is_remote(model):
        raise InputError(f"--model {model!r} lies in a store, and a model is read from a folder: copy it to this machine first")
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
            f"there is no model {model!r} here: it is no folder, and Hugging Face's cache on this machine has no model of that "
            f"name. Fetch it where there is a network, with the command hf of huggingface_hub, and give its folder"
        ) from error


def _not_installed() -> UsageError:
    """Return the error that says which extra is missing."""
    return UsageError("models of text need the package transformers, which is not installed: pip install 'imagepivot[bert]'")

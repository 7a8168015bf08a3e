"""Requests for text models; importing loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from extractors.base import Description
from extractors.description_cache import cached_folder_description
from schemas.errors import InputError, UsageError
from schemas.sample_outputs import SampleOutputs
from schemas.storage.locations import is_remote, local_path

if TYPE_CHECKING:
    from extractors.tokens.text_model import TextModel

OPEN_CLIP, SENTENCE = "open_clip:", "sentence:"
"""Prefixes of models with a vector per sentence."""

_ADAPTER = "adapter_config.json"  # Refers to a base model outside of the folder.
_LIBRARIES = ("transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class TextRequest:
    """Request for a text model.

    Attributes:
        model: folder with config, tokenizer and weights as saved by transformers, or a name in Hugging Face's cache, for vectors of
            tokens; behind ``sentence:`` such a model of sentence-transformers, and behind ``open_clip:`` a name or folder, see
            `extractors.weights.open_clip_models`, for a vector per sentence.
        pooling: ``mean`` of a token's sub-word vectors, or its ``first`` one.
        dtype: stored dtype, ``float32`` or ``float16``, rounded from float32.
        precision: ``fp32`` or ``bf16``; on a GPU also ``tf32`` and ``fp16``.
        weights: those of `extractors.request.ExtractorRequest`, for open_clip only.
        prefix: text before each sentence; empty for the model's own, if it has one.

    Raises:
        UsageError: the model is missing.
    """

    model: str
    pooling: Literal["mean", "first"] = "mean"
    dtype: str = "float32"
    precision: str = "fp32"
    weights: str = "default"
    prefix: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise UsageError("--model is missing: give a folder with a model, or a name in Hugging Face's cache")

    def describe(self, device: str = "cpu") -> Description:
        """Describe the model from the cache, else by loading it; raise as `load`."""
        if self.model.startswith(OPEN_CLIP):
            return self.load(device).description
        folder = find_folder(self.model.removeprefix(SENTENCE))
        if Path(folder, _ADAPTER).exists():
            return self.load(device).description
        request = vars(self) | {"model": self.model if self.model.startswith(SENTENCE) else ""}
        return cached_folder_description(request, folder, lambda: self.load(device).description, libraries=_LIBRARIES)

    def sample_outputs(self, device: str) -> SampleOutputs:
        """Return the sample outputs on a device, by `load` if not cached; raise as `load`."""
        from extractors.computing.devices import check_request
        from extractors.sample_outputs import sample_outputs, stored_sample_outputs

        cached = stored_sample_outputs(self.describe(device).fingerprint, check_request(device, self.precision))
        return cached or sample_outputs(self.load(device))

    def load(self, device: str = "cpu") -> TextModel:
        """Load the model on ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.

        Raises:
            UsageError: a package is not installed, or this host lacks the device or the precision.
            InputError: the model is missing, corrupt, or unsupported.
        """
        name, settings = self.model.removeprefix(SENTENCE), (self.dtype, self.precision, device)
        folder = None if name.startswith(OPEN_CLIP) else find_folder(name)
        try:
            from extractors.tokens.sentence_encoders import OpenClipText, SentenceTransformer
            from extractors.tokens.transformer import TokenExtractor

            if folder is None:
                return OpenClipText(name.removeprefix(OPEN_CLIP), self.weights, self.prefix, *settings)
            if name != self.model:
                return SentenceTransformer(folder, name, self.prefix, *settings)
            return TokenExtractor(folder, name, self.pooling, *settings)
        except ModuleNotFoundError as error:
            raise _not_installed(error.name, "bert" if folder else "clip") from error


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


def _not_installed(package: str | None = "transformers", extra: str = "bert") -> UsageError:
    return UsageError(f"this text model needs the package {package}, which is not installed: pip install 'imagepivot[{extra}]'")

"""Where a model of text lies on this machine. Importing this loads no torch."""

from __future__ import annotations

import os
from pathlib import Path

from schemas.errors import InputError, UsageError
from schemas.storage.locations import is_remote, local_path


def check_named(model: str) -> None:
    """Raise `UsageError` if no model is named."""
    if not model:
        raise UsageError("--model is missing: give a folder with a model, or a name in Hugging Face's cache")


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
        raise not_installed() from error
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as error:
        raise InputError(
            f"there is no model {model!r} here: it is no folder, and Hugging Face's cache on this machine has no model of that "
            f"name. Fetch it where there is a network, with the command hf of huggingface_hub, and give its folder"
        ) from error


def not_installed() -> UsageError:
    """Return the error that says which extra is missing."""
    return UsageError("models of text need the package transformers, which is not installed: pip install 'imagepivot[bert]'")

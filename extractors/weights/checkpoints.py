"""Reading state dicts safely from files, and checking that they belong to a model."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from schemas.errors import InputError

__all__ = ["COUNTER", "check_state", "is_mappable", "read_safetensors", "read_state", "read_torch", "unwrapped"]

COUNTER = ".num_batches_tracked"
"""End of the names of batch norm's counters, which no feature depends on."""

_WRAPPINGS = ("state_dict", "model")
_LISTED = 5
_CHUNK = 2**20  # numbers that are looked at together
# Names that tell architectures apart, the most specific first.
_SIGNS = (
    ("visual.conv1.weight", "CLIP"),
    ("roi_heads.box_predictor.cls_score.weight", "Faster R-CNN"),
    ("head.classes.weight", "Faster R-CNN"),
    ("backbone.body.conv1.weight", "detector"),
    ("encoder.layers.encoder_layer_0.ln_1.weight", "torchvision vision transformer"),
    ("blocks.0.attn.qkv.weight", "timm vision transformer"),
    ("features.denseblock1.denselayer1.conv1.weight", "DenseNet"),
    ("features.1.running_mean", "VGG with batch norm"),
    ("features.34.weight", "VGG19"),
    ("features.28.weight", "VGG16"),
    ("features.0.weight", "VGG or AlexNet"),
    ("layer3.35.conv3.weight", "ResNet152"),
    ("layer3.22.conv3.weight", "ResNet101"),
    ("layer3.5.conv3.weight", "ResNet50"),
    ("layer3.5.conv2.weight", "ResNet34"),
    ("layer3.1.conv2.weight", "ResNet18"),
)


def read_state(path: Path) -> dict[str, Tensor]:
    """Read names and tensors from a ``.pth``, ``.pt`` or ``.safetensors`` file.

    ``{"state_dict": ...}`` or ``{"model": ...}`` around them, and ``module.`` before every name, as training scripts write them,
    are removed.

    Raises:
        InputError: the file is of another kind, is damaged, or could run code when read.
    """
    if path.suffix == ".safetensors":
        content: Any = read_safetensors(path)
    elif path.suffix in (".pth", ".pt"):
        content = read_torch(path)
    else:
        raise InputError(f"the weights file {str(path)!r} ends in {path.suffix!r}, expected .pth, .pt or .safetensors")
    return unwrapped(content, path)


def unwrapped(content: Any, path: Path, kind: type | tuple[type, ...] = Tensor) -> dict[str, Any]:
    """Remove what training scripts write around a state dict.

    Args:
        content: the object that the file holds.
        path: the file, for messages.
        kind: type of the values, as ``isinstance`` takes it.

    Raises:
        InputError: the content does not map names to values of that type.
    """
    for wrapping in _WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapping), Mapping):
            content = content[wrapping]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, kind) for v in content.values()):
        raise InputError(
            f"the weights file {str(path)!r} holds {_shape_of(content)}, expected names and tensors (a state dict): save "
            "model.state_dict() instead"
        )
    names = [str(name) for name in content]
    prefix = "module." if all(name.startswith("module.") for name in names) else ""
    return {name.removeprefix(prefix): value for name, value in zip(names, content.values(), strict=True)}


def check_state(state: dict[str, Tensor], expected: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Check that a state dict has exactly the tensors of a model, with finite values.

    Batch norm's ``num_batches_tracked``, which no feature depends on, may be missing: files from before 2018 lack it.

    Args:
        state: names and tensors of the file.
        expected: names and tensors of the model, of which only shapes and types matter.
        source: the file, for messages.

    Returns:
        The state in the types of the model (files may hold 16 bits), with missing ``num_batches_tracked`` filled in.

    Raises:
        InputError: names are missing or unexpected, shapes differ, or values are not finite.
    """
    counters = {name for name in expected if name.endswith(COUNTER)}
    missing = [name for name in expected if name not in state and name not in counters]
    unexpected = [name for name in state if name not in expected]
    misshapen = [
        f"{name} {list(state[name].shape)} for {list(expected[name].shape)}"
        for name in expected
        if name in state and state[name].shape != expected[name].shape
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
    if any(names for _, names in problems):
        listed = "; ".join(f"{len(names)} {problem}: {_first(names)}" for problem, names in problems if names)
        raise InputError(
            f"the weights in {source} are not this model's: {listed}. These look like {_guess(state)} weights; "
            "pass the file that belongs to the extractor"
        )
    broken = [name for name, tensor in state.items() if not _is_finite(tensor)]
    if broken:
        raise InputError(
            f"the weights in {source} hold values that are not finite, in {_first(broken)}: the file is damaged; fetch it again"
        )
    return {name: torch.tensor(0) for name in counters} | {name: t.to(expected[name].dtype) for name, t in state.items()}


def _is_finite(tensor: Tensor) -> bool:
    """Tell whether all values are finite, in parts, so that the check of a mapped tensor takes next to no memory."""
    return all(bool(torch.isfinite(part).all()) for part in tensor.flatten().split(_CHUNK))


def is_mappable(path: Path) -> bool:
    """Tell whether a file is read by mapping it into memory, so that values cost nothing until something uses them.

    These are ``.safetensors`` files, and those of ``torch.save`` since version 1.6: zip archives, whose members are not
    compressed unless another program has packed them again.
    """
    if path.suffix == ".safetensors":
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the names and tensors of a ``.safetensors`` file.

    Raises:
        InputError: it is damaged or of another kind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"the weights file {str(path)!r} cannot be read as safetensors ({error}): "
            "it is damaged or of another kind; fetch it again"
        ) from error


def read_torch(path: Path, functions: Mapping[str, Any] | None = None) -> Any:
    """Read a file that ``torch.save`` wrote, in its old format too.

    Args:
        path: the file.
        functions: functions that the file may call besides torch's own, by the names that it has for them.

    Raises:
        InputError: the file is damaged, of another kind, or could run code when read.
    """
    try:
        # What torch warns of is advice for programmers, and on unsafe reading.
        with torch.serialization.safe_globals([(call, name) for name, call in (functions or {}).items()]), catch_warnings():
            simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable(path))
    except pickle.UnpicklingError as error:
        raise InputError(
            f"the weights file {str(path)!r} is refused: it is damaged, or holds Python objects, which could run code when "
            f"read ({_refused(error)}). Save model.state_dict() alone, or as .safetensors, where you trust the file"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AssertionError, zipfile.BadZipFile) as error:
        raise InputError(
            f"the weights file {str(path)!r} cannot be read by torch ({_reason(error)}): it is damaged or of another kind; "
            "fetch it again"
        ) from error


def _guess(state: Mapping[str, Tensor]) -> str:
    """Return the architecture that the names of a state dict are typical of."""
    return next((model for sign, model in _SIGNS if sign in state), "an unknown model's")


def _shape_of(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"a {type(content).__name__} with {_first([repr(key) for key in content])}"
    return f"a {type(content).__name__}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "") if names else "nothing in it"


def _reason(error: Exception) -> str:
    """Return what torch says about the file, but for its advice on unsafe reading."""
    text = (str(error).splitlines() or [type(error).__name__])[0][:200]
    if "weights_only" not in text:
        return text
    return "it is a TorchScript archive" if "TorchScript" in text else "it is in a format of before 2018"


def _refused(error: pickle.UnpicklingError) -> str:
    """Return what torch refused, likewise."""
    text = str(error).partition("\n\nCheck the documentation")[0]
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        return found[1]
    lines = text.rpartition("\n\n")[2].rpartition("Unpickler error: ")[2].strip().splitlines()
    return (lines or [type(error).__name__])[0][:200]

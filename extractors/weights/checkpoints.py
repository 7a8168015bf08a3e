"""Safe reading of state dicts from files, and checks against a model."""

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from torch import Tensor

from extractors.weights.restricted_pickle import OLD_TORCH_MAGIC, PICKLE_ERRORS, read_pickle, safe_globals
from schemas.errors import InputError, first_line
from schemas.pickle_growth import check_growth

COUNTER = ".num_batches_tracked"
"""Suffix of batch norm's counters, without effect on features."""

_WRAPPERS = ("state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")  # Prefixes of torch.nn.DataParallel and torch.compile.
_MAX_DEPTH = 3
_FORMATS = {".safetensors": "safetensors", ".pth": "torch", ".pt": "torch", ".pkl": "pickle", ".caffemodel": "caffe"}
_CAFFE_FIELDS = (b"\x0a", b"\x12", b"\xa2\x06")  # Fields name, layers and layer of a NetParameter.
_OTHER_FILES = {
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a Parquet file",
}
_EXPECTED = "a file of torch.save (such as .pth, .pt, .bin, .ckpt, .pth.tar), .safetensors, or a pickle of arrays"
_MAX_LISTED = 8
_CHUNK = 2**20  # Values per check.
# Tensor names that identify architectures, most specific first.
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


@dataclass
class Choice:
    """Set of weights in a file.

    Attributes:
        name: key of the set, such as ``model_ema``, nested keys joined by ``/``; empty for the usual one.
        remark: set by the reader of a file with several sets: the chosen set and how to choose another; else empty.
    """

    name: str = ""
    remark: str = ""


def checkpoint_format(path: Path) -> str:
    """Detect a format: ``torch``, ``safetensors``, ``pickle``, ``caffe``, else empty.

    Unknown content, such as that of a corrupt file, has the format of the file's extension.
    """
    with path.open("rb") as file:
        head = file.read(16)
    if _is_text(head) or head.startswith(tuple(_OTHER_FILES)):
        return ""
    if head.startswith((b"PK\x03\x04", OLD_TORCH_MAGIC)):  # Since version 1.6 torch.save writes zip archives.
        return "torch"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # Instruction PROTO.
        return "pickle"
    if head[8:9] == b"{":  # JSON after the length of the header.
        return "safetensors"
    return _FORMATS.get(path.suffix, "caffe" if head.startswith(_CAFFE_FIELDS) else "")


def _is_text(head: bytes) -> bool:
    # Among all formats only a .caffemodel may begin with ASCII alone: a line end, then a name.
    return head[:1] not in b"\n(" and all(byte in b"\t\r\n" or 0x20 <= byte < 0x7F for byte in head)


def read_state_dict(path: Path, choice: Choice | None = None) -> dict[str, Tensor]:
    """Read a state dict, or a chosen set of weights, from a file.

    Supported are files of ``torch.save``, ``.safetensors`` and pickles of arrays. Wrappers of training
    scripts (``{"state_dict": ...}``, ``{"model": ...}``, and ``module.`` before names) are removed.

    Raises:
        InputError: the file is of another kind, is corrupt, could run code when read, or lacks the set of weights.
    """
    return {
        name: value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        for name, value in read_entries(path, choice).items()
    }


def read_entries(path: Path, choice: Choice | None = None, *, arrays: bool = False) -> dict[str, Any]:
    """Read as `read_state_dict`; ``arrays`` permits arrays in ``torch.save`` files."""
    kind = checkpoint_format(path)
    if kind != "safetensors" and not path.stat().st_size:
        raise InputError(f"the weights file {str(path)!r} is empty: download it again")
    if kind == "safetensors":
        content: Any = read_safetensors(path)
    elif kind == "torch":
        content = read_torch(path, safe_globals(2 * path.stat().st_size) if arrays else None)
    elif kind == "pickle":
        content = read_pickle(path)
    else:
        raise InputError(
            f"the weights file {str(path)!r} is {'a Caffe model' if kind else _kind_of(path)}, expected "
            f"{_EXPECTED}: pass the file that belongs to the extractor"
        )
    return _unwrap(content, path, choice)


def _unwrap(content: Any, path: Path, choice: Choice | None = None) -> dict[str, Any]:
    """Remove the wrappers around a state dict, and set the remark of the choice."""
    choice = choice or Choice()
    sets = {"": content} if _is_state(content) else dict(_sets(content))
    usual = [name for name in sets if set(name.split("/")) <= {*_WRAPPERS, ""}]
    usual.sort(key=lambda name: [_WRAPPERS.index(key) for key in name.split("/") if key])
    chosen = choice.name or (usual[0] if usual else next(iter(sets), "") if len(sets) == 1 else "")
    if chosen not in sets:
        raise InputError(_no_set(content, path, choice, list(sets)))
    if len(sets) > 1:
        others = " or ".join(f"{path}#{name}" for name in sets if name != chosen)
        choice.remark = (
            f"the weights file {str(path)!r} has {len(sets)} sets of weights ({', '.join(sets)}), using "
            f"{chosen}: choose another with --weights {others}"
        )
    state = sets[chosen]
    names = [str(name) for name in state]
    for prefix in _PREFIXES * 2:  # In either order.
        if all(name.startswith(prefix) for name in names):
            names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))


def _no_set(content: Any, path: Path, choice: Choice, names: list[str]) -> str:
    if choice.name:
        available = f"{', '.join(names)}" if any(names) else "a single one without a name"
        return (
            f"the weights file {str(path)!r} has no set of weights {choice.name!r}, but {available}: pass one of these after #"
        )
    if names:
        return (
            f"the weights file {str(path)!r} has {len(names)} sets of weights, {', '.join(names)}: choose "
            f"one, e.g. --weights {path}#{names[0]}"
        )
    while isinstance(content, Mapping) and (key := next((key for key in _WRAPPERS if key in content), None)):
        content = content[key]
    keys = f" with {list_names([repr(key) for key in content])}" if isinstance(content, Mapping) else ""
    return (
        f"the weights file {str(path)!r} holds a {type(content).__name__}{keys}, expected names and tensors "
        "(a state dict): save model.state_dict() instead"
    )


def _is_state(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(v, (Tensor, np.ndarray)) for v in content.values())


def _sets(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the state dicts in a checkpoint by name, without those of optimizers."""
    if _is_state(content):
        yield "/".join(path), content
    elif isinstance(content, Mapping) and len(path) < _MAX_DEPTH:
        for key, value in content.items():
            if "optim" not in str(key).lower():
                yield from _sets(value, (*path, str(key)))


def check_state(state: dict[str, Tensor], expected: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Check that a state dict has exactly the tensors of a model, with finite values.

    Returns:
        The state in the model's dtypes, with missing ``num_batches_tracked`` (files before 2018) filled in.

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
        listed = "; ".join(f"{len(names)} {problem}: {list_names(names)}" for problem, names in problems if names)
        guess = next((model for sign, model in _SIGNS if sign in state), "an unknown model's")
        raise InputError(
            f"the weights in {source} are not this model's: {listed}. These look like {guess} weights; "
            "pass the file that belongs to the extractor"
        )
    nonfinite = [name for name, tensor in state.items() if not _is_finite(tensor)]
    if nonfinite:
        raise InputError(
            f"the weights in {source} have non-finite values in {list_names(nonfinite)}: the file is corrupt; download it again"
        )
    return {name: torch.tensor(0) for name in counters} | {name: t.to(expected[name].dtype) for name, t in state.items()}


def _is_finite(tensor: Tensor) -> bool:
    # In chunks, to save memory.
    return all(bool(torch.isfinite(part).all()) for part in tensor.flatten().split(_CHUNK))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a ``.safetensors`` file; raise `InputError` if it is corrupt."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # Copies: later changes of the file, which is mapped, must not change the model.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"the weights file {str(path)!r} cannot be read as safetensors ({error}): it is corrupt or of "
            "another kind; download it again"
        ) from error


def read_torch(path: Path, functions: Mapping[str, Any] | None = None) -> Any:
    """Read a file of ``torch.save``, new or old; permit calls of ``functions``.

    Raises:
        InputError: the file is corrupt, of another kind, or could run code when read.
    """
    try:
        # Without torch's warnings, which advise on unsafe reading.
        with torch.serialization.safe_globals([(call, name) for name, call in (functions or {}).items()]), catch_warnings():
            simplefilter("ignore")
            with path.open("rb") as file:
                check_growth(file)
            if path.suffix == ".safetensors":  # Torch chooses the format by the extension.
                return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"the weights file {str(path)!r} is refused: it is corrupt, or holds Python objects, which could run code when read "
            f"({_refused_object(error)}). If you trust the file, save model.state_dict() alone, or as .safetensors"
        ) from error
    except (*PICKLE_ERRORS, OSError, struct.error, zipfile.BadZipFile) as error:
        raise InputError(f"the weights file {str(path)!r} cannot be read by torch {_reason(error)}") from error


def _kind_of(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(40)
    if _is_text(head[:16]):
        return f"text that begins with {head!r}, such as an error page, a Git LFS pointer or the definition of a network"
    kinds = (kind for magic, kind in _OTHER_FILES.items() if head.startswith(magic))
    return next(kinds, f"of an unknown format (it begins with {head[:8]!r})")


def list_names(names: Collection[str]) -> str:
    """Return the first names of a state dict for a message."""
    return ", ".join(list(names)[:_MAX_LISTED]) + (", …" if len(names) > _MAX_LISTED else "") if names else "nothing in it"


def _reason(error: Exception) -> str:
    """Return torch's reason, without its advice on unsafe reading, and the remedy."""
    text = first_line(error)[:200]
    if "weights_only" not in text:
        return f"({type(error).__name__}: {text}): it is corrupt or no checkpoint, expected {_EXPECTED}; download it again"
    if "TorchScript" in text:
        return "(it is a TorchScript archive): if you trust the file, save torch.jit.load(FILE).state_dict() with torch.save"
    return "(its format is older than 2018): if you trust the file, read it with torch of its time and save it again"


def _refused_object(error: pickle.UnpicklingError) -> str:
    text = str(error).partition("\n\nCheck the documentation")[0]
    if match := re.search(r"GLOBAL ([\w.]+)", text):
        return match[1]
    lines = text.rpartition("\n\n")[2].rpartition("Unpickler error: ")[2].strip().splitlines()
    return (lines or [type(error).__name__])[0][:200]

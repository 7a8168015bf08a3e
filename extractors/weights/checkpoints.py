"""Reading state dicts safely from files, and checking that they belong to a model."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from torch import Tensor

from extractors.weights.restricted_pickle import OLD_TORCH_MAGIC, read_pickle, safe_globals
from schemas.errors import InputError

COUNTER = ".num_batches_tracked"
"""End of the names of batch norm's counters, which no feature depends on."""

_WRAPPINGS = ("state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")  # of torch.nn.DataParallel and torch.compile
_DEPTH = 3
_FORMATS = {".safetensors": "safetensors", ".pth": "torch", ".pt": "torch", ".pkl": "pickle", ".caffemodel": "caffe"}
_CAFFE_FIELDS = (b"\x0a", b"\x12", b"\xa2\x06")  # name, layers and layer of a NetParameter
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


@dataclass
class Choice:
    """The set of weights to take of a file.

    Attributes:
        name: key of the set in the file, such as ``model_ema``; those of containers in it are joined by ``/``. Empty for the
            usual one.
        remark: filled in by who reads the file: the set that was taken of several, and how to take another; else empty.
    """

    name: str = ""
    remark: str = ""


def format_of(path: Path) -> str:
    """Return the format of a file by its content: ``torch``, ``safetensors``, ``pickle`` or ``caffe``; empty if it is none.

    What begins like none of them, such as a damaged file, is of the format that its extension stands for.
    """
    with path.open("rb") as file:
        head = file.read(16)
    if is_text(head):  # an error page, or the pointer of Git LFS
        return ""
    if head.startswith((b"PK\x03\x04", OLD_TORCH_MAGIC)):  # Since version 1.6 torch.save writes zip archives.
        return "torch"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # protocols with an instruction for that
        return "pickle"
    if head[8:9] == b"{":  # behind the length of the header
        return "safetensors"
    return _FORMATS.get(path.suffix, "caffe" if head.startswith(_CAFFE_FIELDS) else "")


def is_text(head: bytes) -> bool:
    """Return whether a file begins with text; no format of weights does, but for a name in a ``.caffemodel`` after a line end."""
    return head[:1] not in b"\n(" and all(byte in b"\t\r\n" or 0x20 <= byte < 0x7F for byte in head)


def read_state(path: Path, choice: Choice | None = None) -> dict[str, Tensor]:
    """Read names and tensors from a file of ``torch.save``, a ``.safetensors`` file or a pickle of arrays, by its content.

    ``{"state_dict": ...}`` or ``{"model": ...}`` around them, and ``module.`` before every name, as training scripts write them,
    are removed. Of several sets of weights in the file one is chosen.

    Raises:
        InputError: the file is of another kind, is damaged, could run code when read, or does not hold the set of weights.
    """
    return {
        name: value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        for name, value in read_entries(path, choice).items()
    }


def read_entries(path: Path, choice: Choice | None = None, *, arrays: bool = False) -> dict[str, Any]:
    """Read names and tensors or arrays as `read_state` does; with ``arrays`` a file of ``torch.save`` may hold numpy's, too.

    Raises:
        InputError: as for `read_state`.
    """
    kind = format_of(path)
    if kind != "safetensors" and not path.stat().st_size:
        raise InputError(f"the weights file {str(path)!r} is empty; fetch it again")
    if kind == "safetensors":
        content: Any = read_safetensors(path)
    elif kind == "torch":
        content = read_torch(path, safe_globals(2 * path.stat().st_size) if arrays else None)
    elif kind == "pickle":
        content = read_pickle(path)
    else:
        raise InputError(
            f"the weights file {str(path)!r} is {'a Caffe model' if kind else _unknown(path)}, expected one of torch.save "
            "(such as .pth, .pt, .bin, .ckpt, .pth.tar), .safetensors, or a pickle of arrays: pass the file that belongs to the "
            "extractor"
        )
    return unwrapped(content, path, choice)


def unwrapped(content: Any, path: Path, choice: Choice | None = None) -> dict[str, Any]:
    """Remove what training scripts write around a state dict, and fill in the remark of a choice of several.

    Raises:
        InputError: the content does not map names to tensors or arrays, or does not hold the set of weights.
    """
    choice = choice or Choice()
    sets = {"": content} if _is_state(content) else dict(_sets(content))
    usual = sorted((_rank(name), name) for name in sets if set(name.split("/")) <= {*_WRAPPINGS, ""})
    taken = choice.name or (usual[0][1] if usual else next(iter(sets), "") if len(sets) == 1 else "")
    if taken not in sets:
        raise InputError(_no_set(content, path, choice, list(sets)))
    if len(sets) > 1:
        others = " or ".join(f"{path}#{name}" for name in sets if name != taken)
        choice.remark = (
            f"the weights file {str(path)!r} holds {len(sets)} sets of weights ({', '.join(sets)}), of which {taken} was taken: "
            f"--weights {others} takes another"
        )
    state = sets[taken]
    names = [str(name) for name in state]
    for prefix in _PREFIXES * 2:  # Each may be around the other.
        if all(name.startswith(prefix) for name in names):
            names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))


def _no_set(content: Any, path: Path, choice: Choice, names: list[str]) -> str:
    if choice.name:
        held = f"{', '.join(names)}" if any(names) else "a single one without a name"
        return (
            f"the weights file {str(path)!r} has no set of weights {choice.name!r}, but {held}: give one of these behind the #"
        )
    if names:
        return (
            f"the weights file {str(path)!r} holds {len(names)} sets of weights, {', '.join(names)}: name the one to take, e.g. "
            f"--weights {path}#{names[0]}"
        )
    while (
        inner := next((content[key] for key in _WRAPPINGS if isinstance(content, Mapping) and key in content), None)
    ) is not None:
        content = inner
    return (
        f"the weights file {str(path)!r} holds {_shape_of(content)}, expected names and tensors (a state dict): save "
        "model.state_dict() instead"
    )


def _is_state(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(v, (Tensor, np.ndarray)) for v in content.values())


def _sets(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the state dicts in a checkpoint by their names, without what belongs to an optimizer."""
    if _is_state(content):
        yield "/".join(path), content
    elif isinstance(content, Mapping) and len(path) < _DEPTH:
        for key, value in content.items():
            if "optim" not in str(key).lower():
                yield from _sets(value, (*path, str(key)))


def _rank(name: str) -> tuple[int, ...]:
    """Return the place of the name of a set among the usual ones."""
    return tuple(_WRAPPINGS.index(key) for key in name.split("/") if key)


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
        guess = next((model for sign, model in _SIGNS if sign in state), "an unknown model's")
        raise InputError(
            f"the weights in {source} are not this model's: {listed}. These look like {guess} weights; "
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
    try:
        if format_of(path) == "safetensors":
            return True
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
    """Read a file that ``torch.save`` wrote, in its old format too. Besides torch's own it may call ``functions``, by their names.

    Raises:
        InputError: the file is damaged, of another kind, or could run code when read.
    """
    try:
        # What torch warns of is advice for programmers, and on unsafe reading.
        with torch.serialization.safe_globals([(call, name) for name, call in (functions or {}).items()]), catch_warnings():
            simplefilter("ignore")
            if path.suffix == ".safetensors":  # Torch would go by the extension.
                return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable(path))
    except pickle.UnpicklingError as error:
        raise InputError(
            f"the weights file {str(path)!r} is refused: it is damaged, or holds Python objects, which could run code when "
            f"read ({_refused(error)}). Save model.state_dict() alone, or as .safetensors, where you trust the file"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AssertionError, zipfile.BadZipFile) as error:
        raise InputError(f"the weights file {str(path)!r} cannot be read by torch {_reason(error)}") from error


def _unknown(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(40)
    if not is_text(head[:16]):
        return "of an unknown format"
    return f"text that begins with {head!r}, such as an error page, the pointer of Git LFS or the definition of a network"


def _shape_of(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"a {type(content).__name__} with {_first([repr(key) for key in content])}"
    return f"a {type(content).__name__}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "") if names else "nothing in it"


def _reason(error: Exception) -> str:
    """Return what torch says about the file, but for its advice on unsafe reading, and what to do."""
    text = (str(error).splitlines() or [type(error).__name__])[0][:200]
    if "weights_only" not in text:
        return f"({text}): it is damaged or of another kind; fetch it again"
    if "TorchScript" in text:
        return "(it is a TorchScript archive): where you trust the file, save torch.jit.load(FILE).state_dict() with torch.save"
    return "(it is in a format of before 2018): where you trust the file, read it with the torch of its time and save it anew"


def _refused(error: pickle.UnpicklingError) -> str:
    """Return what torch refused, likewise."""
    text = str(error).partition("\n\nCheck the documentation")[0]
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        return found[1]
    lines = text.rpartition("\n\n")[2].rpartition("Unpickler error: ")[2].strip().splitlines()
    return (lines or [type(error).__name__])[0][:200]

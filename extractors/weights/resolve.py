"""The weights of a model: where they come from, which ones they are, and whether they fit.

Weights are known by their tensors, not by their file: a checkpoint, its copy in another format and the download that it was made
from have one SHA-256, and features of them one fingerprint. The bytes of a file matter only where they are what somebody
published: a download is checked by its hash, and so are files that fit but are known to be wrong. Checkpoints are never unpickled
unsafely: see `extractors.weights.checkpoints`.

A run first describes its extractor, which hashes and parses the weights, and then often loads it in the same process. So the
weights of the last description are stored for the next load, for a minute at most: files that are converted or parsed whole and
random weights take as much memory as the model, 575 MB for VGG19, and a launcher whose workers are other processes never loads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import torch
from torch import Tensor, nn

from extractors.description_cache import FileStamp
from extractors.weights.checkpoints import COUNTER, Choice, check_state, is_mappable, read_state
from extractors.weights.download import cache_folder, local_file, split_choice
from schemas.errors import InputError, UsageError
from schemas.fingerprints import sha256_of_file
from schemas.storage.locations import is_remote


@dataclass(frozen=True)
class Architecture:
    """A model, and the weights that the name of an extractor stands for.

    Attributes:
        build: makes the model with random weights, e.g. `extractors.networks.resnet50`.
        default: one of `extractors.networks`; None if it has none.
        refused: first digits of the SHA-256 of files that fit but are wrong, each with the reason.
        read: reads a set of weights in a file into names and tensors; names that the model lacks are an error afterwards.
        without_default: if ``default`` is None, what to pass instead and where to get it.
    """

    build: Callable[[], nn.Module]
    default: Any = None
    refused: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Path, Choice], dict[str, Tensor]] = read_state
    without_default: str = ""

    def load(self, weights: Weights) -> Any:
        """Build the model around the tensors of weights, which are not copied, for inference."""
        with torch.device("meta"):
            model = self.build()
        model.load_state_dict(weights.state, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def file_name(self) -> str:
        """File name of the default weights, e.g. ``resnet50-0676ba61.pth``."""
        return str(self.default.url).rpartition("/")[2]

    @property
    def hash_prefix(self) -> str:
        """First digits of the SHA-256 of that file, which torchvision writes into its name."""
        return self.file_name.rpartition("-")[2].partition(".")[0]


@dataclass(frozen=True)
class Weights:
    """Weights that fit a model.

    Attributes:
        state: names and tensors, as ``load_state_dict`` takes them.
        random: ``random:SEED`` for untrained weights; empty for others.
        path: the file that they come from, if there is one.
        stamp: of that file, from before it was read.
        mapped: whether tensors may be views of the file, as `extractors.weights.checkpoints.is_mappable` says.
        remark: the set of weights that was taken of several in the file, and how to take another; else empty.
    """

    state: dict[str, Tensor] = field(repr=False)
    random: str = ""
    path: Path | None = None
    stamp: FileStamp | None = None
    mapped: bool = False
    remark: str = ""

    @cached_property
    def sha256(self) -> str:
        """The `state_sha256` of the tensors."""
        return state_sha256(self.state)

    def in_memory(self) -> Weights:
        """Return the same weights with values of their own, so that no change of the file can reach a loaded model."""
        if not self.mapped:
            return self
        copy = replace(self, state={name: tensor.clone() for name, tensor in self.state.items()}, mapped=False)
        copy.__dict__["sha256"] = self.sha256  # The tensors are the same: they are not hashed again.
        return copy

    def parameters(self) -> dict[str, Any]:
        """Return what belongs to an extractor's parameters: the digest of the tensors, and whether they are untrained.

        Path and format of a file do not belong to them: they do not change a feature. That weights are random does, so that no
        dataset is begun with ``random:0`` and continued with a file of the same tensors, which does not say that they are
        untrained.
        """
        seed = {"name": self.random} if self.random else {}
        return {"weights": {**seed, "sha256": self.sha256}, "untrained": bool(self.random)}


def resolve_weights(request: str, architecture: Architecture) -> Weights:
    """Find, hash, read and check weights.

    Random weights are those of ``torch.manual_seed(SEED); torchvision.models.resnet50(weights=None)`` on the CPU, with the model
    in question. The state of the global random generator does not matter and stays as it was.

    Args:
        request: ``default``, ``random:SEED``, or the path or address of a file in a format that the architecture reads, with
            ``#NAME`` for one of several sets of weights in it. What is behind an address is fetched once per machine, see
            `extractors.weights.download`.
        architecture: the model that they are for.

    Raises:
        UsageError: the seed is not a whole number from 0 to 2**63 - 1.
        InputError: the weights are missing, broken, unsafe to read, or another model's.
    """
    choice = Choice()
    if request == "default":
        if architecture.default is None:
            raise InputError(f"there are no default weights for this extractor: {architecture.without_default}")
        path = _default_file(architecture)
    elif request.startswith("random:"):
        return _random_weights(request, architecture)
    else:
        request, name = split_choice(request)
        choice = Choice(name)
        path = local_file(request)
        if not os.path.isfile(path):  # noqa: PTH113 -- false, too, where no file can be
            problem = f"{request!r} is a folder" if os.path.isdir(path) else f"there is no weights file {request!r}"  # noqa: PTH112
            raise InputError(
                f"{problem}: expected 'default', 'random:SEED', or the path or address of a file; check the spelling and the "
                "working folder"
            )
    with torch.device("meta"):  # Names, shapes and types, without memory for values.
        expected = architecture.build().state_dict()
    stamp = FileStamp.of(path)
    try:
        with path.open("rb") as file, ThreadPoolExecutor(1) as pool:
            # Beside the reading and hashing of the tensors, which takes as long.
            sha256 = pool.submit(sha256_of_file, file) if request == "default" or architecture.refused else None
            try:
                state = check_state(architecture.read(path, choice), expected, source=repr(str(path)))
                weights = Weights(state, path=path, stamp=stamp, mapped=is_mappable(path), remark=choice.remark)
                _ = weights.sha256
            finally:
                if sha256 is not None:  # What is wrong with the file as a whole goes before what is wrong in it.
                    _check_file(path, sha256.result(), architecture, is_download=request == "default")
    except OSError as error:
        raise InputError(f"cannot read the weights file {str(path)!r} ({error.strerror}): check its permissions") from error
    except InputError as error:
        if not is_remote(request):
            raise
        raise InputError(str(error).replace(repr(str(path)), repr(request))) from error  # The user knows the address.
    return weights


def _check_file(path: Path, sha256: str, architecture: Architecture, *, is_download: bool) -> None:
    """Check the bytes of a file: that a download is what was published, and that the file is not one of those refused."""
    if is_download and not sha256.startswith(architecture.hash_prefix):
        raise InputError(
            f"the downloaded weights {str(path)!r} have the SHA-256 {sha256[:16]}…, expected one that begins with "
            f"{architecture.hash_prefix}: the file is damaged; delete it and run again"
        )
    for prefix, reason in architecture.refused.items():
        if sha256.startswith(prefix):
            raise InputError(f"the weights in {str(path)!r} (SHA-256 {sha256[:16]}…) are not the ones wanted: {reason}")


def state_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors in the order of their names: name, type, shape and values (little-endian) of each.

    Batch norm's ``num_batches_tracked`` is left out: files from before 2018 lack it, and no feature depends on it.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        if name.endswith(COUNTER):
            continue
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)  # Without a copy, which mapped values would turn into.
    return digest.hexdigest()


def _default_file(architecture: Architecture) -> Path:
    """Download torchvision's weights if they are not there yet, and return the file."""
    path = cache_folder() / architecture.file_name
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot keep the weights {architecture.default} in {str(path.parent)!r} ({error.strerror or error}): set "
                "TORCH_HOME to a folder that can be written, or pass a file with --weights PATH"
            ) from error
        try:
            torch.hub.download_url_to_file(architecture.default.url, str(path), architecture.hash_prefix, progress=False)
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: torch's word for a wrong hash
            raise InputError(
                f"cannot download the weights {architecture.default} ({type(error).__name__}: {error}): probably there is no "
                f"network here. Fetch {architecture.default.url} elsewhere and pass it with --weights PATH, or put it at "
                f"{str(path)!r}; --weights random:0 runs without, untrained"
            ) from error
    return path


def _random_weights(request: str, architecture: Architecture) -> Weights:
    text = request.removeprefix("random:")
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**63:
        raise UsageError(
            f"weights are {request!r}, expected 'random:SEED' with a whole number from 0 to 2**63 - 1, e.g. 'random:0'"
        )
    seed = int(text)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # what torch.manual_seed does, for the CPU alone
        state = architecture.build().state_dict()
    return Weights(state, random=f"random:{seed}")


STORED_SECONDS = 60.0
"""Seconds after which weights that nobody loads are dropped."""

_lock = Lock()
_stored: dict[Hashable, tuple[Weights, Timer]] = {}


def store_weights(key: Hashable, weights: Weights) -> None:
    """Keep weights for `pop_weights` under what decides which are found, in the place of any that are kept already."""
    # The timer knows the key and not the weights, which its thread would hold for a moment longer than anyone else.
    timer = Timer(STORED_SECONDS, lambda: _drop(key, timer))
    timer.daemon = True
    with _lock:
        _clear()
        _stored[key] = weights, timer
        timer.start()


def pop_weights(key: Hashable) -> Weights | None:
    """Return the weights kept under a key and keep them no longer; None if there are none or their file has changed since."""
    with _lock:
        if key not in _stored:
            return None
        weights, _ = _stored[key]
        _clear()
    is_current = weights.path is None or FileStamp.of(weights.path) == weights.stamp
    return weights if is_current else None


def _drop(key: Hashable, timer: Timer) -> None:
    with _lock:
        if key in _stored and _stored[key][1] is timer:
            _clear()


def _clear() -> None:
    for _, timer in _stored.values():
        timer.cancel()
    _stored.clear()

"""Resolution of weights: locate or download, hash, read and check.

Weights are identified by the SHA-256 of their tensors, which does not depend on the file format. The hash of
the file itself is compared only for downloads of published files, and with those of known wrong files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extractors.description_cache import FileStamp
from extractors.weights.checkpoints import COUNTER, Choice, check_state, read_state_dict
from extractors.weights.download import fetch_weights_file, split_choice, weights_cache_folder
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_file
from schemas.storage.locations import is_remote


@dataclass(frozen=True)
class Architecture:
    """Model of an extractor and its weights.

    Attributes:
        build: builds the model with random weights, e.g. `extractors.networks.resnet50`.
        default: `extractors.networks.PretrainedWeights`, or None.
        refused: reasons to refuse files with matching tensors, by the first digits of their SHA-256.
        read: reads a set of weights from a file to names and tensors.
        without_default: if ``default`` is None, advice on weights for the user.
    """

    build: Callable[[], nn.Module]
    default: Any = None
    refused: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Path, Choice], dict[str, Tensor]] = read_state_dict
    without_default: str = ""

    def find_weights(self, spec: FeatureSpec, request: str) -> Weights:
        """Resolve weights, see `extractors.catalogue.ExtractorModule`."""
        return resolve_weights(request, self)

    def load(self, weights: Weights) -> Any:
        """Build the model for inference with the given tensors, without copies."""
        with torch.device("meta"):
            model = self.build()
        model.load_state_dict(weights.state, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def hash_prefix(self) -> str:
        """First digits of the SHA-256 of the default weights' file, from its name."""
        return str(self.default.url).rpartition("-")[2].partition(".")[0]


@dataclass(frozen=True)
class Weights:
    """Checked weights of a model.

    Attributes:
        random: ``random:SEED`` for untrained weights, else empty.
        stamp: stamp of the file before reading.
        remark: see `extractors.weights.checkpoints.Choice`.
    """

    state: dict[str, Tensor] = field(repr=False)
    random: str = ""
    path: Path | None = None
    stamp: FileStamp | None = None
    remark: str = ""

    @cached_property
    def sha256(self) -> str:
        """`state_sha256` of the tensors."""
        return state_sha256(self.state)

    def parameters(self) -> dict[str, Any]:
        """Return the weights' part of the parameters, without path and format.

        Random weights are marked, so that a dataset of ``random:0`` cannot be continued with a file of equal tensors.
        """
        seed = {"name": self.random} if self.random else {}
        return {"weights": {**seed, "sha256": self.sha256}, "untrained": bool(self.random)}


def resolve_weights(request: str, architecture: Architecture) -> Weights:
    """Resolve, hash, read and check weights.

    The request is ``default``, ``random:SEED``, or the path or address of a file, with ``#NAME`` for one of several sets.
    Random weights equal those of ``torch.manual_seed(SEED); build()`` on the CPU. The global random generator remains unchanged.

    Raises:
        UsageError: the seed is not an integer from 0 to 2**63 - 1.
        InputError: the weights are missing, corrupt, unsafe to read, or of another model.
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
        path = fetch_weights_file(request)
        if not os.path.isfile(path):  # noqa: PTH113 -- False for invalid paths, too.
            problem = f"{request!r} is a folder" if os.path.isdir(path) else f"there is no weights file {request!r}"  # noqa: PTH112
            similar = get_close_matches(request, ("default", "random:0"), n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else "check the spelling and the working folder"
            raise InputError(f"{problem}, expected 'default', 'random:SEED', or the path or address of a file: {hint}")
    with torch.device("meta"):
        expected = architecture.build().state_dict()
    stamp = FileStamp.of(path)
    try:
        if request == "default" or architecture.refused:
            with path.open("rb") as file:
                _check_file(path, sha256_of_file(file), architecture, is_download=request == "default")
        state = check_state(architecture.read(path, choice), expected, source=repr(str(path)))
    except OSError as error:
        raise InputError(f"cannot read the weights file {str(path)!r} ({error.strerror}): check its permissions") from error
    except InputError as error:
        if not is_remote(request):
            raise
        raise InputError(str(error).replace(repr(str(path)), repr(request))) from error  # The user knows the address.
    return Weights(state, path=path, stamp=stamp, remark=choice.remark)


def _check_file(path: Path, sha256: str, architecture: Architecture, *, is_download: bool) -> None:
    """Check the SHA-256 of a download, and that the file is not refused."""
    if is_download and not sha256.startswith(architecture.hash_prefix):
        raise InputError(
            f"the downloaded weights {str(path)!r} have the SHA-256 {sha256[:16]}…, expected one that "
            f"begins with {architecture.hash_prefix}: the file is corrupt; delete it and run again"
        )
    for prefix, reason in architecture.refused.items():
        if sha256.startswith(prefix):
            raise InputError(f"the weights in {str(path)!r} (SHA-256 {sha256[:16]}…) are the wrong ones: {reason}")


def state_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of sorted names, dtypes, shapes and little-endian values.

    Batch norm's ``num_batches_tracked`` is excluded: files before 2018 lack it, and features do not depend on it.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        if name.endswith(COUNTER):
            continue
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _default_file(architecture: Architecture) -> Path:
    """Return the file of torchvision's weights, after a download if it is not cached."""
    path = weights_cache_folder() / architecture.default.url.rpartition("/")[2]
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot store the weights {architecture.default.name} in {str(path.parent)!r} ({error.strerror or error}): set "
                "TORCH_HOME to a writable folder, or pass a file with --weights PATH"
            ) from error
        try:
            torch.hub.download_url_to_file(architecture.default.url, str(path), architecture.hash_prefix, progress=False)
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError for a wrong hash.
            raise InputError(
                f"cannot download the weights {architecture.default.name} ({type(error).__name__}: {error}): there is probably no "
                f"network. Download {architecture.default.url} elsewhere, and pass it with --weights PATH or copy it to "
                f"{str(path)!r}; --weights random:0 runs the untrained model"
            ) from error
    return path


def _random_weights(request: str, architecture: Architecture) -> Weights:
    text = request.removeprefix("random:")
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**63:
        raise UsageError(
            f"weights are {request!r}, expected 'random:SEED' with an integer from 0 to 2**63 - 1, e.g. 'random:0'"
        )
    seed = int(text)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed for the CPU only.
        state = architecture.build().state_dict()
    return Weights(state, random=f"random:{seed}")

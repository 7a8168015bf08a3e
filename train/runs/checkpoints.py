"""Checkpoints of a run: ``last.pt`` to resume from, ``best.pt`` to use; and their content put back into models and optimizers.

Both hold the model and everything needed to use it: configuration, vocabulary, and the fingerprints of the data that it was
trained on. ``last.pt`` also holds the state of the training. They are written whole or not at all, and read with
``weights_only``, so that a checkpoint from a stranger runs no code. They are zip archives with a CRC-32 of every part, which torch
writes and does not compare: that is done here, so that a flipped bit is found.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, BinaryIO, Protocol, cast

import pyarrow as pa
import torch
from torch import Tensor, nn

from schemas.conversion import convert, hints_of
from schemas.errors import DatasetError, UsageError
from schemas.parameters import EncodedParameters
from schemas.storage.folder import Folder
from train.config.models import ModelConfig
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions, RetrievalModel

BEST, LAST = "best.pt", "last.pt"

_FORMAT, _VERSION = "imagepivot run", 4

# Errors of zipfile and torch.load on bytes that are not a checkpoint: an unpickler takes them for instructions, one by one.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, struct.error, RuntimeError, EOFError, OSError, MemoryError),
    *(LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError),
)
_FINGERPRINTS = ("captions", "features", "vocabulary", "extractor")
_OPTIONAL = {"word_vectors", "token_features", "token_model"}


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has come.

    Attributes:
        best_score: greatest sum of recalls so far, 0 to 600 for each language; -1 before the first evaluation.
        stop_reason: why the run is over: ``patience``, ``epochs`` or ``steps``; empty while it is not.
    """

    step: int = 0
    best_score: float = -1.0
    best_step: int = 0
    evals_since_best: int = 0
    stop_reason: str = ""

    def evaluated(self, score: float) -> TrainingProgress:
        """Return the progress after an evaluation at this step. If scores are equal, the earlier model stays the best."""
        if score > self.best_score:
            return replace(self, best_score=score, best_step=self.step, evals_since_best=0)
        return replace(self, evals_since_best=self.evals_since_best + 1)


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint.

    Attributes:
        config: the run's configuration, as TOML.
        tokens: tokens of the vocabulary, by id.
        fingerprints: fingerprints of what it was trained on: ``captions``, ``features``, ``vocabulary`` and ``extractor``, and
            ``word_vectors`` if it began with some, or ``token_features`` and ``token_model`` if it read vectors of tokens.
        captions: parameters of the encoded captions, including the text recipe.
        optimizer: state of the optimizer; None in ``best.pt``.
        sampler: state of the sampler; None in ``best.pt``.
        missing_features: by split, the images that lacked features and were left out; see `train.data.splits.MissingFeatures`.
        started_from: the run that its initial weights come from, see `train.runs.init_from_run.Start`; empty if they were drawn.
        contents: `schemas.manifest.Manifest.content_sha256` of the datasets that it was trained on, by name, with those until a
            step where they have changed.
    """

    config: str
    dimensions: Dimensions
    model: Mapping[str, Tensor]
    tokens: tuple[str, ...]
    fingerprints: Mapping[str, str]
    captions: Mapping[str, Any]
    seed: int
    precision: str
    progress: TrainingProgress
    optimizer: Mapping[str, Any] | None = None
    sampler: Mapping[str, Any] | None = None
    missing_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    started_from: Mapping[str, Any] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, hexadecimal, of parameters in the order of their names."""
    names = sorted(weights)
    digest = hashlib.sha256()
    for name, values in zip(names, _on_cpu([weights[name].detach().contiguous() for name in names]), strict=True):
        digest.update(name.encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _on_cpu(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield tensors, or the bytes of those on a GPU: these come in one copy, since the host waits for each."""
    elsewhere = [tensor.flatten().view(torch.uint8) for tensor in tensors if tensor.device.type != "cpu"]
    copied = iter(torch.cat(elsewhere).cpu().split([len(values) for values in elsewhere]) if elsewhere else ())
    for tensor in tensors:
        yield tensor if tensor.device.type == "cpu" else next(copied)


def write_checkpoint(folder: Folder, name: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, whole or not at all."""
    content = {item: getattr(checkpoint, item) for item in checkpoint.__dataclass_fields__}
    content |= {"dimensions": asdict(checkpoint.dimensions), "progress": asdict(checkpoint.progress)}
    with folder.replace(name) as file:
        sink = _Sink(file)
        try:
            torch.save({"format": _FORMAT, "version": _VERSION, **content}, cast(BinaryIO, sink))
        except RuntimeError:
            if sink.error is None:
                raise
            raise sink.error from None


def read_checkpoint(folder: Folder, name: str) -> Checkpoint:
    """Read a checkpoint, with its tensors on the CPU.

    Raises:
        FileNotFoundError: there is none.
        DatasetError: the file is not a checkpoint of a run, is damaged, or has another version.
    """
    location = folder.path_of(name)
    with folder.open(name) as file:
        content = _loaded(file, location)
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise DatasetError(f"{location} is not a checkpoint of a run: give the folder that imagepivot train wrote")
    version = content.pop("version", 0)
    if not isinstance(version, int):
        raise damaged(location, f"version is {version!r}")
    if version > _VERSION:
        raise DatasetError(f"{location} has version {version}, but this imagepivot reads up to {_VERSION}: update imagepivot")
    if version < _VERSION:
        raise DatasetError(f"{location} has version {version}, expected {_VERSION}: delete the run, and train it again")
    return _checkpoint(content, location)


def damaged(location: str, reason: str) -> DatasetError:
    """Return the error for a checkpoint that cannot be used."""
    return DatasetError(
        f"{location} is damaged, or not a checkpoint ({reason}): copy the run again, or delete it to train it again"
    )


class _Sink:
    """A file for ``torch.save``, which hides what ends a write, a full disk or Ctrl-C, behind an error of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: BaseException | None = None
        self._file = file

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _loaded(file: pa.NativeFile, location: str) -> Any:
    """Return what a file of ``torch.save`` holds, after its checksums were compared."""
    try:
        with zipfile.ZipFile(file) as archive:
            # Of a part that is marked as a folder torch reads nothing, and leaves its tensor to chance.
            part = archive.testzip() or next((info.filename for info in archive.infolist() if info.external_attr), None)
    except _UNREADABLE as error:
        raise damaged(location, "the file is empty" if file.size() == 0 else "it is not a whole zip archive") from error
    if part is not None:
        raise damaged(location, f"its part {part!r} is not as it was written")
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        # What torch says here is advice to switch its protection off.
        raise damaged(location, "it holds something else than numbers, text and tensors, or parts of it are missing") from error


def _checkpoint(content: dict[str, Any], location: str) -> Checkpoint:
    """Check the types of everything in a checkpoint, and return it."""
    known = {item.name for item in fields(Checkpoint)}
    if missing := sorted(known - content.keys()):
        raise damaged(location, f"{missing[0]} is missing")
    if unknown := sorted(map(str, content.keys() - known)):
        raise damaged(location, f"{unknown[0]!r} is unknown")
    for name in ("optimizer", "sampler"):
        if not isinstance(content[name], (dict, type(None))):
            raise damaged(location, f"{name} is of type {type(content[name]).__name__}")
    model = content["model"]
    if not isinstance(model, dict) or not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in model.items()):
        raise damaged(location, "model does not map names to tensors")
    tokens = content["tokens"]
    if not isinstance(tokens, tuple) or not all(isinstance(token, str) for token in tokens):
        raise damaged(location, "tokens are not text")
    hints = hints_of(Checkpoint)
    try:
        for name in known - {"model", "optimizer", "sampler", "tokens"}:
            content[name] = convert(content[name], hints[name], name, error=DatasetError)
        EncodedParameters.from_json(content["captions"])
    except (DatasetError, ValueError) as error:
        raise damaged(location, str(error)) from error
    if set(content["fingerprints"]) - _OPTIONAL != set(_FINGERPRINTS):
        raise damaged(location, f"fingerprints are not those of {', '.join(_FINGERPRINTS)}")
    start = content["started_from"]
    if start and not all(isinstance(start.get(key), str) for key in ("run", "weights_sha256")):
        raise damaged(location, f"started_from is {start!r}")
    return Checkpoint(**content)


_LISTED = 3
_PER_PARAMETER = ("exp_avg", "exp_avg_sq")
_WRONG = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)


class _Restorable(Protocol):
    def restore(self, state: Mapping[str, Any]) -> None: ...


def stored_model(config: ModelConfig, checkpoint: Checkpoint, source: str) -> RetrievalModel:
    """Build the model of a checkpoint, with its weights.

    Raises:
        DatasetError: its weights are not those of such a model, or are not finite.
    """
    size = checkpoint.dimensions.vocabulary_size
    if size != len(checkpoint.tokens):
        raise damaged(source, f"the model has {size:,} tokens, the vocabulary {len(checkpoint.tokens):,}")
    try:
        model = build_model(config, checkpoint.dimensions, checkpoint.seed)
    except (*_WRONG, UsageError, MemoryError) as error:
        raise damaged(source, "no model has its dimensions") from error
    restore_model(model, checkpoint.model, source)
    return model


def restore_model(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Put weights into a model.

    Raises:
        DatasetError: names, shapes or types are not those of the model, or values are not finite.
    """
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    for name, values in state.items():
        if name in expected and (values.shape, values.dtype) != (expected[name].shape, expected[name].dtype):
            problems.append(f"{name} is {_kind(values)}, expected {_kind(expected[name])}")
        elif not torch.isfinite(values).all():
            problems.append(f"{name} holds values that are not finite")
    if problems:
        raise damaged(source, "; ".join(problems[:_LISTED]))
    model.load_state_dict(state)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], source: str) -> None:
    """Put the state of Adam back into a new optimizer.

    Raises:
        DatasetError: the state is not that of an optimizer of these parameters, or is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for number, values in state["state"].items():
            for name in _PER_PARAMETER:
                if values[name].shape != parameters[number].shape or not torch.isfinite(values[name]).all():
                    raise ValueError(f"{name} of parameter {number} is {_kind(values[name])} or not finite")
            if not float(values["step"]) >= 0:
                raise ValueError(f"step of parameter {number} is {values['step']!r}")
        optimizer.load_state_dict(dict(state))
    except _WRONG as error:
        raise damaged(source, f"the state of its optimizer does not fit the model: {error}") from error


def restore_sampler(sampler: _Restorable, state: Mapping[str, Any], source: str) -> None:
    """Put a sampler back to its position.

    Raises:
        DatasetError: the state is not that of such a sampler.
    """
    try:
        sampler.restore(state)
    except _WRONG as error:
        raise damaged(source, f"the state of its sampler does not fit the data: {type(error).__name__}: {error}") from error


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"

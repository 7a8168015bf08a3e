"""Checkpoints of a run: ``last.pt`` to resume from, ``best.pt`` to use.

Both hold the model and everything needed to use it: configuration, vocabulary, and fingerprints of the training data. ``last.pt``
also holds the state of the training. Writes are atomic. Reads use ``weights_only``, so that a checkpoint from an unknown source
runs no code. They compare the CRC-32 of every part of the zip archive, which torch writes but does not check.
"""

import hashlib
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import pyarrow as pa
import torch
from torch import Tensor

from schemas.conversion import convert
from schemas.errors import DatasetError
from schemas.parameters import EncodedParameters, TextRecipe
from schemas.pickle_growth import check_growth
from schemas.storage.folder import Folder
from train.config.sections import parse_settings
from train.losses import LossSums
from train.models.retrieval_model import Dimensions

BEST, LAST = "best.pt", "last.pt"

_FORMAT, _VERSION = "imagepivot run", 4

# Errors of zipfile and torch.load on arbitrary bytes, which an unpickler executes as instructions.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, struct.error, RuntimeError, EOFError, OSError, MemoryError),
    *(LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError),
)
_FINGERPRINTS = ("captions", "features", "vocabulary", "extractor")
_OPTIONAL = {"word_vectors", "token_features", "token_model", "exclude"}


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run.

    Attributes:
        step: number of completed steps.
        best_score: maximum sum of recalls, 0 to 600 for each language; -1 before the first evaluation.
        best_step: step of the maximum.
        evals_since_best: number of evaluations after that step.
        stop_reason: ``patience``, ``epochs`` or ``steps`` if the run has ended; else empty.
        losses: losses of the steps since the last line of the log.
        steps_at_margin: number of the last steps with a loss at the margin; constant after the warning of a collapse.
    """

    step: int = 0
    best_score: float = -1.0
    best_step: int = 0
    evals_since_best: int = 0
    stop_reason: str = ""
    losses: LossSums = field(default_factory=LossSums)
    steps_at_margin: int = 0

    def evaluated(self, score: float) -> Self:
        """Return the progress after an evaluation; of equal scores the earlier is best."""
        if score > self.best_score:
            return replace(self, best_score=score, best_step=self.step, evals_since_best=0)
        return replace(self, evals_since_best=self.evals_since_best + 1)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Data, settings and progress of a training.

    Attributes:
        fingerprints: fingerprints of the training data: ``captions``, ``features``, ``vocabulary`` and
            ``extractor``; ``word_vectors`` of pretrained word vectors; ``token_features`` and ``token_model``
            of vectors of tokens; ``exclude`` of a list of duplicates.
        captions: parameters of the encoded captions, including the text recipe.
        missing_features: images that were left out, by split, see `train.data.splits.MissingFeatures`.
        started_from: provenance of its initial weights, see `train.runs.init_from_run.provenance`; empty if they are random.
        untrained: features of random weights that the run was trained on, see `schemas.dataset.Dataset.untrained`.
        sample_outputs: those of the training data by model, ``extractor`` or ``token_model``, see `schemas.sample_outputs`.
    """

    fingerprints: Mapping[str, str]
    captions: Mapping[str, Any]
    seed: int
    precision: str
    progress: TrainingProgress
    missing_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    started_from: Mapping[str, Any] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    sample_outputs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def text(self) -> TextRecipe | None:
        """Text recipe of the captions; None if unknown."""
        return EncodedParameters.from_json(self.captions).text


@dataclass(frozen=True, kw_only=True)
class Checkpoint(TrainingState):
    """Content of a checkpoint.

    Attributes:
        config: the run's configuration, as TOML.
        tokens: tokens of the vocabulary, by id.
        optimizer: state of the optimizer; None in ``best.pt``.
        sampler: state of the sampler; None in ``best.pt``.
        contents: `schemas.manifest.Manifest.content_sha256` of the training datasets, by name; of datasets
            that changed, also the former ones, with the step of the change.
    """

    config: str
    dimensions: Dimensions
    model: Mapping[str, Tensor]
    tokens: tuple[str, ...]
    optimizer: Mapping[str, Any] | None = None
    sampler: Mapping[str, Any] | None = None
    contents: Mapping[str, str] = field(default_factory=dict)


def checkpoint_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the configuration by dotted key, and settings outside of it.

    These are ``seed``, ``precision``, numbers of images without features, and the first digits of
    fingerprints (``data: captions``) and content digests (``content: captions``).
    """
    return {
        **parse_settings(checkpoint.config),
        "seed": checkpoint.seed,
        "precision": checkpoint.precision,
        **{f"missing features: {split}": item.get("images") for split, item in checkpoint.missing_features.items()},
        **{f"data: {name}": fingerprint[:12] for name, fingerprint in checkpoint.fingerprints.items()},
        **{f"content: {name}": content[:12] for name, content in checkpoint.contents.items()},
    }


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, hexadecimal, of parameters sorted by name."""
    names = sorted(weights)
    digest = hashlib.sha256()
    for name, values in zip(names, _on_cpu([weights[name].detach().contiguous() for name in names]), strict=True):
        digest.update(name.encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _on_cpu(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield tensors; those on a GPU as bytes, all copied in one transfer."""
    on_gpu = [tensor.flatten().view(torch.uint8) for tensor in tensors if tensor.device.type != "cpu"]
    copies = iter(torch.cat(on_gpu).cpu().split([len(values) for values in on_gpu]) if on_gpu else ())
    for tensor in tensors:
        yield tensor if tensor.device.type == "cpu" else next(copies)


def write_checkpoint(folder: Folder, name: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically.

    Raises:
        DatasetError: the file cannot be written.
    """
    content = {"format": _FORMAT, "version": _VERSION, **vars(checkpoint)}
    content |= {"dimensions": asdict(checkpoint.dimensions), "progress": asdict(checkpoint.progress)}
    data = io.BytesIO()  # Given a file, torch replaces the errors of its writes, e.g. of a full disk, by one of its own.
    torch.save(content, data)
    with folder.replace(name) as file:
        file.write(data.getbuffer())


def read_checkpoint(folder: Folder, name: str) -> Checkpoint:
    """Read a checkpoint, with its tensors on the CPU.

    Raises:
        FileNotFoundError: the file does not exist.
        DatasetError: the file is not a checkpoint of a run, is damaged, or has another version.
    """
    location = folder.path_of(name)
    with folder.open(name) as file:
        content = _load_checked(file, location)
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise DatasetError(f"{location} is not a checkpoint of a run: give the folder that imagepivot train wrote")
    version = content.pop("version", 0)
    if not isinstance(version, int):
        raise unusable(location, f"version is {version!r}")
    if version > _VERSION:
        raise DatasetError(f"{location} has version {version}, but this imagepivot reads up to {_VERSION}: update imagepivot")
    if version < _VERSION:
        raise DatasetError(f"{location} has version {version}, expected {_VERSION}: delete the run, and train it again")
    try:
        checkpoint: Checkpoint = convert({**content, "model": {}, "tokens": ()}, Checkpoint, error=DatasetError)
        EncodedParameters.from_json(checkpoint.captions)
    except (DatasetError, ValueError, TypeError) as error:  # TypeError: a name is not text.
        raise unusable(location, str(error)) from error
    model, tokens = content.get("model"), content.get("tokens")
    if not isinstance(model, dict) or not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in model.items()):
        raise unusable(location, "model does not map names to tensors")
    if not isinstance(tokens, tuple) or not all(isinstance(token, str) for token in tokens):
        raise unusable(location, "tokens are not text")
    if set(checkpoint.fingerprints) - _OPTIONAL != set(_FINGERPRINTS):
        raise unusable(location, f"fingerprints are not those of {', '.join(_FINGERPRINTS)}")
    start = checkpoint.started_from
    if start and not all(isinstance(start.get(key), str) for key in ("run", "weights_sha256")):
        raise unusable(location, f"started_from is {start!r}")
    return replace(checkpoint, model=model, tokens=tokens)


def unusable(location: str, reason: str) -> DatasetError:
    """Return the error for a checkpoint that cannot be used."""
    return DatasetError(
        f"{location} is damaged, or not a checkpoint ({reason}): copy the run again, or delete it to train it again"
    )


def _load_checked(file: pa.NativeFile, location: str) -> Any:
    """Check the checksums of a file of ``torch.save``, and return its content."""
    try:
        with zipfile.ZipFile(file) as archive:
            # Torch does not read parts that are marked as folders, and leaves their tensors uninitialized.
            part = archive.testzip() or next((info.filename for info in archive.infolist() if info.external_attr), None)
    except _UNREADABLE as error:
        raise unusable(location, "the file is empty" if file.size() == 0 else "it is not a whole zip archive") from error
    if part is not None:
        raise unusable(location, f"its part {part!r} is not as it was written")
    try:
        check_growth(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        # Torch's own message advises to disable ``weights_only``.
        raise unusable(
            location, "it holds something else than numbers, text and tensors, or parts of it are missing"
        ) from error

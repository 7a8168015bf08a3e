"""Checkpoints of a run: ``last.pt`` to resume from, ``best.pt`` to use.

Both hold the model and everything needed to use it: configuration, vocabulary, and the fingerprints of the data that it was
trained on. ``last.pt`` also holds the state of the training. They are written whole or not at all, and read with
``weights_only``, so that a checkpoint from a stranger runs no code.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from schemas.errors import DatasetError
from schemas.storage import Folder
from train.models.joint_embedding import ModelConfig

__all__ = ["BEST", "LAST", "Checkpoint", "Standing", "read_checkpoint", "write_checkpoint"]

BEST, LAST = "best.pt", "last.pt"

_FORMAT, _VERSION = "imagepivot run", 1

# Errors of torch.load on bytes that are not a checkpoint: its unpickler takes them for instructions, one by one.
_UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, RuntimeError, EOFError, OSError),
    *(LookupError, ValueError, TypeError, AttributeError, AssertionError),
)


@dataclass(frozen=True)
class Standing:
    """How far a run has come.

    Attributes:
        step: number of steps done.
        best_score: greatest sum of recalls so far, 0 to 600 for each language; -1 before the first evaluation.
        best_step: step at which it was reached.
        stale: number of evaluations since then.
        stopped: why the run is over: ``patience``, ``epochs`` or ``steps``; empty while it is not.
    """

    step: int = 0
    best_score: float = -1.0
    best_step: int = 0
    stale: int = 0
    stopped: str = ""

    def evaluated(self, score: float) -> Standing:
        """Return the standing after an evaluation at this step. If scores are equal, the earlier model stays the best."""
        if score > self.best_score:
            return replace(self, best_score=score, best_step=self.step, stale=0)
        return replace(self, stale=self.stale + 1)


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint.

    Attributes:
        config: the run's configuration, as TOML.
        model_config: dimensions and choices of the model.
        model: parameters of the model.
        tokens: tokens of the vocabulary, by id.
        fingerprints: fingerprints of what it was trained on: ``captions``, ``features``, ``vocabulary`` and ``extractor``.
        captions: parameters of the encoded captions, including the text recipe.
        seed: seed for initial weights, order and sampling.
        precision: precision of the training.
        standing: how far the run has come.
        optimizer: state of the optimizer; None in ``best.pt``.
        sampler: state of the sampler; None in ``best.pt``.
    """

    config: str
    model_config: ModelConfig
    model: Mapping[str, Tensor]
    tokens: tuple[str, ...]
    fingerprints: Mapping[str, str]
    captions: Mapping[str, Any]
    seed: int
    precision: str
    standing: Standing
    optimizer: Mapping[str, Any] | None = None
    sampler: Mapping[str, Any] | None = None


def write_checkpoint(folder: Folder, name: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, whole or not at all."""
    content = {item: getattr(checkpoint, item) for item in checkpoint.__dataclass_fields__}
    content |= {"model_config": asdict(checkpoint.model_config), "standing": asdict(checkpoint.standing)}
    with folder.replace(name) as file:
        torch.save({"format": _FORMAT, "version": _VERSION, **content}, file)


def read_checkpoint(folder: Folder, name: str) -> Checkpoint:
    """Read a checkpoint, with its tensors on the CPU.

    Raises:
        FileNotFoundError: there is none.
        DatasetError: the file is not a checkpoint of a run, is damaged, or has a newer version.
    """
    location = folder.path_of(name)
    with folder.open(name) as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            raise DatasetError(
                f"{location} is damaged, or not a checkpoint ({error}): copy the run again, or train it again"
            ) from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise DatasetError(f"{location} is not a checkpoint of a run: give the folder that imagepivot train wrote")
    version = content.pop("version", 0)
    if version > _VERSION:
        raise DatasetError(f"{location} has version {version}, but this imagepivot reads up to {_VERSION}: update imagepivot")
    try:
        content["model_config"] = ModelConfig(**content["model_config"])
        content["standing"] = Standing(**content["standing"])
        return Checkpoint(**content)
    except (KeyError, TypeError) as error:
        raise DatasetError(f"{location} is damaged ({error}): copy the run again, or train it again") from error

"""A trained run: its model and everything needed to use it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from schemas.errors import DatasetError, UsageError
from schemas.parameters import EncodedParameters, TextRecipe
from schemas.storage.folder import Folder
from schemas.vocabulary import Vocabulary
from train.config.sections import Config, from_toml
from train.models.retrieval_model import RetrievalModel
from train.runs.checkpoints import BEST, LAST, TrainingProgress, damaged, read_checkpoint
from train.runs.history import LOG
from train.runs.restoring import stored_model


@dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
        folder: folder of the run.
        config: configuration of the run.
        model: the model with the checkpoint's weights, in evaluation mode.
        vocabulary: the vocabulary that its captions were encoded with, without counts.
        fingerprints: fingerprints of what it was trained on: ``captions``, ``features``, ``vocabulary`` and ``extractor``, and
            ``word_vectors`` if it began with some, or ``token_features`` and ``token_model`` if it read vectors of tokens.
        captions: parameters of the encoded captions, including the text recipe.
        seed: seed of the run.
        precision: precision that it was trained in.
        progress: how far it was trained.
        missing_features: by split, the images that lacked features and that it was trained and chosen without.
        started_from: the run that its initial weights came from, see `train.runs.starting.Start`; empty if they were drawn.
        language_ids: by language, the ids of the tokens that its model has vectors of; a language without an entry has all.
    """

    folder: Folder
    config: Config
    model: RetrievalModel
    vocabulary: Vocabulary
    fingerprints: Mapping[str, str]
    captions: Mapping[str, Any]
    seed: int
    precision: str
    progress: TrainingProgress
    missing_features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    started_from: Mapping[str, Any] = field(default_factory=dict)
    language_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def text(self) -> TextRecipe | None:
        """How the text of the captions became tokens; None if that is not known."""
        return EncodedParameters.from_json(self.captions).text

    @property
    def step(self) -> int:
        """Steps that the model was trained for."""
        return self.progress.step


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is that of a run, finished or not."""
    run_folder = Folder(os.fspath(folder))
    return any(run_folder.size(name) is not None for name in (BEST, LAST, LOG))


def open_run(folder: str | os.PathLike[str], *, checkpoint: str = "best", device: str | torch.device = "cpu") -> Run:
    """Open a run.

    Args:
        folder: a folder that ``imagepivot train`` wrote.
        checkpoint: ``best`` on the validation split, or ``last``.
        device: the device to load the model onto.

    Raises:
        DatasetError: the folder holds no run, or a damaged one.
    """
    run_folder = Folder(os.fspath(folder))
    name = {"best": BEST, "last": LAST}[checkpoint]
    try:
        stored = read_checkpoint(run_folder, name)
    except FileNotFoundError:
        raise DatasetError(
            f"{run_folder.location!r} is not a run: it holds no {name}. Either the path is wrong, or the training has not reached "
            "its first evaluation yet"
        ) from None
    source = run_folder.path_of(name)
    try:
        config = from_toml(stored.config, source)
        vocabulary = Vocabulary(tokens=stored.tokens, counts=({},) * len(stored.tokens))
    except (UsageError, ValueError) as error:
        raise damaged(source, str(error)) from error
    model = stored_model(config.model, stored, source)
    return Run(
        folder=run_folder,
        config=config,
        model=model.to(device).eval(),
        vocabulary=vocabulary,
        fingerprints=stored.fingerprints,
        captions=stored.captions,
        seed=stored.seed,
        precision=stored.precision,
        progress=stored.progress,
        missing_features=stored.missing_features,
        started_from=stored.started_from,
        language_ids=stored.dimensions.language_ids,
    )

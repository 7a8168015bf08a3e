"""A run that is trained: its model and all that is needed to use it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from schemas.errors import DatasetError
from schemas.parameters import EncodedParameters, TextRecipe
from schemas.storage import Folder
from schemas.vocabulary import Vocabulary
from train.config.sections import Config, from_toml
from train.models.joint_embedding import JointEmbedding, build_model
from train.runs.checkpoints import BEST, LAST, Standing, read_checkpoint

__all__ = ["Run", "open_run"]


@dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
        folder: of the run.
        config: that it was trained with.
        model: with the checkpoint's weights, in evaluation mode.
        vocabulary: that its captions were encoded with; without counts.
        fingerprints: of what it was trained on: ``captions``, ``features``, ``vocabulary`` and ``extractor``.
        captions: parameters of the encoded captions, the text recipe among them.
        seed: of the run.
        precision: that it was trained in.
        standing: how far it was trained.
    """

    folder: Folder
    config: Config
    model: JointEmbedding
    vocabulary: Vocabulary
    fingerprints: Mapping[str, str]
    captions: Mapping[str, Any]
    seed: int
    precision: str
    standing: Standing

    @property
    def text(self) -> TextRecipe | None:
        """How the text of the captions became tokens; None where that is not known."""
        return EncodedParameters.from_json(self.captions).text

    @property
    def step(self) -> int:
        """Steps that the model was trained for."""
        return self.standing.step


def open_run(folder: str | os.PathLike[str], *, checkpoint: str = "best", device: str | torch.device = "cpu") -> Run:
    """Opens a run.

    Args:
        folder: that ``imagepivot train`` wrote.
        checkpoint: ``best`` on the validation split, or ``last``.
        device: where the model goes.

    Raises:
        DatasetError: the folder holds no run, or a damaged one.
    """
    place = Folder(os.fspath(folder))
    name = {"best": BEST, "last": LAST}[checkpoint]
    try:
        found = read_checkpoint(place, name)
    except FileNotFoundError:
        raise DatasetError(
            f"{place.location!r} is not a run: it holds no {name}. Either the path is wrong, or the training has not come to its "
            "first evaluation yet"
        ) from None
    model = build_model(found.model_config, found.seed)
    model.load_state_dict(found.model)
    return Run(
        folder=place,
        config=from_toml(found.config, place.path_of(name)),
        model=model.to(device).eval(),
        vocabulary=Vocabulary(tokens=found.tokens, counts=({},) * len(found.tokens)),
        fingerprints=found.fingerprints,
        captions=found.captions,
        seed=found.seed,
        precision=found.precision,
        standing=found.standing,
    )

"""Pairs: vectors of images and of captions in a joint space, without a run.

Letters: ``N`` images or texts, ``E`` width of a vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.escapes import redact
from schemas.parameters import FeaturesParameters
from schemas.process.devices import upload
from schemas.storage.folder import Folder
from schemas.vocabulary import SPECIALS, Vocabulary
from train.config.models import ModelConfig
from train.config.sections import Config, DataConfig
from train.data.batches import CaptionBatch
from train.data.captions import labels_of
from train.jobs import OpenRun
from train.models.retrieval_model import Encoded, ImageBatch, RetrievalModel
from train.models.similarity import inner_product, l2_normalize
from train.models.vse import SIMILARITIES
from train.runs.checkpoints import TrainingProgress
from train.runs.run import Run, open_run

_COMPARISONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"inner-product": inner_product, **SIMILARITIES}

UNKNOWN_TRAINING = "training data unknown, overlap not checked"
"""Remark on the scores of a joint model, whose training splits no dataset names."""

HELD_OUT = ("val", "dev", "test")
"""Beginnings of the names of splits that a joint model does not count as trained on."""


@dataclass(frozen=True)
class JointSpaceConfig(ModelConfig):
    """Configuration of a `JointSpace`, which has no parameters."""

    kind: ClassVar[str] = "joint-space"


class JointSpace(RetrievalModel):
    """Comparison of given vectors of texts and images, without any encoder.

    Vectors that ``embed`` wrote are compared as their run does; others are divided by their norms. ``places`` is for messages.

    Raises:
        DatasetError: the sides do not share a space, or a width.
        UsageError: only their run can compare the vectors.
    """

    def __init__(
        self, texts: FeaturesParameters, images: FeaturesParameters, *, places: tuple[str, str], languages: Sequence[str] = ()
    ) -> None:
        super().__init__()
        is_same = bool(texts.checkpoint) and texts.checkpoint == images.checkpoint
        names = " and ".join(map(repr, places))
        if not is_same and (not texts.space or texts.space != images.space):
            raise DatasetError(
                f"{names} do not share a space: {_describe_origin(texts)}, and {_describe_origin(images)}. Take both from one "
                "checkpoint; or, if two share a space, write both sides again and name it, e.g. imagepivot import --space NAME"
            )
        if texts.feature.shape != images.feature.shape or len(texts.feature.shape) > 1:
            raise DatasetError(
                f"{names} hold vectors {list(texts.feature.shape)} and {list(images.feature.shape)}, "
                "expected one width: give the projected vectors of both towers"
            )
        model = texts.model or images.model
        self.languages, self.width = tuple(languages), texts.feature.width
        self.similarity = model.similarity if model is not None else "cosine"
        self.space = None if is_same else texts.space
        if self.similarity not in _COMPARISONS:
            raise UsageError(
                f"{places[0]!r} is compared by {self.similarity!r}, expected one of "
                f"{', '.join(_COMPARISONS)}: evaluate the run that embedded it"
            )
        self.anchor = nn.Parameter(torch.zeros(0), requires_grad=False)  # Has the device.
        self._scale_texts, self._scale_images = (not side.model or side.model.encoder is not None for side in (texts, images))

    def encode_images(self, images: ImageBatch) -> Encoded:
        """Return the features ``[N, E]`` of images."""
        return Encoded(l2_normalize(images.features) if self._scale_images else images.features)

    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        """Return the vectors ``[N, E]`` of captions."""
        return self.encode_texts(captions.token_vectors())

    def encode_texts(self, vectors: np.ndarray) -> Encoded:
        """Return given vectors ``[N, E]`` of texts."""
        values = upload(torch.from_numpy(vectors), self.device)
        return Encoded(l2_normalize(values) if self._scale_texts else values)

    def scores(self, a: Encoded, b: Encoded) -> Tensor:
        """Return the similarities of all pairs, ``[A, B]``."""
        return _COMPARISONS[self.similarity](a.values, b.values)


def _describe_origin(parameters: FeaturesParameters) -> str:
    checkpoint = f"checkpoint {parameters.checkpoint[:12]}..." if parameters.checkpoint else "an unknown checkpoint"
    return f"{parameters.feature.name!r} of {checkpoint}, {f'space {parameters.space!r}' if parameters.space else 'no space'}"


def open_members(runs: Sequence[str | OpenRun], captions: str, features: str, device: torch.device) -> list[Run]:
    """Open runs; without any, vectors of captions and images as a run.

    The run of a pair has a `JointSpace` as its model, and neither vocabulary nor training.

    Raises:
        DatasetError: a folder holds no run or dataset, or the sides of a pair do not share a space.
        UsageError: runs are given for vectors of captions, or none for token ids.
    """
    opened = [open_run(run, device=device) if isinstance(run, str) else cast("Run", run) for run in runs]
    texts = open_dataset(captions)
    if opened and texts.kind == "embeddings":
        raise UsageError(f"{captions!r} holds vectors of captions, which no run reads: leave RUN out, or give encoded captions")
    if opened:
        return opened
    if texts.kind != "embeddings":
        raise UsageError(f"{captions!r} holds {texts.kind}, not vectors of captions: name the RUN to evaluate")
    manifests = texts.manifest, open_dataset(features, kind="features").manifest
    sides = [FeaturesParameters.from_json(manifest.parameters) for manifest in manifests]
    portions: dict[str, tuple[str, ...]] = {}
    for _, language, portion in sorted(labels_of(texts)):
        portions[language] = (*portions.get(language, ()), portion)
    ordered = (sides[0].model.languages if sides[0].model is not None else None) or ()
    languages = [language for language in dict.fromkeys((*ordered, *portions)) if language in portions]
    return [
        Run(
            folder=Folder(captions),
            config=Config(DataConfig(portions), JointSpaceConfig()),
            model=JointSpace(*sides, places=(captions, features), languages=languages).to(device),
            vocabulary=Vocabulary(SPECIALS),
            fingerprints={},
            captions={},
            seed=0,
            precision="fp32",
            progress=TrainingProgress(),
        )
    ]


def describe_side(location: str) -> dict[str, str | None]:
    """Return folder, origin and content of a side of a pair, for JSON."""
    dataset = open_dataset(location)
    parameters = FeaturesParameters.from_json(dataset.manifest.parameters)
    return {
        "folder": redact(location),
        "name": parameters.feature.name,
        "source": parameters.feature.source,
        "checkpoint": parameters.checkpoint,
        "space": parameters.space,
        "fingerprint": dataset.fingerprint,
        "content_sha256": dataset.manifest.content_sha256,
    }

"""One training: what is asked for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.errors import ImagepivotError, UsageError
from schemas.storage.folder import Folder
from train.config.sections import Config
from train.data.corpus import Corpus
from train.data.splits import MissingFeatures
from train.data.token_features import check_token_features
from train.data.word_vectors import check_word_vectors
from train.devices import check_device_name, check_precision_name
from train.runs.checkpoints import TrainingProgress

__all__ = ["DivergedError", "Result", "TrainJob"]


class DivergedError(ImagepivotError):
    """A loss, gradient or weight is no longer finite."""


@dataclass(frozen=True)
class TrainJob:
    """One training, as ``imagepivot train`` runs it.

    Attributes:
        config: the model and how to train it.
        corpus: folders of captions, features, vocabulary, and word vectors or vectors of tokens; None where `train` is given the
            material itself.
        output: folder of the run, on this machine.
        seed: seed for initial weights, order and sampling.
        device: a name that `train.devices.resolve_device` knows.
        precision: a name that `train.devices.check_precision` knows.
        compile: compile model and loss, which needs a GPU, and a kind of model that gains by it.
        resume: continue from the last checkpoint in ``output`` if there is one. Configuration, seed, precision and data must be
            the same; ``max_steps``, ``max_epochs`` and ``patience`` may differ.
        allow_changed_content: resume a run although its datasets hold other content than before, e.g. updated features.
        save_every: steps between two checkpoints; one is also written after each evaluation.
        tensorboard: also write events for TensorBoard.
        curves: draw ``curves.png`` at the end, and at evaluations as long as that takes a hundredth of the time.
        memory_map: folder for a copy of the features that is mapped into memory, and that all runs with this folder share.
        allow_missing_features: leave out the captions of images that lack features, in training and validation, instead of
            raising an error.
        start_from: folder of a run whose best weights take the place of drawn ones; see `train.runs.starting`. A run that is
            resumed takes nothing again: then it must be the same run, or may be left out.

    Raises:
        UsageError: a value is missing or impossible.
    """

    config: Config
    corpus: Corpus | None
    output: str
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    compile: bool = False
    resume: bool = False
    save_every: int = 500
    tensorboard: bool = False
    curves: bool = True
    memory_map: str | None = None
    allow_missing_features: bool = False
    start_from: str = ""
    allow_changed_content: bool = False

    def __post_init__(self) -> None:
        datasets = {} if self.corpus is None else {**vars(self.corpus)}
        word_vectors, token_features = (datasets.pop(name, None) for name in ("word_vectors", "token_features"))
        folders = {"OUTPUT": self.output, **{f"--{name}": location for name, location in datasets.items()}}
        for name, location in folders.items():
            if not location:
                raise UsageError(
                    f"{name} is missing: imagepivot train CONFIG OUTPUT --captions ... --features ... --vocabulary ..."
                )
        if word_vectors is not None:
            check_word_vectors(self.config.model, word_vectors)
        if token_features is not None:
            check_token_features(self.config.model, token_features)
        if self.compile:
            self.config.model.check_compile()
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}, expected 0 or more")
        if self.save_every < 1:
            raise UsageError(f"save_every is {self.save_every}, expected 1 or more")
        check_device_name(self.device)
        check_precision_name(self.precision)
        if not Folder(self.output).is_local:
            raise UsageError(f"{self.output!r} is not a local folder: train into one, and copy the run when it is done")
        source = Folder(self.start_from) if self.start_from else None
        if source is not None and source.is_local and source.local_path == Folder(self.output).local_path:
            raise UsageError(
                f"--from {self.start_from!r} is OUTPUT itself: name another run, or continue this one with --resume"
            )


@dataclass(frozen=True)
class Result:
    """The outcome of a training.

    Attributes:
        folder: folder of the run; `train.runs.open_run` opens it.
        progress: steps, best score, and why the training stopped.
        missing_features: the images without features that were left out, by split.
    """

    folder: str
    progress: TrainingProgress
    missing_features: tuple[MissingFeatures, ...] = ()

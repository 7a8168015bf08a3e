"""Trained runs: opening them, and checks before one is resumed."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from schemas.errors import DatasetError, UsageError
from schemas.manifest import MANIFEST_NAME
from schemas.storage.folder import Folder
from schemas.vocabulary import Vocabulary
from train.config.models import UnknownKindError
from train.config.sections import Config, config_differences, from_toml
from train.models.retrieval_model import RetrievalModel
from train.runs.checkpoints import BEST, LAST, Checkpoint, TrainingState, read_checkpoint, unusable
from train.runs.history import read_history
from train.runs.log import CONFIG, CURVES, METRICS
from train.runs.restoring import stored_model

MODULES = "modules"
"""Key of the digest of all modules of ``--import`` among a checkpoint's contents."""


@dataclass(frozen=True)
class Run(TrainingState):
    """A trained model.

    Attributes:
        model: the model with the checkpoint's weights, in evaluation mode.
        vocabulary: vocabulary of its captions, without counts.
        language_ids: ids of the tokens that the model has vectors of, by language; all tokens of a language without an entry.

    Examples:
        >>> run = imagepivot.open_run("runs/demo")
        >>> run.progress.step, len(run.vocabulary)
        (2, 17)
    """

    folder: Folder
    config: Config
    model: RetrievalModel
    vocabulary: Vocabulary
    language_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    feature_shape: tuple[int, ...] = ()

    def __repr__(self) -> str:
        kind, languages = self.config.model.kind, self.model.languages
        return f"Run({self.folder.location!r}, kind={kind!r}, languages={languages}, step={self.step})"

    @property
    def step(self) -> int:
        """Number of steps that the model was trained for."""
        return self.progress.step


def open_run(folder: str | os.PathLike[str], *, checkpoint: str = "best", device: str | torch.device = "cpu") -> Run:
    """Open a run at its checkpoint ``best`` (on the validation split) or ``last``.

    Raises:
        DatasetError: the folder holds no run, or a damaged one.
        UsageError: this process does not know the run's model kind.
    """
    run_folder = Folder(os.fspath(folder))
    name = {"best": BEST, "last": LAST}[checkpoint]
    try:
        stored = read_checkpoint(run_folder, name)
    except FileNotFoundError:
        raise DatasetError(
            f"{run_folder.location!r} is not a run: it holds no {name}. Either the path is wrong, or the "
            "training has not reached its first evaluation yet"
        ) from None
    source = run_folder.path_of(name)
    config = _stored_config(stored, source)
    try:
        vocabulary = Vocabulary(stored.tokens)
    except ValueError as error:
        raise unusable(source, str(error)) from error
    model = stored_model(config.model, stored, source)
    return Run(
        folder=run_folder,
        config=config,
        model=model.to(device).eval(),
        vocabulary=vocabulary,
        language_ids=stored.dimensions.language_ids,
        feature_shape=tuple(stored.dimensions.feature_shape),
        **{state.name: getattr(stored, state.name) for state in fields(TrainingState)},
    )


def _stored_config(checkpoint: Checkpoint, source: str) -> Config:
    try:
        return from_toml(checkpoint.config, source)
    except UnknownKindError:
        raise
    except UsageError as error:
        raise unusable(source, str(error)) from error


def checkpoint_to_resume(folder: Folder, *, resume: bool) -> Checkpoint | None:
    """Return the last checkpoint in a folder; None if the folder holds no run.

    Raises:
        UsageError: the folder holds an unfinished run without ``resume``, a run without its last checkpoint, or a dataset.
        DatasetError: the checkpoint is damaged, or has no state of the training.
    """
    if folder.stat(LAST) is None:
        if folder.stat(MANIFEST_NAME) is not None:
            raise UsageError(f"{folder.location!r} holds a dataset: choose another folder for the run; nothing was changed")
        if folder.stat(BEST) is None:
            return None
        raise UsageError(
            f"{folder.location!r} holds a run, but has no {LAST} to resume from: choose another folder, or "
            "delete this one to train again; nothing was changed"
        )
    checkpoint = read_checkpoint(folder, LAST)
    if not resume and not checkpoint.progress.stop_reason:
        raise holds_a_run(folder)
    for name in ("optimizer", "sampler"):
        if getattr(checkpoint, name) is None:
            raise DatasetError(
                f"{folder.path_of(LAST)} has no state of the {name} to resume from, as if it were a copy of "
                f"{BEST}: copy the run again, or delete it to train it again"
            )
    return checkpoint


def holds_a_run(folder: Folder) -> UsageError:
    """Return the error about an existing run without ``--resume``."""
    return UsageError(
        f"{folder.location!r} holds a run: give --resume to continue it, or choose another folder; nothing was changed"
    )


def is_finished(old: Checkpoint, new: Checkpoint, folder: Folder, *, curves: bool) -> bool:
    """Return whether an ended run is complete, and was trained on equal content."""
    if _changed_contents(old, new) or folder.stat(BEST) is None or (curves and folder.stat(CURVES) is None):
        return False
    history = read_history(folder)
    timings = [entry["step"] for entry in history.of("timing")]
    return (
        timings[-1:] == [old.progress.step]
        and folder.stat(CONFIG) is not None
        and folder.stat(METRICS) is not None
        and folder.read(METRICS) == history.to_csv().encode()
        and read_checkpoint(folder, BEST).progress.step == old.progress.best_step
    )


def _compare_threads(folder: Folder) -> list[str]:
    """Return a warning about another number of threads, if any."""
    before = [entry["threads"] for entry in read_history(folder).of("timing") if "threads" in entry][-1:]
    now = torch.get_num_threads()
    if before in ([], [now]):
        return []
    return [
        f"the run was trained with {before[0]} threads and goes on with {now}: on a CPU its weights differ in the last bits "
        f"from those of an uninterrupted run. OMP_NUM_THREADS={before[0]} continues it to the same weights"
    ]


def check_same_run(old: Checkpoint, new: Checkpoint, folder: Folder, *, allow_changed_content: bool) -> list[str]:
    """Check that a run is resumed with its configuration, seed, precision and data.

    With ``allow_changed_content`` the content of datasets may have changed, but not their fingerprints.

    Returns:
        Warnings about another number of threads, and about changed content.

    Raises:
        DatasetError: something differs, which the message names.
    """
    source = folder.path_of(LAST)
    before = _stored_config(old, source)
    changes = config_differences(before.lasting, from_toml(new.config, "the configuration").lasting)
    for name in ("seed", "precision"):
        if getattr(old, name) != getattr(new, name):
            changes.append(f"{name}: was {getattr(old, name)}, now {getattr(new, name)}")
    for name in dict.fromkeys((*new.fingerprints, *old.fingerprints)):
        was, now = (checkpoint.fingerprints.get(name, "none") for checkpoint in (old, new))
        if was != now:
            changes.append(f"{name}: was {was[:12]}..., now {now[:12]}...")
    for split in sorted({*old.missing_features, *new.missing_features}):
        was, now = (str(checkpoint.missing_features.get(split, {}).get("images", 0)) for checkpoint in (old, new))
        if old.missing_features.get(split) != new.missing_features.get(split):
            changes.append(f"images without features in split {split!r}: were {was}, now {now if now != was else 'others'}")
    starts = old.started_from, new.started_from
    # A resumed run may omit it.
    if starts[1] and starts[0].get("weights_sha256") != starts[1]["weights_sha256"]:
        names = [f"{start['run']} ({start['weights_sha256'][:12]}...)" if start else "nothing" for start in starts]
        changes.append("--init-from: was {}, now {}".format(*names))
    if changes:
        raise DatasetError(
            f"{folder.location!r} holds another run ({'; '.join(changes[:3])}), which cannot be resumed with these values. Give "
            "those that it was begun with, or choose another folder; nothing was changed"
        )
    return _compare_threads(folder) + _check_content(old, new, folder, allow_changed_content)


def contents_since(old: Checkpoint, new: Checkpoint) -> dict[str, str]:
    """Return the contents of a resumed run, with former ones that have changed."""
    before = {f"{name} until step {old.progress.step}": digest for name, (digest, _) in _changed_contents(old, new).items()}
    return {**old.contents, **before, **new.contents}


def _changed_contents(old: Checkpoint, new: Checkpoint) -> dict[str, tuple[str, str]]:
    """Return old and new digests of changed datasets and modules, by name."""
    names = sorted(old.contents.keys() & {*new.contents, MODULES})
    pairs = {name: (old.contents[name], new.contents.get(name, "none")) for name in names}
    return {name: (was, now) for name, (was, now) in pairs.items() if was != now}


def _check_content(old: Checkpoint, new: Checkpoint, folder: Folder, allow_changed: bool) -> list[str]:
    changed = _changed_contents(old, new)
    if not changed:
        return []
    digests = "; ".join(f"{name}: was {was[:12]}..., now {now[:12]}..." for name, (was, now) in changed.items())
    step = f"step {old.progress.step:,}"
    sentence = f"the content of {' and '.join(changed)} has changed since {step} (Manifest.content_sha256 of {digests})"
    if not allow_changed:
        raise DatasetError(
            f"{folder.location!r} cannot be resumed: {sentence}. Give the datasets and modules as they "
            "were, delete the run to train it again, or continue it on the new content with imagepivot "
            "train --resume --allow-changed-content (allow_changed_content=True); nothing was changed"
        )
    return [f"{sentence}: scores of earlier evaluations, the best one included, are of the content before"]

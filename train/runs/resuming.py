"""Going on with a run: only where everything that determines its weights is the same."""

from __future__ import annotations

from schemas.errors import DatasetError, UsageError
from schemas.storage import Folder
from train.config.sections import differences, from_toml
from train.runs.checkpoints import BEST, LAST, Checkpoint, read_checkpoint

__all__ = ["check_same_run", "checkpoint_to_resume"]


def checkpoint_to_resume(folder: Folder, *, resume: bool) -> Checkpoint | None:
    """The last checkpoint in a folder, None where there is no run.

    Raises:
        UsageError: there is one, and nobody asked to go on from it; or there is a model that would be lost.
        DatasetError: it is damaged, or holds no state of the training.
    """
    if folder.size(LAST) is None:
        if folder.size(BEST) is None:
            return None
        raise UsageError(
            f"{folder.location!r} holds a run, but has no {LAST} to go on from: choose another folder, or delete this one to train "
            "anew; nothing was changed"
        )
    if not resume:
        raise UsageError(
            f"{folder.location!r} holds a run: give --resume to go on with it, or choose another folder; nothing was changed"
        )
    found = read_checkpoint(folder, LAST)
    for name in ("optimizer", "sampler"):
        if getattr(found, name) is None:
            raise DatasetError(
                f"{folder.path_of(LAST)} has no state of the {name} to go on from, as if it were a copy of {BEST}: copy the run "
                "again, or train it again in another folder"
            )
    return found


def check_same_run(there: Checkpoint, now: Checkpoint, folder: Folder) -> None:
    """Refuses to go on with a run whose weights another configuration, seed, precision or other data has made.

    Raises:
        DatasetError: what differs, by name.
    """
    place = folder.path_of(LAST)
    found = differences(from_toml(there.config, place).lasting, from_toml(now.config, "the configuration").lasting)
    for name in ("seed", "precision"):
        if getattr(there, name) != getattr(now, name):
            found.append(f"{name}: there {getattr(there, name)}, now {getattr(now, name)}")
    for name, fingerprint in now.fingerprints.items():
        if there.fingerprints.get(name) != fingerprint:
            found.append(f"{name}: there {there.fingerprints.get(name, 'none')[:12]}..., now {fingerprint[:12]}...")
    if found:
        raise DatasetError(
            f"{folder.location!r} holds another run ({'; '.join(found[:3])}): it cannot go on with these. Give what it was begun "
            "with, or choose another folder; nothing was changed"
        )

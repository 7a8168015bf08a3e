"""What the tasks of an array job leave beside the shards for the commit: everything that it cannot read in the shards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from schemas.errors import DatasetError
from schemas.fingerprints import Identity, canonical_json, sha256_of_bytes, sha256_of_json
from schemas.manifest import TASKS_NAME
from schemas.storage.folder import Folder
from schemas.stored import read_stored
from schemas.writing.dataset_writer import library_versions
from schemas.writing.output import OutputDataset
from schemas.writing.survey import difference

__all__ = ["TaskPlan"]

_FORMAT = "array job 1"


@dataclass(frozen=True)
class TaskPlan:
    """Content of the file. Every task of an array job writes the same, all but the number of tasks, which is for messages.

    Attributes:
        tasks: number of tasks.
        kind: as in `Identity`.
        parameters: as in `Identity`.
        shards: number of shards.
        inputs: as in `Identity`.
        listings: as in `OutputDataset`; empty where the output has none.
        states: as in `OutputDataset` for tasks that update. Else empty: copies of an image on several machines
            may differ in their times.
        files: SHA-256 of the files besides shards, by name.
        other_files: as in `OutputDataset`.
        libraries: versions of the libraries that make the shards, by name.
    """

    tasks: int
    kind: str
    parameters: Mapping[str, Any]
    shards: int
    inputs: tuple[Mapping[str, Any], ...] = ()
    listings: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    other_files: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, output: OutputDataset, *, tasks: int, libraries: Iterable[str], updates: bool) -> TaskPlan:
        """Make the plan of one of the tasks that write an output."""
        identity = output.identity
        return cls(
            tasks=tasks,
            kind=identity.kind,
            parameters=json.loads(canonical_json(identity.parameters)),  # As it is read again: lists, no tuples.
            shards=identity.shards,
            inputs=tuple(json.loads(canonical_json(list(identity.inputs)))),
            listings=output.listings or (),
            states=(output.states or ()) if updates else (),
            files={name: sha256_of_bytes(data) for name, data in sorted(output.files.items())},
            other_files=output.other_files,
            libraries=library_versions(libraries),
        )

    @property
    def identity(self) -> Identity:
        """Identity of the dataset."""
        return Identity(self.kind, self.parameters, self.inputs, self.shards)

    def output(self, folder: Folder) -> OutputDataset:
        """Return what the tasks write.

        Raises:
            DatasetError: a file that all of them write is missing or damaged.
        """
        files = {}
        for name, digest in self.files.items():
            data = folder.read(name) if folder.size(name) is not None else b""
            if sha256_of_bytes(data) != digest:
                raise DatasetError(
                    f"{folder.path_of(name)} is missing or damaged: give any of the {self.tasks} tasks again, which writes it anew"
                )
            files[name] = data
        return OutputDataset(folder, self.identity, self.listings or None, self.states or None, files, self.other_files)

    def write(self, folder: Folder) -> None:
        """Write the plan."""
        content = {"format": _FORMAT, **asdict(self)}
        folder.write(TASKS_NAME, f"{canonical_json({**content, 'sha256': sha256_of_json(content)})}\n".encode())

    @classmethod
    def read(cls, folder: Folder) -> TaskPlan | None:
        """Read the plan; None if there is none.

        Raises:
            DatasetError: it is damaged.
        """
        meaning = "delete it, and give any of the tasks again, which writes it anew"
        return read_stored(cls, folder, TASKS_NAME, version=_FORMAT, has_digest=True, meaning=meaning)

    def joined(self, stored: TaskPlan, output: OutputDataset, *, updates: bool) -> TaskPlan:
        """Return the plan of a task in a folder where one is stored already.

        Args:
            stored: the plan in the folder.
            output: what this task writes.
            updates: whether this task brings its shards up to date with images that have changed.

        Raises:
            DatasetError: the stored plan is that of another job.
        """
        location, other = output.folder.location, output.folder.path_of(TASKS_NAME)
        start = f"{location!r} is being written by the tasks of an array job"
        if stored.identity.fingerprint != self.identity.fingerprint:
            raise DatasetError(
                f"{start} for another dataset ({difference(stored.identity, self.identity)}): nothing was written. Choose another "
                f"folder; or, if that job was a mistake, delete {other} and what it has made"
            )
        for name in ("files", "libraries"):
            before, now = getattr(stored, name), getattr(self, name)
            if before != now:
                raise DatasetError(
                    f"{start} with other {name}: there {_changed(before, now)}, here {_changed(now, before)}; nothing was written. "
                    f"Give all tasks the same; or, to go on with these, delete {other}"
                )
        if updates:
            return self
        if stored.listings != self.listings or (stored.states and stored.states != output.states):
            raise DatasetError(
                f"{start}, and the images have changed since it began: some are new, gone, or differ in size or modification time; "
                "nothing was written. Bring them back as they were, or give all tasks again with --update"
            )
        return replace(self, states=stored.states)


def _changed(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text[:12]}" for name, text in one.items() if other.get(name) != text) or "none"

"""What a folder of builds remembers of its steps, in ``.plan``: of each one what it was made from, and what earlier values made.

The records serve this folder alone: they hold states of files of this machine. What other machines can compare is the lock file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelines.plans.states import Found, Result
from schemas.errors import DatasetError
from schemas.filesystems import storage_errors
from schemas.fingerprints import canonical_json, sha256_of_json
from schemas.locations import is_remote
from schemas.output import lock_file
from schemas.storage import Folder

__all__ = ["Memory", "Record", "hold_build"]

_FOLDER = ".plan"
_RECORDS = f"{_FOLDER}/steps.json"
_EARLIER = "earlier"
_FORMAT = 1
_PATIENCE = 20.0


@dataclass(frozen=True)
class Record:
    """What is known of a step.

    Attributes:
        command: its command.
        options: values that its result depends on, by key.
        inputs: its inputs, by key; several of one key are numbered.
        version: version of imagepivot that made it.
        result: what it made; None while it is not done.
        seconds: time that all of it took; 0 while it is not known.
        before: of a step that is not done, the record of what may still be in its place.
    """

    command: str
    options: Mapping[str, Any]
    inputs: Mapping[str, Found]
    version: str
    result: Result | None = None
    seconds: float = 0.0
    before: Record | None = None

    @property
    def key(self) -> str:
        """Digest of what the result is made from."""
        digests = {name: found.digest for name, found in self.inputs.items()}
        return sha256_of_json({"command": self.command, "options": self.options, "inputs": digests})

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Record:
        """Return a record from its JSON."""
        inputs = {name: Found(**found) for name, found in stored["inputs"].items()}
        result = None if stored["result"] is None else Result(**stored["result"])
        before = None if stored["before"] is None else cls.of(stored["before"])
        return cls(**{**stored, "inputs": inputs, "result": result, "before": before})


@dataclass
class Memory:
    """The records of a folder of builds.

    Attributes:
        output: the folder.
        records: by step.
    """

    output: str
    records: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def read(cls, output: str) -> Memory:
        """Read the records; those that are damaged are as if there were none, so that every command looks for itself."""
        try:
            stored = json.loads(Folder(output).read(_RECORDS))
            if stored["format"] != _FORMAT:
                raise ValueError("another format")
            return cls(output, {name: Record.of(record) for name, record in stored["steps"].items()})
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return cls(output)

    def note(self, step: str, record: Record) -> None:
        """Keep the record of a step."""
        self.records[step] = record
        content = {"format": _FORMAT, "steps": {name: asdict(known) for name, known in sorted(self.records.items())}}
        Folder(self.output).write(_RECORDS, f"{canonical_json(content)}\n".encode())

    # --- what earlier values made ------------------------------------------------------------------------------------

    def has_earlier(self, step: str, key: str) -> bool:
        """Whether what these values made for a step was kept."""
        return not is_remote(self.output) and (self._earlier(step, key) / "result").exists()

    def set_aside(self, step: str, location: str, record: Record | None) -> Path:
        """Move what is at a location to where earlier results are kept, and return its place.

        Args:
            step: the step.
            location: its result, complete or not.
            record: what is known of it; None if nothing is: then it is never taken back.
        """
        with storage_errors(location):
            place = self._earlier(step, record.key if record is not None else "unknown")
            number = 1
            while (place / "result").exists():
                number += 1
                place = place.with_name(f"{place.name.partition('-')[0]}-{number}")
            place.mkdir(parents=True, exist_ok=True)
            if record is not None:  # Before the move: a result without a record could never be taken back.
                kept = canonical_json(asdict(replace(record, before=None)))
                Folder(str(place)).write("record.json", kept.encode())
            Path(location).rename(place / "result")
        return place / "result"

    def take_back(self, step: str, key: str, location: str) -> Record:
        """Move what earlier values made back to its location, where nothing may be, and return its record."""
        place = self._earlier(step, key)
        with storage_errors(location):
            record = Record.of(json.loads((place / "record.json").read_bytes()))
            Path(location).parent.mkdir(parents=True, exist_ok=True)
            (place / "result").rename(location)
            shutil.rmtree(place)
        return record

    def earlier(self) -> list[Path]:
        """Return the folders in which earlier results are kept."""
        root = Path(self.output) / _FOLDER / _EARLIER
        return [] if is_remote(self.output) else sorted(root.glob("*/*/"))

    def _earlier(self, step: str, key: str) -> Path:
        return Path(self.output) / _FOLDER / _EARLIER / step / key[:12]


@contextlib.contextmanager
def hold_build(output: str) -> Iterator[int | None]:
    """Hold a local folder for one build, and yield the file descriptor that does so; steps that inherit it hold the folder, too.

    Raises:
        DatasetError: another build is at work there.
    """
    if is_remote(output):
        Folder(output).check_bucket()
        yield None
        return
    with storage_errors(output):
        path = Path(output) / _FOLDER / "lock"
        try:
            # A build that was killed holds it until its steps have noticed.
            handle = lock_file(path, patience=_PATIENCE)
        except BlockingIOError:
            raise DatasetError(
                f"{output!r} is in use: another build is at work there. Wait for it to end, or give another --output"
            ) from None
    try:
        yield handle
    finally:
        os.close(handle)

"""The log that a run writes while it trains: ``log.jsonl``, and events for TensorBoard.

Each line of ``log.jsonl`` is an object whose ``event`` is ``step`` (every few steps: the loss and the terms
that it consists of, per query; task and languages of the batch; norm of the gradient before clipping; learning rate),
``evaluation`` (recalls on the validation split), ``validation`` (loss and terms there, per query), ``left_out`` (images without
features, before the first step) or ``started_from`` (what was taken from another run, before the first step). It holds no times, so
that a run that was killed and resumed leaves the same lines as an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from schemas.errors import DatasetError, UsageError
from schemas.filesystems import storage_errors
from schemas.storage import Folder

__all__ = ["LOG", "RunLog"]

LOG = "log.jsonl"
_EVENTS = "tensorboard"


class RunLog:
    """Open log of a run; a context manager.

    Args:
        folder: folder of the run.
        step: step from which the run continues; lines of later steps are dropped, since those steps will be done again.
        tensorboard: also write events for TensorBoard into ``tensorboard``.

    Raises:
        UsageError: TensorBoard was requested and is not installed.
        DatasetError: a line of the log is damaged, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, step: int, tensorboard: bool) -> None:
        path = folder / LOG
        self._path = str(path)
        with storage_errors(self._path):
            kept = _lines_until(path, step)
        self._events = _Events(folder / _EVENTS, step) if tensorboard else None
        # Written whole or not at all: a process that is killed here leaves the lines of earlier ones.
        Folder(str(folder)).write(LOG, b"".join(kept))
        with storage_errors(self._path):
            # Without a buffer, nothing is left to be written when it is closed.
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line; numbers in ``values`` become curves in TensorBoard.

        Args:
            event: ``step``, ``evaluation``, ``validation``, ``left_out`` or ``started_from``.
            step: the step of the event.
            values: plain values, for JSON; may be nested.

        Raises:
            DatasetError: the disk is full, or something else keeps the file from being written.
        """
        line = json.dumps({"event": event, "step": step, **values}, ensure_ascii=False) + "\n"
        with storage_errors(self._path):
            _write_all(self._file, line.encode())
        if self._events is not None:
            self._events.write(dict(_numbers(values, event)), step)


def _lines_until(path: Path, step: int) -> list[bytes]:
    """Return the lines up to a step. A killed process may leave half a line at the end, which is dropped."""
    # Bytes rather than text, whose lines also end at characters that a name may hold.
    lines = path.read_bytes().split(b"\n")[:-1] if step and path.exists() else []
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            keeps = json.loads(line)["step"] <= step
        except (ValueError, LookupError, TypeError) as error:
            raise DatasetError(
                f"{path}, line {number}, is damaged ({type(error).__name__}: {error}): delete this line, or the whole file, which "
                "is only for people, and give the same command again"
            ) from error
        if keeps:
            kept.append(line + b"\n")
    return kept


class _Events:
    """File of events for TensorBoard, in the order of `RunLog`.

    Written here rather than by torch's ``SummaryWriter``, whose thread would print its own traceback when the disk is full.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UsageError(
                "TensorBoard is not installed: pip install 'imagepivot[train]', or leave its events out with --no-tensorboard"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # TensorBoard reads the files in the order of their names.
        path = folder / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = str(path)
        with storage_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)
        self._records = RecordWriter(_Whole(self._file))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(file_version="brain.Event:2")
        self._add(step=step + 1, session_log=start)  # Events of later steps in other files are not shown any more.

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _add(self, **content: Any) -> None:
        with storage_errors(self._path):
            self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


class _Whole:
    """A file without a buffer that writes all of what it is given."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        _write_all(self._file, data)


def _write_all(file: FileIO, data: bytes) -> None:
    """Write all bytes; a file without a buffer may take fewer at a time, the last before the disk is full."""
    while data:
        data = data[file.write(data) or 0 :]


def _numbers(value: Any, name: str) -> list[tuple[str, float]]:
    """Return the numbers in a nested value, with their paths as names."""
    if isinstance(value, Mapping):
        return [number for key, item in value.items() for number in _numbers(item, f"{name}/{key}")]
    return [(name, float(value))] if isinstance(value, (int, float)) else []

"""The log that a run writes while it trains: ``log.jsonl``, and events for TensorBoard.

Each line of ``log.jsonl`` is an object whose ``event`` is ``step`` (every few steps: loss, norm of the gradient, learning rate) or
``evaluation`` (recalls on the validation split). It holds no times, so that a run that was killed and resumed leaves the same
lines as an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from schemas.errors import DatasetError, UsageError
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
        DatasetError: a line of the log is damaged.
    """

    def __init__(self, folder: Path, *, step: int, tensorboard: bool) -> None:
        path = folder / LOG
        kept = _lines_until(path, step)
        self._events = _event_writer(folder / _EVENTS, step) if tensorboard else None
        # Written whole or not at all: a process that is killed here leaves the lines of earlier ones.
        Folder(str(folder)).write(LOG, b"".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line; numbers in ``values`` become curves in TensorBoard.

        Args:
            event: ``step`` or ``evaluation``.
            step: the step of the event.
            values: plain values, for JSON; may be nested.
        """
        self._file.write(json.dumps({"event": event, "step": step, **values}, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in _numbers(values, event):
                self._events.add_scalar(name, value, step)


def _lines_until(path: Path, step: int) -> list[bytes]:
    """Return the lines up to a step. A killed process may leave half a line at the end, which is dropped."""
    # Bytes rather than text, whose lines also end at characters that a name may hold.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
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


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "TensorBoard is not installed: pip install 'imagepivot[train]', or leave its events out with --no-tensorboard"
        ) from error
    return SummaryWriter(str(folder), purge_step=step + 1)


def _numbers(value: Any, name: str) -> list[tuple[str, float]]:
    """Return the numbers in a nested value, with their paths as names."""
    if isinstance(value, Mapping):
        return [number for key, item in value.items() for number in _numbers(item, f"{name}/{key}")]
    return [(name, float(value))] if isinstance(value, (int, float)) else []

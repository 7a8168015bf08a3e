"""What a command does as lines of JSON on standard error, for programs that watch it; docs/reference/events.md lists the events.

`start` turns standard error into such lines: from then on `emit` writes events, and whatever else reaches standard error becomes
one, too: warnings and logs of libraries, and what C++ code and worker processes write there. `finish` writes the last line.
Without `start` nothing changes, and `emit` says so.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from schemas.escapes import to_json


def _write_log(message: str, style: str) -> None:
    logging.getLogger("schemas").log(logging.INFO if style == "dim" else logging.WARNING, message)


_show: Callable[[str, str], None] = _write_log

_STDERR = 2
_CHUNK = 1 << 16
_DRAIN_SECONDS = 2.0

_STATUS = {0: "done", 3: "failures", **dict.fromkeys((129, 130, 141, 143), "stopped")}


def line(event: str, **fields: Any) -> str:
    """Return an event as one line of JSON, with the time; numbers that JSON does not know become null."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return to_json(_plain({"time": now, "event": event, **fields}), default=str, ensure_ascii=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def start() -> None:
    """Turn standard error into lines of JSON, if it is not yet."""
    global _log
    if _log is None:
        _log = _EventLog(sys.stderr)


def started() -> bool:
    """Return whether standard error is lines of JSON."""
    return _log is not None


def emit(event: str, **fields: Any) -> bool:
    """Write a ``progress``, ``remark``, ``warning`` or ``error``, and return True, if standard error is lines of JSON."""
    if _log is None:
        return False
    _log.write(line(event, **fields))
    return True


def remark(message: str, style: str = "yellow") -> None:
    """Say something besides the result of a command, in a style of rich's; from Python it goes to the log.

    What is ``dim`` is information there, anything else a warning.
    """
    _show(message, style)


def show_remarks(show: Callable[[str, str], None]) -> None:
    """Let a function show what `remark` says from now on."""
    global _show
    _show = show


def record(**fields: Any) -> None:
    """Set fields of the last event: ``command``, ``output`` and ``counts``; of a job that goes on ``status`` and ``job``."""
    if _log is not None:
        _log.end.update(fields)


def finish(exit_code: int, message: str | None = None) -> None:
    """Write the last event, if standard error is lines of JSON; nothing reaches standard error after it.

    The message is the reason why the command did not end well, or what others still have to do.
    """
    global _log
    if _log is not None:
        log, _log = _log, None
        status = _STATUS.get(exit_code, "failed")
        log.close(line("end", **{"status": status, **log.end}, exit_code=exit_code, message=message))


class _EventLog:
    """Lines of JSON on standard error.

    The stream itself is written to where it is not the process's own (a test, a notebook). Else file descriptor 2 becomes a pipe,
    whose content a thread wraps into events, and events are written to what the descriptor was before.
    """

    def __init__(self, stream: TextIO) -> None:
        self.end: dict[str, Any] = {"command": None, "output": None, "counts": {}}
        self._stream = stream
        self._lock = threading.RLock()  # A signal may end the process while its main thread is writing.
        self._descriptor: int | None = None
        self._reader: threading.Thread | None = None
        self._show_warning = warnings.showwarning
        self._handlers, self._level = logging.root.handlers[:], logging.root.level
        if _is_own(stream):
            stream.flush()
            self._descriptor = os.dup(_STDERR)
            reading, writing = os.pipe()
            os.dup2(writing, _STDERR)
            os.close(writing)
            self._reader = threading.Thread(target=self._wrap, args=(reading,), daemon=True)
            self._reader.start()
        warnings.showwarning = _warn
        # A plain handler would write what ours writes once more; others, such as those of tests, keep what they get.
        others = (handler for handler in self._handlers if type(handler) is not logging.StreamHandler)
        logging.root.handlers[:] = [_Handler(), *others]
        logging.root.setLevel(logging.WARNING)

    def write(self, text: str) -> None:
        data = text + "\n"
        with self._lock:
            if self._descriptor is None:
                self._stream.write(data)
                self._stream.flush()
                return
            rest = data.encode()
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def close(self, last: str) -> None:
        warnings.showwarning, logging.root.handlers[:] = self._show_warning, self._handlers
        logging.root.setLevel(self._level)
        if self._reader is not None:
            self._stream.flush()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _STDERR)  # Closes our end of the pipe; a worker process may still hold its own for a moment.
            os.close(nowhere)
            self._reader.join(_DRAIN_SECONDS)
        self.write(last)
        with self._lock:
            self._stream, self._descriptor = io.StringIO(), None

    def _wrap(self, reading: int) -> None:
        """Turn what arrives in the pipe into warnings, one for what was written at once."""
        while data := os.read(reading, _CHUNK):
            while not data.endswith(b"\n") and len(data) < _CHUNK and (more := os.read(reading, _CHUNK)):
                data += more
            # Of a bar that is drawn over itself only the last state counts.
            lines = (text.rpartition("\r")[2].rstrip() for text in data.decode(errors="replace").rstrip().split("\n"))
            if message := "\n".join(lines).strip("\n"):
                self.write(line("warning", message=message, source="stderr"))
        os.close(reading)


_log: _EventLog | None = None


class _Handler(logging.Handler):
    """Writes what libraries log."""

    def emit(self, record: logging.LogRecord) -> None:
        event = "error" if record.levelno >= logging.ERROR else "warning"
        emit(event, message=record.getMessage(), source=record.name)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    emit("warning", message=str(message), source=category.__name__)


def _is_own(stream: TextIO) -> bool:
    try:
        return stream.fileno() == _STDERR
    except (AttributeError, OSError, ValueError):
        return False

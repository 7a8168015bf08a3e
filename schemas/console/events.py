"""JSON event log on standard error; docs/reference/events.md lists the events.

`start` replaces standard error by JSON lines. `emit` writes events. All other output (warnings and logs of libraries, output of
C++ code and worker processes) becomes events, too. `finish` writes the last line. Without `start`, `emit` returns False.
"""

import io
import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO, TypeAlias

from schemas.escapes import escape_text, redact, to_json
from schemas.process import shutdown

Remark: TypeAlias = Callable[[str], None]
"""Receiver of a sentence beside the result of a function, such as `remark` or ``logger.warning``."""

_STDERR = 2
_CHUNK = 1 << 16
_DRAIN_SECONDS = 2.0
_STATUS = {0: "done", 3: "failures", **dict.fromkeys((129, 130, 141, 143), "stopped")}
_SEVERITIES = {"warning": "WARNING", "error": "ERROR", "failures": "WARNING", "stopped": "WARNING", "failed": "ERROR"}
"""Severities of events, and of the status of the last one; others are INFO."""


def _write_log(message: str, style: str) -> None:
    logging.getLogger("schemas").log(logging.INFO if style == "dim" else logging.WARNING, escape_text(message, lines=True))


_show: Callable[[str, str], None] = _write_log


def line(event: str, *, message: str, **fields: Any) -> str:
    """Format an event with time and severity as one line of JSON.

    NaN and infinity become null. Names and values of ``time``, ``severity`` and ``message`` are those of Google's Cloud Logging.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    severity = fields.pop("severity", None) or _SEVERITIES.get(fields.get("status", event), "INFO")
    content = {"time": now, "severity": severity, "event": event, "message": message, **fields}
    return to_json(_plain(content), default=str, ensure_ascii=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def start() -> None:
    """Replace standard error by JSON lines, once."""
    global _log
    if _log is None:
        _log = _EventLog(sys.stderr)


def emit(event: str, **fields: Any) -> bool:
    """Write an event, e.g. ``progress`` or ``warning``; return False without `start`."""
    if _log is None:
        return False
    _log.write(line(event, **fields))
    if _log.is_closed:
        shutdown.stop_at_closed_pipe()
    return True


def remark(message: str, style: str = "yellow") -> None:
    """Show a message beside the result of a command, in a rich style.

    From Python it goes to the log, as information if ``dim``, else as a warning.
    """
    _show(message, style)


def show_remarks(show: Callable[[str, str], None]) -> None:
    """Set the function that shows remarks."""
    global _show
    _show = show


def record(**fields: Any) -> None:
    """Set fields of the last event, e.g. ``output``, ``counts`` or a job's ``status``."""
    if _log is not None:
        _log.end.update(fields)


def finish(exit_code: int, message: str | None = None) -> None:
    """Write the last event after `start`, and close standard error.

    The message is the error of the command, or the work left for other tasks.
    """
    global _log
    if _log is not None:
        log, _log = _log, None
        status = _STATUS.get(exit_code, "failed")
        end = {"status": status, **log.end}
        words = f"{end['command'] or 'imagepivot'}: {end['status']}"
        log.close(line("end", message=words if message is None else message, **end, exit_code=exit_code))
        if log.is_closed:
            shutdown.stop_at_closed_pipe()


class _EventLog:
    """JSON lines on standard error.

    A replaced ``sys.stderr`` (tests, notebooks) is written to directly. Otherwise file descriptor 2 becomes a
    pipe, a thread converts its content to events, and events go to a duplicate of the original descriptor.
    """

    def __init__(self, stream: TextIO) -> None:
        self.end: dict[str, Any] = {"command": None, "output": None, "counts": {}}
        self._stream = stream
        self._lock = threading.RLock()  # A signal may end the process while its main thread is writing.
        self.is_closed = False  # The reader has ended.
        self._descriptor: int | None = None
        self._reader: threading.Thread | None = None
        self._show_warning = warnings.showwarning
        self._handlers, self._level = logging.root.handlers[:], logging.root.level
        try:
            is_own = stream.fileno() == _STDERR
        except (AttributeError, OSError, ValueError):
            is_own = False
        if is_own:
            stream.flush()
            self._descriptor = os.dup(_STDERR)
            reading, writing = os.pipe()
            os.dup2(writing, _STDERR)
            os.close(writing)
            self._reader = threading.Thread(target=self._wrap, args=(reading,), daemon=True)
            self._reader.start()
        warnings.showwarning = _warn
        # Plain stream handlers would duplicate our output.
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
            remaining = data.encode()
            try:
                while remaining:
                    remaining = remaining[os.write(self._descriptor, remaining) :]
            except BrokenPipeError:
                self.is_closed = True

    def close(self, last: str) -> None:
        warnings.showwarning, logging.root.handlers[:] = self._show_warning, self._handlers
        logging.root.setLevel(self._level)
        if self._reader is not None:
            self._stream.flush()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _STDERR)  # Closes our end of the pipe; worker processes may still hold theirs.
            os.close(nowhere)
            self._reader.join(_DRAIN_SECONDS)
        self.write(last)
        with self._lock:
            self._stream, self._descriptor = io.StringIO(), None

    def _wrap(self, reading: int) -> None:
        """Convert the content of the pipe to warnings, one per write."""
        while data := os.read(reading, _CHUNK):
            while not data.endswith(b"\n") and len(data) < _CHUNK and (more := os.read(reading, _CHUNK)):
                data += more
            # The last state of a progress bar.
            lines = (text.rpartition("\r")[2].rstrip() for text in data.decode(errors="replace").rstrip().split("\n"))
            if message := "\n".join(lines).strip("\n"):
                self.write(line("warning", message=message, source="stderr"))
        os.close(reading)


_log: _EventLog | None = None


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        event = "error" if record.levelno >= logging.ERROR else "warning"
        emit(event, message=record.getMessage(), source=record.name)


def _warn(message: Warning | str, category: type[Warning], *place: object, **more: object) -> None:
    emit("warning", message=str(message), source=category.__name__)

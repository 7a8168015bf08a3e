"""One step as a process of its own: its memory, its threads and its GPU go back when it ends, and a signal stops it in order.

The process tells its progress as lines of JSON (``--log-json``). It ends when the build ends, however that ends: then its standard
input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "StepProcess", "end_with_build", "read_events"]

# As `pipelines.running.runner` starts its workers: nothing in the current folder hides a module of ours.
_START = (
    f"import sys; sys.path[0] = {str(Path(__file__).resolve().parents[2])!r}; import imagepivot; del sys.path[0]; "
    "from pipelines.plans.processes import end_with_build; end_with_build(); imagepivot.command()"
)
_REFUSED = "OtherDatasetError"


@dataclass(frozen=True)
class Outcome:
    """How a step's process ended.

    Attributes:
        code: its exit code.
        message: what it said about its failure.
        refused: whether it refused a folder because it holds another dataset.
        output: its standard output.
    """

    code: int
    message: str
    refused: bool
    output: bytes


@dataclass
class StepProcess:
    """The process of a step.

    Attributes:
        words: the words of its command line, the command's name first.
        environment: all its variables.
        holding: file descriptors that it inherits.
        tell: gets each event; see `schemas.events`.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    holding: tuple[int, ...] = ()
    tell: Callable[[Mapping[str, Any]], None] = lambda event: None
    _process: subprocess.Popen[bytes] | None = None
    _signals: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> Outcome:
        """Run it to its end; called once, in a thread of its own."""
        with self._lock:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *self.words],
                env=dict(self.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=self.holding,
                start_new_session=True,  # A Ctrl-C reaches the build alone, which passes it on.
            )
            process = self._process
        for number in self._signals:
            self.send(number)
        assert process.stdout is not None
        assert process.stderr is not None
        output: list[bytes] = []
        reader = threading.Thread(target=lambda: output.append(process.stdout.read()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        message, refused = read_events(process.stderr, self.tell)
        code = process.wait()
        reader.join()
        if process.stdin is not None:
            process.stdin.close()
        return Outcome(code, message, refused, b"".join(output))

    def send(self, number: int) -> None:
        """Send a signal to the process, or to what it will be."""
        with self._lock:
            if self._process is None:
                self._signals.append(number)
            else:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)


def read_events(lines: Iterable[bytes], tell: Callable[[Mapping[str, Any]], None]) -> tuple[str, bool]:
    """Read what a command writes to standard error; return the message of its failure, and whether it refused another dataset.

    Args:
        lines: lines of JSON, and of a command that writes none lines for people.
        tell: gets each event but the last.
    """
    message, refused, other = "", False, []
    for line in lines:
        event = _event(line)
        if event is None:
            other.append(line.decode(errors="replace"))
        elif event["event"] == "error":
            message = str(event.get("traceback") or event.get("message") or "")
            refused = event.get("kind") == _REFUSED
        elif event["event"] != "end":
            tell(event)
    return message or "".join(other).strip().removeprefix("Error: "), refused


def end_with_build() -> None:
    """In the process of a step: stop as if by SIGTERM once the build has ended."""

    def wait() -> None:
        while os.read(reading, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    # Standard input itself leads nowhere: what the step starts must not inherit the pipe.
    reading = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    threading.Thread(target=wait, daemon=True, name="build").start()


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None

"""What a command leaves behind: a job on other machines that goes on without it, or a checkpoint; and what it has to put in order.

Who submits such a job, writes such a checkpoint or holds a folder says so here, and who ends the process asks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DetachedError(Exception):
    """This process has done its part, and others make the rest: a job that goes on, a template of one, other tasks of an array.

    Attributes:
        job: runner, id and page of the job, and the command that cancels it; empty for a template.
    """

    def __init__(self, message: str, job: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.job = dict(job or {})


_left: str | None = None
_held = 0


def left() -> str | None:
    """Return what would be left behind, in words; None if nobody has said so."""
    return _left


@contextlib.contextmanager
def leaving(words: str) -> Iterator[None]:
    """Say what would be left behind while the block runs; it stays said where an interrupt ends the block."""
    global _left
    _left = words
    try:
        yield
    except Exception:
        _left = None
        raise
    else:
        _left = None


def say(words: str) -> None:
    """Replace the words for what is left, if a block of `leaving` runs."""
    global _left
    if _left is not None:
        _left = words


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """Say that the end of the block puts something in order, which a signal should wait for."""
    global _held
    _held += 1
    try:
        yield
    finally:
        _held -= 1


def holds() -> bool:
    """Whether something has to be put in order before the process ends."""
    return _held > 0


@dataclass
class DeferredSignal:
    """A signal that asks work to stop at its next safe point.

    Attributes:
        received: number of the signal that this process received; 0 while there is none.
        agreed: number of the signal that all processes of the work stop for.
    """

    received: int = 0
    agreed: int = 0


@contextlib.contextmanager
def defer_signals() -> Iterator[DeferredSignal]:
    """Defer Ctrl-C, SIGTERM and SIGHUP inside the block, which is to end soon after one was received.

    After the block the agreed signal is raised, and does what it would have done: Ctrl-C raises `KeyboardInterrupt`. A second
    signal is not deferred. Signals are left alone where they are ignored, as under nohup, outside the main thread, which alone can
    receive them, and in a worker that does not catch them: its parent ends it with SIGTERM.

    Raises:
        KeyboardInterrupt: a signal was agreed on, and nothing else came of it.
    """
    deferred = DeferredSignal()
    alone = {signal.SIG_IGN, None} if multiprocessing.parent_process() is None else {signal.SIG_IGN, None, signal.SIG_DFL}
    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) not in alone}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        if deferred.received:
            restore()
            signal.raise_signal(number)
        deferred.received = number

    for number in before:
        signal.signal(number, note)
    try:
        yield deferred
    finally:
        restore()
    raised = deferred.agreed or deferred.received
    if raised in before:
        signal.raise_signal(raised)
    if deferred.agreed:
        raise KeyboardInterrupt  # A handler may only take note: nobody should take what was stopped for done.

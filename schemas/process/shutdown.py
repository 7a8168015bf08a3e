"""Shutdown of a process: the notice of what goes on without it, critical sections, and deferred signals.

A command that submits a job, writes a checkpoint or locks a folder registers that here; the handler of signals asks.
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


_notice: str | None = None
_critical_sections = 0


def current_notice() -> str | None:
    """Return what would be left behind, in words; None if nobody has said so."""
    return _notice


@contextlib.contextmanager
def shutdown_notice(words: str) -> Iterator[None]:
    """Say what would be left behind while the block runs; it stays said where an interrupt ends the block."""
    global _notice
    _notice = words
    try:
        yield
    except Exception:
        _notice = None
        raise
    else:
        _notice = None


def set_shutdown_notice(words: str) -> None:
    """Replace the words for what is left, if a block of `shutdown_notice` runs."""
    global _notice
    if _notice is not None:
        _notice = words


@contextlib.contextmanager
def critical_section() -> Iterator[None]:
    """Say that the end of the block puts something in order, which a signal should wait for."""
    global _critical_sections
    _critical_sections += 1
    try:
        yield
    finally:
        _critical_sections -= 1


def in_critical_section() -> bool:
    """Whether something has to be put in order before the process ends."""
    return _critical_sections > 0


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

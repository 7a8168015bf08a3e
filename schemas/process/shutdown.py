"""Shutdown notices and deferred signals.

1. Code that leaves a remote job or a checkpoint behind registers a notice for the user: `shutdown_notice`.
2. Code that stops at safe points defers signals: `defer_signals`.

The notice is global to the process; `pipelines/commands/signals.py` prints it.
"""

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

CLOSED_PIPE = 128 + signal.SIGPIPE
"""Exit code if the reader of the output has ended, e.g. ``head``."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DetachedError(Exception):
    """Work that continues elsewhere: a remote job, a template or other array tasks.

    Attributes:
        job: runner, id and page of the job, and the command to cancel it; empty for a template.

    Examples:
        >>> try:
        ...     imagepivot.extract_features(job, imagepivot.Execution(beam_flags=flags, detach=True))  # doctest: +SKIP
        ... except imagepivot.DetachedError as error:
        ...     print(error.job["id"])
    """

    def __init__(self, message: str, job: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.job = dict(job or {})


_notice: str | None = None


def current_notice() -> str | None:
    """Return the notice for the user at a shutdown now; None without a notice."""
    return _notice


@contextlib.contextmanager
def shutdown_notice(words: str) -> Iterator[None]:
    """Register a notice while the block runs, and after an interrupt."""
    global _notice
    _notice = words
    try:
        yield
    except Exception:
        _notice = None
        raise
    _notice = None


def set_shutdown_notice(words: str) -> None:
    """Replace the notice inside a block of `shutdown_notice`."""
    global _notice
    if _notice is not None:
        _notice = words


@dataclass
class DeferredSignal:
    """A request to stop at the next safe point.

    Attributes:
        received: number of the signal that this process received, or 0.
        agreed: number of the signal that all processes of the work agreed on, or 0.
    """

    received: int = 0
    agreed: int = 0


_deferred: DeferredSignal | None = None


def stop_at_closed_pipe() -> None:
    """Stop, at a safe point or now, since the reader of the output has ended.

    Raises:
        SystemExit: in the main thread outside of `defer_signals`; other threads continue.
    """
    if _deferred is not None:
        _deferred.received = _deferred.received or signal.SIGPIPE
    elif threading.current_thread() is threading.main_thread():
        raise SystemExit(CLOSED_PIPE)


@contextlib.contextmanager
def defer_signals() -> Iterator[DeferredSignal]:
    """Defer Ctrl-C, SIGTERM and SIGHUP inside the block.

    The agreed signal is raised again after the block: Ctrl-C raises `KeyboardInterrupt`. A second signal is
    not deferred. Handlers are not changed for ignored signals (nohup), outside the main thread, and in a
    worker with default handlers, which its parent ends with SIGTERM.

    Raises:
        KeyboardInterrupt: a signal was agreed on, and its handler returned.
        SystemExit: the reader of the output has ended.
    """
    global _deferred
    _deferred = deferred = DeferredSignal()
    alone = {signal.SIG_IGN, None} if multiprocessing.parent_process() is None else {signal.SIG_IGN, None, signal.SIG_DFL}
    signums = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {signum: handler for signum in signums if (handler := signal.getsignal(signum)) not in alone}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def note(signum: int, frame: FrameType | None) -> None:
        if deferred.received:
            restore()
            signal.raise_signal(signum)
        deferred.received = signum

    for signum in before:
        signal.signal(signum, note)
    try:
        yield deferred
    finally:
        _deferred = None
        restore()
    raised = deferred.agreed or deferred.received
    if raised in before:
        signal.raise_signal(raised)
    if raised == signal.SIGPIPE:
        raise SystemExit(CLOSED_PIPE)
    if deferred.agreed:
        raise KeyboardInterrupt  # The handler returned: interrupted work must not count as finished.

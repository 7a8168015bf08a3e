"""Signals, output streams and exit of a command's process.

Ctrl-C, SIGTERM and SIGHUP clean up, print one line about finished work, and exit with 128 plus the signal's
number. A second signal exits immediately, which is as safe as SIGKILL.
"""

import atexit
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from schemas.console import events
from schemas.process import shutdown

_SHARDS = "; finished shards are kept, the same command continues from here"
_KEPT_WORK = {
    **dict.fromkeys(("captions", "vocabulary", "encode", "text-features", "features", "import", "embed"), _SHARDS),
    "reproduce": "; finished runs are kept, the same command continues from here",
    "build": "; finished steps are kept, the same command continues from here",
}

_REPEAT_SECONDS = 0.2

_received: list[int] = []


def stop_signal() -> int:
    """Return the number of the signal that stopped the command; 0 without one."""
    return _received[0] if _received else 0


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does.

    The block covers all between the first import and the end of the process, which exits with 128 plus the signal's number.
    Linux and macOS deliver the signals of a process to its main thread, where they also interrupt the wait for a lock. The
    interrupt is raised again until it is handled: Python only prints it in finalizers, and libraries swallow it at their import.
    """

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        if _received:
            _exit_immediately()
        _received.append(signum)
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_SECONDS, _REPEAT_SECONDS)
        raise KeyboardInterrupt

    def repeat(_signum: int, _frame: FrameType | None) -> None:
        if sys.exception() is None:  # No `except`, `finally` or `with` is cleaning up.
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, repeat)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores SIGHUP.
    for signum in caught:
        signal.signal(signum, interrupt)
    try:
        yield
    except BaseException:
        if _received:
            _exit_immediately()  # Without joining threads that still compute.
        raise
    finally:
        for signum in caught:
            signal.signal(signum, _exit_immediately)


def stopped_line() -> str:
    """Return the last line of a stopped command: its notice, or the kept work."""
    if (notice := shutdown.current_notice()) is not None:
        return notice
    return f"stopped{_KEPT_WORK.get(''.join(sys.argv[1:2]), '')}"


def prepare_streams() -> None:
    """Prepare standard streams for any terminal, pipe or closed descriptor.

    Characters outside the terminal's encoding are written as escapes. A closed stream is opened on the null
    device: otherwise the next opened file would take its descriptor, and receive the output of libraries.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number, which is this one.
            os.set_inheritable(descriptor, True)  # Worker processes inherit it.
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Exit with the block's exit code without freeing every object.

    For the outermost block of a process. Threads and `atexit` functions end first. Freeing takes 0.2 s after
    torch is imported, and a second more after Beam.

    Raises:
        SystemExit: as the block does.
    """

    def leave() -> None:
        flush_streams()
        if codes:
            os._exit(codes[0])

    codes: list[int] = []
    atexit.register(leave)  # The first registered function runs last.
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            codes.append(end.code)
        raise


def flush_streams() -> OSError | None:
    """Flush the output streams; silence a failing stream, and return its error."""
    failed = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            failed = failed or error
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failed


def _exit_immediately(signum: int = 0, _frame: FrameType | None = None) -> NoReturn:
    """Exit immediately; the last line bypasses Python's buffers, which may be in use."""
    code = 128 + (stop_signal() or signum)
    with contextlib.suppress(OSError, SystemExit):
        if events.emit("remark", message=stopped_line()):
            events.finish(code, stopped_line())
        else:
            show_cursor = "\r\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""  # Progress hides it.
            os.write(2, f"{show_cursor}{stopped_line()}\n".encode())
    os._exit(code)

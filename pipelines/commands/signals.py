"""Signals, output streams and exit of a command's process.

Ctrl-C, SIGTERM and SIGHUP clean up, print one line about finished work, and exit with 128 plus the signal's number. A second signal
exits immediately, which is as safe as SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.abc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

from schemas.console import events
from schemas.process import shutdown

_SHARDS = "; finished shards are kept, the same command continues from here"
_KEPT_WORK = {
    **dict.fromkeys(("captions", "vocabulary", "encode", "token-features", "features", "import", "embed"), _SHARDS),
    "reproduce": "; finished runs are kept, the same command continues from here",
    "build": "; finished steps are kept, the same command continues from here",
}

_WAKE_SECONDS = 0.02
_WAKE_ATTEMPTS = 50  # A forked process writes to the same pipe; this process never handles its signals.

_GC_THRESHOLD = 20_000  # Net allocations; Python's default is 700 or 2,000.

_received: list[int] = []


def stop_signal() -> int:
    """Return the number of the signal that stopped the command; 0 without one."""
    return _received[0] if _received else 0


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Handle signals in the block, from the first import to the end of the process.

    The first signal raises `KeyboardInterrupt` in the main thread. During an import, where libraries swallow or disguise it, the
    process exits immediately, or after the import if it is in a critical section.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        _received.append(signum)
        if len(_received) > 1:
            _end()
        interrupt(frame)

    def interrupt(frame: FrameType | None) -> None:
        if not _is_importing(frame):
            raise KeyboardInterrupt
        later()

    def later() -> None:
        if not shutdown.in_critical_section():
            _end()
        waiting.append(True)
        threading.Timer(_WAKE_SECONDS, signal.pthread_kill, (main, signal.SIGURG)).start()

    def wake(_number: int, frame: FrameType | None) -> None:
        if waiting:
            waiting.clear()
            interrupt(frame)

    def report(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # E.g. in a finalizer, where Python only prints it.
            later()
        else:
            sys.__unraisablehook__(unraisable)

    def report_thread(fault: threading.ExceptHookArgs) -> None:
        if not _received:  # After a signal, threads fail as their peers exit.
            threading.__excepthook__(fault)

    waiting: list[bool] = []
    main = threading.get_ident()
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    caught = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores SIGHUP.
    for signum in caught:
        signal.signal(signum, handle)
    signal.signal(signal.SIGURG, wake)  # Ignored signals interrupt no system call.
    _wake_main_thread(main, caught)
    sys.unraisablehook = report
    threading.excepthook = report_thread
    try:
        yield
    except BaseException:
        if _received:
            _end()  # Without joining threads that still compute.
        raise
    finally:
        for signum in caught:
            signal.signal(signum, _end_late)


def _wake_main_thread(main: int, numbers: Sequence[signal.Signals]) -> None:
    """Forward signals that the kernel delivers to other threads to the main thread.

    Python runs handlers in the main thread, and only a signal to that thread interrupts its wait for a lock, e.g. for a worker's
    result. A thread reads each signal from the wake-up pipe and forwards it until it is handled.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        num_signals = 0
        while data := os.read(reading, 1):
            num_signals += data[0] in numbers
            for _ in range(_WAKE_ATTEMPTS):  # The main thread may be about to wait.
                if len(_received) >= num_signals:
                    break
                signal.pthread_kill(main, signal.SIGURG)
                time.sleep(_WAKE_SECONDS)

    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=listen, name="signals", daemon=True).start()


def stopped_line() -> str:
    """Return the last line of a stopped command: its notice, or the kept work."""
    if (notice := shutdown.current_notice()) is not None:
        return notice
    return f"stopped{_KEPT_WORK.get(''.join(sys.argv[1:2]), '')}"


def prepare_streams() -> None:
    """Prepare standard streams for any terminal, pipe or closed descriptor.

    Characters outside the terminal's encoding are written as escapes. A closed stream is opened on the null device: otherwise the
    next opened file would take its descriptor, and receive the output of libraries.
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


def reduce_gc() -> None:
    """Collect cyclic garbage less often: each run visits a million objects of torch."""
    _, *older = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *older)


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Exit with the block's exit code without freeing every object.

    For the outermost block of a process. Threads and `atexit` functions end first. Freeing takes 0.2 s after torch is imported,
    and a second more after Beam.

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


def _is_importing(frame: FrameType | None) -> bool:
    return any(outer.f_code.co_filename.startswith("<frozen importlib") for outer, _ in traceback.walk_stack(frame))


def _end() -> None:
    """Exit immediately; the last line bypasses Python's buffers, which may be in use."""
    code = 128 + _received[0]
    with contextlib.suppress(OSError, SystemExit):
        if events.emit("remark", message=stopped_line()):
            events.finish(code, stopped_line())
            os._exit(code)
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(2, b"\r\x1b[?25h")  # The progress display hides the cursor.
        os.write(2, f"{stopped_line()}\n".encode())
    os._exit(code)


def _end_late(signum: int, _frame: FrameType | None) -> None:
    _received.append(signum)
    _end()


def skip_pandas() -> None:
    """Keep pyarrow from importing pandas with the first array, which takes a second."""
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    sys.meta_path.insert(0, _WithoutPandas())
    pa.array([0])
    del sys.meta_path[0]


class _WithoutPandas(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ImportError(name)

"""The process of a command: its output streams, and the signals that stop it.

Ctrl-C, SIGTERM and SIGHUP stop a command in the same way: what it holds is put in order, one line says what is kept, and the exit
code is 128 plus the number of the signal. A second signal ends it at once. That is safe at any moment, as killing it is.
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
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

from schemas.console import events
from schemas.process import shutdown

BROKEN_PIPE = 141
"""Exit code where the program that reads the output has ended, e.g. ``head``: 128 plus the number of SIGPIPE."""

_SHARDS = "; finished shards are kept, the same command continues from here"
_KEPT = {
    **dict.fromkeys(("captions", "vocabulary", "encode", "token-features", "features", "import", "embed"), _SHARDS),
    "reproduce": "; finished runs are kept, the same command continues from here",
    "build": "; finished steps are kept, the same command continues from here",
}

_WAKE_SECONDS = 0.02
_WAKE_ATTEMPTS = 50  # A forked process writes to the same pipe: a signal of its own is never handled here.

_COLLECT_AFTER = 20_000  # objects made and not gone; Python's own number is 700, or 2,000

_received: list[int] = []


def stop_signal() -> int:
    """Return the number of the signal that asked the command to stop; 0 if there was none."""
    return _received[0] if _received else 0


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let signals stop what the block does, from the first import to the end of the process.

    The first one is raised as `KeyboardInterrupt`, wherever the main thread is. It is not raised while a module is being imported,
    since libraries swallow or disguise an interrupt of their imports: there the process ends at once, or, where something has to be
    put in order, after the import.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        _received.append(number)
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
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # Raised where Python can only print it, e.g. by a finalizer.
            later()
        else:
            sys.__unraisablehook__(unraisable)

    def report_thread(fault: threading.ExceptHookArgs) -> None:
        if not _received:  # Threads that serve others fail when these end.
            threading.__excepthook__(fault)

    waiting: list[bool] = []
    main = threading.get_ident()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # As nohup leaves SIGHUP.
    for number in caught:
        signal.signal(number, handle)
    signal.signal(signal.SIGURG, wake)  # What is ignored interrupts nothing.
    _wake_main_thread(main, caught)
    sys.unraisablehook = report
    threading.excepthook = report_thread
    try:
        yield
    except BaseException:
        if _received:
            _end()  # Without waiting for threads that still compute.
        raise
    finally:
        for number in caught:
            signal.signal(number, _end_late)


def _wake_main_thread(main: int, numbers: Sequence[signal.Signals]) -> None:
    """Let the main thread see a signal at once that the kernel gave to another thread.

    Handlers run in the main thread, which may wait for a lock, e.g. for the result of a worker: the system then interrupts that
    wait only if the signal was the main thread's. A thread hears of every signal, and passes it on until it is handled.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        heard = 0
        while data := os.read(reading, 1):
            heard += data[0] in numbers
            for _ in range(_WAKE_ATTEMPTS):  # The main thread may be on its way into the wait.
                if len(_received) >= heard:
                    break
                signal.pthread_kill(main, signal.SIGURG)
                time.sleep(_WAKE_SECONDS)

    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=listen, name="signals", daemon=True).start()


def stopped_line() -> str:
    """Return the line that says what the command keeps when it is stopped, or what it leaves behind."""
    if (going := shutdown.current_notice()) is not None:
        return going
    return f"stopped{_KEPT.get(''.join(sys.argv[1:2]), '')}"


def prepare_streams() -> None:
    """Make writing to the output streams safe, whatever they lead to.

    Characters that the terminal's encoding lacks are written as escapes. A stream that is closed leads nowhere; otherwise the next
    file that is opened would take its place, and with it whatever libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest number that is free: this one.
            os.set_inheritable(number, True)  # Worker processes have it as well.
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def spare_collections() -> None:
    """Let Python look less often for garbage in cycles.

    Importing torch and Beam makes a million objects that stay. To walk them again and again took 0.6 of the 3.9 s of such an
    import.
    """
    _, *older = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *older)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let the process end with the block's exit code once threads have ended and what is registered with `atexit` has run.

    For the outermost block of a process, with nothing behind it. Python would look for garbage first, and give back the memory of
    every object by itself: 0.2 s after torch was imported, a second more after Beam.

    Raises:
        SystemExit: as the block does.
    """

    def leave() -> None:
        flush_streams()
        if codes:
            os._exit(codes[0])

    codes: list[int] = []
    atexit.register(leave)  # The first that is registered is called last.
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            codes.append(end.code)
        raise


def flush_streams() -> OSError | None:
    """Write out what the output streams still hold; return the error where one cannot be written, and silence that stream."""
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
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end() -> None:
    """End the process now, with the line that says so; it is written past Python's buffers, which may be in use."""
    code = 128 + _received[0]
    with contextlib.suppress(OSError):
        if events.emit("remark", message=stopped_line()):
            events.finish(code, stopped_line())
            os._exit(code)
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(2, b"\r\x1b[?25h")  # A display of progress hides the cursor.
        os.write(2, f"{stopped_line()}\n".encode())
    os._exit(code)


def _end_late(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    _end()


def spare_pandas() -> None:
    """Let pyarrow find no pandas, which it imports with the first list that becomes an array: that takes a second."""
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

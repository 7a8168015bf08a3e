"""A command on a terminal of its own, at which a test types."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.processes import wait_for


@contextmanager
def on_terminal(words: tuple[object, ...], folder: Path | None = None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the command on a terminal of its own, in a folder; yields the process and the terminal's other end."""
    outer, inner = pty.openpty()
    script = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); import imagepivot; imagepivot.command()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
    )
    os.close(inner)
    os.set_blocking(outer, False)
    try:
        yield process, outer
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(outer)


def shown(terminal: int, until: str, seen: str = "", seconds: float = 120.0) -> str:
    """Read what a terminal shows until a text appears; fail when that takes longer than ``seconds``."""

    def found() -> bool:
        nonlocal seen
        with suppress(BlockingIOError, OSError):
            seen += os.read(terminal, 1 << 16).decode(errors="replace")  # a read may end within a character
        return until in seen

    wait_for(found, seconds)
    return seen

"""Output of ``torchrun`` processes: ranks except 0 report only their own errors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from schemas.console import events

_PATIENCE = 10.0  # Seconds in which torchrun ends this process after the error of another.
_STDOUT, _STDERR = 1, 2


class RankOutput:
    """Output of this process."""

    def __init__(self) -> None:
        # Other launchers set RANK and WORLD_SIZE for independent processes.
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._rank, self._size = (int(os.environ[name]) if is_torchrun else 0 for name in ("RANK", "WORLD_SIZE"))
        self._stderr: int | None = None

    def silence(self) -> None:
        """Discard all output of this process, also of libraries, unless it is rank 0."""
        if self._rank == 0:
            return
        self._stderr = os.dup(_STDERR)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (_STDOUT, _STDERR):
            os.dup2(null, stream)
        os.close(null)

    def report_once(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that only one process reports an error.

        ``torchrun`` ends all processes after the first error. An error that rank 0 may share, or that another process caused,
        waits some seconds for this end before it is raised.
        """

        def reporting(*arguments: Any, **options: Any) -> Any:
            try:
                return work(*arguments, **options)
            except Exception as error:
                patience = _PATIENCE if self._rank else 0
                # An error that another process caused. That process waits before it ends.
                if isinstance(error, RuntimeError) and (type(error).__name__.startswith("Dist") or "gloo" in str(error)):
                    patience = 3 * _PATIENCE
                if patience:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    time.sleep(patience)
                self._restore(error)
                raise

        return reporting if self._size > 1 else work

    def _restore(self, error: Exception) -> None:
        """Restore standard error, or write the error as an event."""
        if self._stderr is None:
            return
        if events.started():
            os.write(self._stderr, (events.line("error", message=str(error), kind=type(error).__name__) + "\n").encode())
            return
        sys.stderr.flush()
        os.dup2(self._stderr, _STDERR)

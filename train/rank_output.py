"""Output of the processes that ``torchrun`` starts: rank 0 writes; the others only where an error is theirs alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from schemas.console import events

_PATIENCE = 10.0  # Seconds in which torchrun ends this process, if another one has an error that explains this one's.
_STDOUT, _STDERR = 1, 2


class RankOutput:
    """The output of this process, one of several or alone."""

    def __init__(self) -> None:
        # Others set such numbers, too, for processes that have nothing to do with each other.
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._rank, self._size = (int(os.environ[name]) if is_torchrun else 0 for name in ("RANK", "WORLD_SIZE"))
        self._stderr: int | None = None

    def silence(self) -> None:
        """Write nothing from here on, unless this is rank 0; not even what libraries print."""
        if self._rank == 0:
            return
        self._stderr = os.dup(_STDERR)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (_STDOUT, _STDERR):
            os.dup2(null, stream)
        os.close(null)

    def report_once(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose errors are reported by one process.

        ``torchrun`` ends all processes once one of them has ended with an error. So an error that rank 0 has as well, or that only
        says that another process does not answer, waits some seconds for this end before it is written.
        """

        def reporting(*arguments: Any, **options: Any) -> Any:
            try:
                return work(*arguments, **options)
            except Exception as error:
                patience = _PATIENCE if self._rank else 0
                if _is_consequence(error):
                    patience = 3 * _PATIENCE  # The process with the cause waits, too, before it ends.
                if patience:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    time.sleep(patience)
                self._restore(error)
                raise

        return reporting if self._size > 1 else work

    def _restore(self, error: Exception) -> None:
        """Write again, as an event or as the caller does."""
        if self._stderr is None:
            return
        if events.started():
            os.write(self._stderr, (events.line("error", message=str(error), kind=type(error).__name__) + "\n").encode())
            return
        sys.stderr.flush()
        os.dup2(self._stderr, _STDERR)


def _is_consequence(error: Exception) -> bool:
    """Return whether an error only says that another process does not answer any more."""
    return isinstance(error, RuntimeError) and (type(error).__name__.startswith("Dist") or "gloo" in str(error))

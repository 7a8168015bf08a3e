"""Output of the processes that ``torchrun`` starts: rank 0 writes; the others only where an error is theirs alone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from schemas.console import events
from schemas.errors import ImagepivotError, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store


_PATIENCE = 10.0  # Seconds in which the first process comes to an error that all have.
_POLL_SECONDS = 0.05
_STDOUT, _STDERR = 1, 2


class RankOutput:
    """The voice of this process.

    Attributes:
        rank: index of this process.
        size: number of processes.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        # Others set such numbers, too, for processes that have nothing to do with each other.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._speech: int | None = None

    def silence(self) -> None:
        """Say nothing from here on, unless this is the first process; not even what libraries print."""
        if self.rank == 0 or self.size == 1:
            return
        self._speech = os.dup(_STDERR)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (_STDOUT, _STDERR):
            os.dup2(nowhere, stream)
        os.close(nowhere)

    def report_once(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose errors are heard once.

        An error that the first process has as well ends this one quietly, with the same exit code, and so does the error of a
        process that another one left alone in the midst of their work. Others wait a few seconds before they are heard.
        """

        def speaking(*arguments: Any, **options: Any) -> Any:
            try:
                return work(*arguments, **options)
            except Exception as error:
                if not self._is_heard(error):
                    raise SystemExit(_exit_code(error)) from None
                self._raise(error)
                raise

        return work if self.size == 1 else speaking

    def _is_heard(self, error: Exception) -> bool:
        """Tell the others of an error, and return whether it is for this process to say."""
        with contextlib.suppress(ValueError):  # Outside the main thread.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # As torchrun sends it where another process has ended.
        try:
            store = _store()
            if store is None:
                return True
            follows = _follows(error)
            words = f"{type(error).__name__}: {error}"
            store.set(_key(self.rank), f"{follows:d}{words}")
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline and (follows or self.rank):
                said = {rank: store.get(_key(rank)).decode() for rank in range(self.size) if store.check([_key(rank)])}
                if follows and any(text[0] == "0" for text in said.values()):
                    return False
                if self.rank and 0 in said:
                    return not follows and said[0][1:] != words
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # Who keeps the store has ended, after an error of another process.
            return self.rank == 0
        return True

    def _raise(self, error: Exception) -> None:
        """Speak again."""
        if self._speech is None:
            return
        if events.started():
            os.write(self._speech, (events.line("error", message=str(error), kind=type(error).__name__) + "\n").encode())
            return
        sys.stderr.flush()
        os.dup2(self._speech, _STDERR)


def _store() -> Store | None:
    """Return the store that ``torchrun`` keeps for its processes; None where something else started them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_PATIENCE))


def _follows(error: Exception) -> bool:
    """Whether an error only says that another process does not answer any more."""
    return isinstance(error, RuntimeError) and (type(error).__name__.startswith("Dist") or "gloo" in str(error))


def _key(rank: int) -> str:
    return f"imagepivot/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _exit_code(error: Exception) -> int:
    if isinstance(error, ImagepivotError):
        return 2 if isinstance(error, UsageError) else 1
    return int(getattr(error, "exit_code", 1))  # That of an error of typer's.

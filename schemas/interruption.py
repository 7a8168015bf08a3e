"""What a command leaves behind: a job on other machines that goes on without it, or a checkpoint; and what it has to put in order.

Who submits such a job, writes such a checkpoint or holds a folder says so here, and who ends the process asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping


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

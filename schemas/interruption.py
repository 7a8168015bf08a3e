"""What a command leaves behind: a job on other machines that goes on without it, or a checkpoint.

Who submits such a job or writes such a checkpoint says so here, and who ends the process asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["DetachedError", "Left", "leaving", "left", "say"]


class DetachedError(Exception):
    """The launcher has done its part, and what it leaves makes the dataset: a job that goes on, or a template of one.

    Attributes:
        job: runner, id and page of the job; empty for a template.
    """

    def __init__(self, message: str, job: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.job = dict(job or {})


@dataclass
class Left:
    """What is there, or goes on, when a signal ends this process.

    Attributes:
        words: what to tell the user; true at any moment.
        cancel: ends what goes on, and returns what to tell the user then; None if nothing goes on.
        lasting: whether it can be left alone: it can be found again later.
    """

    words: str
    cancel: Callable[[], str] | None = None
    lasting: bool = True


_left: Left | None = None


def left() -> Left | None:
    """Return what would be left behind; None if nobody has said so."""
    return _left


@contextlib.contextmanager
def leaving(what: Left) -> Iterator[None]:
    """Say what would be left behind while the block runs; it stays said where an interrupt ends the block."""
    global _left
    _left = what
    try:
        yield
    except Exception:
        _left = None
        raise
    else:
        _left = None


def say(words: str) -> None:
    """Replace the words for what is left."""
    if _left is not None:
        _left.words = words

"""Runs of ``imagepivot reproduce`` that failed: why, and the file that says so beside the place of the result.

Such a file is for people and for the next command, which tries the run again; it is no result, and has no digest.
"""

from __future__ import annotations

import errno
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from schemas.errors import ImagepivotError
from schemas.escapes import to_json
from schemas.storage.folder import Folder
from train.jobs import DivergedError

T = TypeVar("T")

FAILURE_KINDS = {
    "diverged": "a loss, gradient or weight is no longer finite",
    "memory": "memory ran out, that of the machine or of the GPU",
    "killed": "the process of the run was killed, or crashed",
    "disk": "the disk is full, or its quota used up",
    "refused": "the message says what is wrong, and what to do",
    "fault": "nobody expected this error; its traceback is kept in the folder of the run",
}
"""The closed list of kinds of failures, with their meanings."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed", "unable to find an engine")
NO_MEMORY_ADVICE = "give fewer --workers, a smaller schedule.batch_size, or --memory-map FOLDER"
_WIDTH = 200


@dataclass(frozen=True)
class Failure:
    """Why a run has no result.

    Attributes:
        kind: one of `FAILURE_KINDS`.
        reason: what happened and what to do, in one line.
        traceback: where it happened; empty where nothing is left of the process.
    """

    kind: str
    reason: str
    traceback: str = ""


def attempt(work: Callable[[T, str], object], task: T, device: str) -> Failure | None:
    """Work on a task, and return why it failed; None if it did not."""
    try:
        work(task, device)
    except Exception as error:  # noqa: BLE001 -- one bad run must not end the others
        return failure_of(error)
    return None


def failure_of(error: Exception) -> Failure:
    """Say in a line, and by kind, why an error ended a run."""
    kind, reason = _described(error)
    return Failure(kind, _one_line(reason), "".join(traceback.format_exception(error)))


def _described(error: Exception) -> tuple[str, str]:
    causes = list(_causes(error))
    if isinstance(error, DivergedError):
        return "diverged", str(error)
    if (full := next((cause for cause in causes if _is_of_disk(cause)), None)) is not None:
        return "disk", str(error) if isinstance(error, ImagepivotError) else f"the disk is full: free some space ({full})"
    if (memory := next((cause for cause in causes if _is_of_memory(cause)), None)) is not None:
        detail = shorten(str(memory), _WIDTH, placeholder=" ...")
        return "memory", f"memory ran out{f' ({detail})' if detail else ''}: {NO_MEMORY_ADVICE}"
    if isinstance(error, ImagepivotError):
        return "refused", str(error)
    return "fault", shorten(f"{type(error).__name__}: {error}", _WIDTH, placeholder=" ...")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def _is_of_memory(error: BaseException) -> bool:
    # Torch has a class of its own for a GPU's memory, and for that of the machine only the words.
    words = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)
    return words or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def write_failure(path: Path, failure: Failure, context: Mapping[str, Any]) -> None:
    """Write why a run failed.

    Args:
        path: the file.
        failure: the failure; its traceback is not part of the file.
        context: what else to say, e.g. the configuration.
    """
    content = {"kind": failure.kind, "reason": failure.reason, **context}
    Folder(str(path.parent)).write(path.name, (to_json(content, indent=2) + "\n").encode())


def read_failure(path: Path) -> tuple[Failure, dict[str, Any]] | None:
    """Read why a run failed, and the context; None if there is no such file. One that is damaged says only that."""
    try:
        content = json.loads(path.read_bytes())
        kind, reason = content.pop("kind"), content.pop("reason")
        if kind not in FAILURE_KINDS or not isinstance(reason, str):
            raise ValueError(kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Failure("refused", f"{str(path)!r} is damaged: the next command replaces it"), {}
    return Failure(kind, _one_line(reason)), content

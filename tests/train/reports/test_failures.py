from __future__ import annotations

import errno
import json

import numpy as np
import pytest
import torch

from schemas.errors import DatasetError, UsageError
from schemas.storage.storage_errors import storage_errors
from train.jobs import DivergedError
from train.reports.failures import FAILURE_KINDS, Failure, attempt, failure_of, read_failure, write_failure


def raised(do) -> Exception:
    try:
        do()
    except Exception as error:  # noqa: BLE001 -- whatever it is
        return error
    raise AssertionError("nothing was raised")


def full() -> None:
    with storage_errors("/a/b.pt"):
        raise OSError(errno.ENOSPC, "No space left on device")


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("do", "kind", "words"),
    [
        (lambda: torch.empty(1 << 60), "memory", "DefaultCPUAllocator: can't allocate memory"),
        (
            lambda: np.zeros((1 << 25, 1 << 25)),
            "memory",
            "give fewer --workers, a smaller schedule.batch_size, or --memory-map",
        ),
        (lambda: fail(MemoryError()), "memory", "memory ran out: give fewer --workers"),
        (
            lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")),
            "memory",
            "(CUDA out of memory.",
        ),
        (lambda: fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x")), "memory", "CUBLAS"),
        (
            lambda: fail(RuntimeError("GET was unable to find an engine to execute this computation")),
            "memory",
            "find an engine",
        ),
        (lambda: fail(OSError(errno.ENOMEM, "Cannot allocate memory")), "memory", "Cannot allocate memory"),
        (full, "disk", "cannot use '/a/b.pt': the disk is full: free some space"),
        (lambda: fail(OSError(errno.EDQUOT, "quota")), "disk", "the disk is full: free some space"),
        (lambda: fail(DivergedError("the loss is nan")), "diverged", "the loss is nan"),
        (lambda: fail(UsageError("give\nanother")), "refused", "give another"),
        (lambda: fail(DatasetError("no")), "refused", "no"),
        (lambda: fail(OSError(errno.EIO, "I/O error")), "fault", "OSError: [Errno 5] I/O error"),
        (lambda: fail(RuntimeError("CUDA error: device-side assert triggered")), "fault", "RuntimeError: CUDA error"),
        (lambda: fail(ValueError("x" * 1000)), "fault", "ValueError: ..."),
    ],
)
def test_every_error_has_a_kind_and_a_line(do, kind, words):
    error = raised(do)
    failure = failure_of(error)
    assert failure.kind == kind
    assert words in failure.reason
    assert "\n" not in failure.reason
    assert len(failure.reason) < 400
    assert failure.traceback.startswith("Traceback")
    assert type(error).__name__ in failure.traceback
    assert kind in FAILURE_KINDS


def test_an_attempt_passes_interrupts_on():
    def interrupt(task, device):
        raise KeyboardInterrupt("stop")

    assert attempt(lambda task, device: None, 1, "cpu") is None
    assert attempt(lambda task, device: fail(ValueError(device)), 1, "cpu").reason == "ValueError: cpu"
    with pytest.raises(KeyboardInterrupt, match="stop"):
        attempt(interrupt, 1, "cpu")


def test_a_failure_is_written_and_read(tmp_path):
    path = tmp_path / "row" / "failed-seed-0.json"
    assert read_failure(path) is None
    write_failure(path, Failure("killed", "gone", "trace"), {"seed": 0})
    assert json.loads(path.read_text()) == {"kind": "killed", "reason": "gone", "seed": 0}
    assert read_failure(path) == (Failure("killed", "gone"), {"seed": 0})


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"kind": "bored", "reason": "x"}', '{"kind": "killed"}', "[" * 100_000, "\xff"]
)
def test_a_damaged_failure_is_still_a_failure(tmp_path, text):
    path = tmp_path / "failed-seed-0.json"
    path.write_bytes(text.encode("latin-1"))
    failure, context = read_failure(path)
    assert (failure.kind, context) == ("refused", {})
    assert "is damaged: the next command replaces it" in failure.reason

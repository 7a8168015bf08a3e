"""A run on other machines: what the launcher does until it ends.

The runner's own messages go to a file in the system's temporary folder, which is kept, and named, if the run fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

from schemas.errors import ImagepivotError
from schemas.interruption import DetachedError

__all__ = ["WORKER_LOST", "check_job_service", "runner_log", "wait"]

WORKER_LOST = "Channel closed prematurely"
"""What Beam's own runner says where a worker process is gone."""

_LOST = (WORKER_LOST, "SDK worker disconnected")  # The other one is what Prism says.
_JAVA_FRAME = re.compile(r"\s*(at |\.\.\. \d+ more|Driver stacktrace:)")  # What stands below the errors in traces of Java.
_ANSWER_SECONDS = 60
_LONGEST_RUN_SECONDS = 365 * 24 * 3600
_POLL_SECONDS = 1.0
_LONGEST_LINE = 500


def check_job_service(options: PipelineOptions, flags: tuple[str, ...]) -> None:
    """Wait until the job service answers, if the flags name one.

    Beam's ``--job_server_timeout`` limits how long to wait. Beam would also end a whole run after that time, where the job service
    calls a job by one name before and after its start, as Beam's own does: for the run itself it is set to a year.

    Raises:
        ImagepivotError: it does not answer in time.
    """
    portable = options.view_as(PortableOptions)
    is_given = any(flag.replace("-", "_").startswith("__job_server_timeout") for flag in flags)
    seconds = portable.job_server_timeout if is_given else _ANSWER_SECONDS
    portable.job_server_timeout = _LONGEST_RUN_SECONDS
    endpoint = portable.job_endpoint
    if not endpoint or endpoint == "embed":
        return
    with grpc.insecure_channel(endpoint) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            raise ImagepivotError(
                f"the job service {endpoint!r} does not answer within {seconds} seconds: check that it runs, and the address in "
                "--job_endpoint; --job_server_timeout=SECONDS waits longer"
            ) from None


def wait(result: Any, *, has_started: Callable[[], bool], seconds: float, cancel: Callable[[], str]) -> None:
    """Wait until a run ends.

    Args:
        result: of Beam's ``Pipeline.run``.
        has_started: tells whether a worker has done something.
        seconds: time in which one must have.
        cancel: cancels the run, and returns what became of it in words.

    Raises:
        TimeoutError: none has; the run was cancelled, as far as the runner does so.
        Exception: the run failed.
    """
    failures: list[BaseException] = []

    def finish() -> None:
        try:
            result.wait_until_finish()
        except BaseException as error:  # noqa: BLE001 -- raised below
            failures.append(error)

    # In a thread of its own: Beam waits for workers that died at their start, and for runs that it was told to cancel.
    thread = threading.Thread(target=finish, name="wait-for-run", daemon=True)
    thread.start()
    until, started = time.monotonic() + seconds, False
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        started = started or has_started()
        if not started and thread.is_alive() and time.monotonic() > until:
            raise TimeoutError(
                f"no worker has started within {seconds:.0f} seconds. A worker that ends at its start, or reaches neither the job "
                f"service nor OUTPUT, says so in its own log only; --start-timeout SECONDS waits longer. {cancel()}"
            )
    if failures:
        raise failures[0]


@contextlib.contextmanager
def runner_log(runner: str) -> Iterator[None]:
    """Write what the runner says to a file, and turn its errors into one that names the file.

    Raises:
        ImagepivotError: the run failed; one of ours is raised as it is.
    """
    handle, name = tempfile.mkstemp(prefix="imagepivot-run-", suffix=".log")
    os.close(handle)
    root = logging.getLogger()
    file = logging.FileHandler(name, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = root.level

    def is_for_people(record: logging.LogRecord) -> bool:
        is_runners = record.name == "root" or record.name.startswith("apache_beam")
        return record.levelno >= level and not (is_runners and record.levelno >= logging.ERROR)

    others = list(root.handlers)
    for other in others:
        other.addFilter(is_for_people)
    root.addHandler(file)
    root.setLevel(min(level, logging.INFO))
    failed = False
    try:
        yield
    except (ImagepivotError, DetachedError):
        raise
    except Exception as error:
        failed = True
        with Path(name).open("a", encoding="utf-8") as trace:
            trace.write(traceback.format_exc())
        raise ImagepivotError(
            f"{runner} did not finish the run: {_last_line(error)}. Its log is in {name!r}; finished shards are kept, and the same "
            "command goes on from them"
        ) from error
    finally:
        root.setLevel(level)
        root.removeHandler(file)
        for other in others:
            other.removeFilter(is_for_people)
        file.close()
        if not failed:
            Path(name).unlink(missing_ok=True)


def _last_line(error: Exception) -> str:
    """Return the line of an error that says what went wrong: a trace from a worker ends with it."""
    text = str(error.details()) if isinstance(error, grpc.Call) else str(error)
    if any(words in text for words in _LOST):
        return "a worker process ended unexpectedly, because it was killed or ran out of memory"
    lines = [line.strip().rstrip(".") for line in text.splitlines() if line.strip() and not _JAVA_FRAME.match(line)]
    line = (lines[-1] if lines else type(error).__name__)[:_LONGEST_LINE]
    return f"{line} (the workers' environment lacks it)" if "No module named" in line else line

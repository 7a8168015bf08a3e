"""What a worker on another machine can do: a job of one step, the check with which every run begins, which tells what it finds."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions

from pipelines.doctor.findings import Finding, attempt, first_line
from pipelines.running.execution import Execution
from pipelines.running.first_worker import SIGN, Begin, FirstWorker
from pipelines.running.remote import wait
from pipelines.running.runner import run_pipeline
from schemas.errors import DatasetError, ImagepivotError, UsageError
from schemas.interruption import Left, leaving
from schemas.locations import absolute_location
from schemas.storage import TEMPORARY_MARK, Folder

__all__ = ["check_cluster"]

_GROUP = "worker"
_REPORT = "worker.json"


@dataclass(frozen=True)
class _Report:
    """Writes what a worker finds; called by the worker."""

    folder: Folder
    examine: Callable[[], Iterator[Finding]]

    def __call__(self) -> None:
        found = [finding.to_json() for finding in attempt(_GROUP, "check", self.examine)]
        self.folder.write(_REPORT, json.dumps(found).encode())


def check_cluster(
    execution: Execution, location: str, examine: Callable[[], Iterator[Finding]], extras: tuple[str, ...] = ("pipelines",)
) -> Iterator[Finding]:
    """Let a runner start a worker, and find out what that can do.

    Args:
        execution: the runner, and how to reach it.
        location: a folder that the workers can write to; what they write is deleted again.
        examine: the checks that a worker makes; can be pickled.
        extras: names of the extras that the workers need.

    Raises:
        ImagepivotError: the runner cannot be reached, no worker starts, or it is not as this machine.
    """
    if execution.options.view_as(GoogleCloudOptions).template_location:
        raise UsageError("a template starts no worker that could be asked: leave out --template_location")
    execution.check_locations([("LOCATION", location)])
    folder = Folder(f"{absolute_location(location).rstrip('/')}/.doctor{TEMPORARY_MARK}{uuid.uuid4().int >> 64}")
    made = _missing(folder)
    hints = execution.accelerator.hints() if execution.accelerator is not None else None

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | "Check" >> Begin([], FirstWorker.of_launcher(folder, _Report(folder, examine)), hints)

    try:
        run_pipeline(build, execution, extras=extras, watch=None if execution.runs_here else _watch(execution, folder))
        found = _read(folder)
    finally:
        _clear(folder, made)
    words = f"{execution.runner} started a worker, which has this version and code"
    yield Finding(_GROUP, "runner", "ok", words, values={"runner": execution.runner})
    yield from found


def _watch(execution: Execution, folder: Folder) -> Callable[[Any], None]:
    """Return what waits for the job, and cancels it where nobody waits any longer: it would do nothing else."""

    def watch(result: Any) -> None:
        def cancel() -> str:
            try:
                result.cancel()
            except Exception as error:  # noqa: BLE001 -- any runner's
                return f"{execution.runner} did not cancel the job that checks it ({first_line(error)}): it ends by itself"
            return f"asked {execution.runner} to cancel the job that checks it"

        def has_started() -> bool:
            with suppress(DatasetError):  # A store that does not answer now may do so in a moment.
                return folder.size(SIGN) is not None
            return False

        words = f"stopped, and a job of {execution.runner} goes on that checks a worker, and then ends"
        with leaving(Left(words, cancel, lasting=False)):
            wait(result, has_started=has_started, seconds=execution.start_timeout, cancel=cancel)

    return watch


def _read(folder: Folder) -> list[Finding]:
    try:
        rows = json.loads(folder.read(_REPORT))
    except FileNotFoundError:
        raise DatasetError(
            f"the job has ended, and nothing that its worker wrote to {folder.location!r} can be read here: check that all "
            "machines see the same folder"
        ) from None
    return [Finding(**{**row, "group": f"{_GROUP}: {row['group']}"}) for row in rows]


def _missing(folder: Folder) -> list[Any]:
    """Return the local folders that the check makes, the deepest first."""
    if not folder.is_local:
        return []
    path = folder.local_path
    return [parent for parent in (path, *path.parents) if not parent.exists()]


def _clear(folder: Folder, made: list[Any]) -> None:
    with suppress(ImagepivotError):  # What counts is what was found.
        for name in folder.names():
            folder.delete(name)
    for path in made:
        with suppress(OSError):  # Only empty folders can be removed.
            path.rmdir()

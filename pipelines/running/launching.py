"""The launcher's part in the life of a job on other machines: submit it or find the one that is at work, wait, leave, cancel.

The file beside the output, see `schemas.remote_jobs`, is what launchers know of each other. It is made before the job is submitted,
so that of two launchers one wins. A launcher that is stopped leaves the job, and the next one with the same work waits for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions, PortableOptions, StandardOptions

from pipelines.running.dataflow_service import DataflowService
from pipelines.running.execution import Execution
from pipelines.running.first_worker import SIGN
from pipelines.running.portable_service import PortableService
from pipelines.running.progress import Meter
from pipelines.running.remote import wait
from pipelines.running.runner import follow
from pipelines.running.services import Service, SilentError, counts_of, has_ended
from schemas.errors import DatasetError, ImagepivotError, UsageError
from schemas.fingerprints import sha256_of_json
from schemas.interruption import DetachedError, Left, leaving, say
from schemas.output import Output
from schemas.remote_jobs import JOB_NAME, RemoteJob
from schemas.storage import Folder
from schemas.survey import Update

__all__ = ["Launch", "cancel_job", "service_of", "work_of"]

_CANCEL_SECONDS = 60.0
_ASK_SECONDS = 2.0
_KEPT = "finished shards are kept, the same command continues from here"


def service_of(options: PipelineOptions) -> Service | None:
    """Return the service that Beam's options lead to; None where another process could not ask it, or nothing can be asked."""
    runner = (options.view_as(StandardOptions).runner or "").rpartition(".")[2]
    if runner.lower().removesuffix("runner") == "dataflow":
        return DataflowService(options)
    endpoint = options.view_as(PortableOptions).job_endpoint
    if not endpoint or endpoint == "embed":
        return None
    return PortableService(endpoint, options.view_as(FlinkRunnerOptions).flink_master)


def work_of(output: Output, *, update: Update | None, retry_failed: bool) -> str:
    """Return the fingerprint of what a job makes: the dataset, from which state of its inputs, and of what a shard is made anew."""
    return sha256_of_json(
        {
            "dataset": output.identity.fingerprint,
            "listings": output.listings,
            "update": None if update is None else asdict(update),
            "retry_failed": retry_failed,
        }
    )


class Launch:
    """One launcher of a job.

    Args:
        output: what the job writes.
        execution: where it runs.
        meter: shows what the workers count.
        work: fingerprint of the work, as `work_of` returns it.

    Attributes:
        job: the job; it has an id once the runner has accepted it.
        goes_on: whether the job is, or may be, at work.

    Raises:
        UsageError: the job is to go on without the launcher, and the runner cannot be asked about it later.
    """

    def __init__(self, output: Output, execution: Execution, meter: Meter, *, work: str) -> None:
        self._folder = output.folder
        self._execution = execution
        self._meter = meter
        self._service = service_of(execution.options)
        if execution.detach and self._service is None:
            raise UsageError(
                f"--detach: a job of {execution.runner} could not be found again, because no job service outlives this command. "
                "Name one with --job_endpoint behind --, or leave out --detach"
            )
        flags = () if self._service is None else (f"--runner={execution.runner}", *self._service.flags)
        self.job = RemoteJob.of_launcher(execution.runner, flags, work)
        self.goes_on = False
        self._result: Any = None  # Beam's.
        meter.report({})

    def join(self, *, overwrite: bool) -> bool:
        """Wait for the job that another launcher has submitted for the same work, if one is at work.

        Args:
            overwrite: whether this launcher would start anew.

        Returns:
            Whether there was one, and it has written the dataset. If there was one that has ended, its file is gone.

        Raises:
            DatasetError: a job for other work is there, or nobody can say whether one is.
            DetachedError: this launcher is not to wait.
        """
        found = RemoteJob.read(self._folder)
        if found is None:
            return False
        if found.lost_launcher or has_ended(self._state_of(found)):
            _clear(found, self._folder)
            return False
        if overwrite or found.work != self.job.work:
            other = "this command would start anew (--overwrite)" if found.work == self.job.work else "this is other work"
            raise DatasetError(
                f"{self._folder.location!r} is being written by {found.words}, {found.origin}, and {other}: nothing was written. "
                f"Wait for it to end, choose another folder, or end it with imagepivot cancel {self._folder.location}"
            )
        self.job = found
        if self._execution.detach:
            raise self._detached()
        self._execution.note(f"{found.words} is at work on this, {found.origin}: waiting for it")
        assert self._service is not None
        self._result = self._service.result(found.id)
        try:
            follow(lambda: self._wait(lambda: True), self._execution)
        finally:
            self.close()
        return True

    def claim(self) -> None:
        """Keep other launchers out.

        Raises:
            DatasetError: another one was faster.
        """
        if not self.job.claim(self._folder):
            raise DatasetError(
                f"{self._folder.location!r} is being written by another command, which has just submitted a job: nothing was "
                "written. Give this command again to wait for that job"
            )

    def watch(self, result: Any) -> None:
        """Note the job that the runner has accepted, and wait until it ends.

        Args:
            result: of Beam's ``Pipeline.run``.

        Raises:
            Exception: the job failed.
            DetachedError: this launcher is not to wait.
        """
        self._result, self.goes_on = result, True
        job_id = _id_of(result)
        page = self._service.page(job_id) if self._service is not None else ""
        try:
            self.job = self.job.accepted(self._folder, job_id, page)
        except ImagepivotError as error:  # Nobody could find the job again.
            self.job = replace(self.job, id=job_id)
            raise type(error)(f"{error}. {self.cancel()}") from error
        if self._execution.detach:
            raise self._detached()
        if job_id:
            self._execution.note(f"submitted: {self.job.words}{f', {self.job.page}' if self.job.page else ''}")
        self._wait(self._has_started)

    def close(self) -> None:
        """Delete what tells of the job, unless it goes on."""
        if not self.goes_on:
            _clear(self.job, self._folder)

    def cancel(self) -> str:
        """Ask the runner to end the job, wait until it says so, and return what became of it, in words."""
        say(f"asked {self.job.runner} to cancel {self.job.name}, which it has not confirmed: it may go on")
        try:
            if self._service is None:
                self._result.cancel()
            else:
                self._service.cancel(self.job.id)
        except SilentError as error:
            return f"{self.job.runner} did not cancel {self.job.name} ({error}): it may go on"
        except Exception as error:  # noqa: BLE001 -- any runner's
            return f"{self.job.runner} did not cancel {self.job.name} ({_first_line(error)}): it may go on"
        words = _confirmed(self._state, self.job)
        if words is None:
            return (
                f"asked {self.job.runner} to cancel {self.job.name}, which it has not confirmed within {_CANCEL_SECONDS:.0f} "
                "seconds: it may go on, and the same command waits for it"
            )
        self.goes_on = False
        _clear(self.job, self._folder)
        return words

    def _wait(self, has_started: Callable[[], bool]) -> None:
        self.goes_on = True
        left = Left(self._words(), self.cancel, lasting=self._service is not None)
        with leaving(left), self._counting():
            try:
                wait(self._result, has_started=has_started, seconds=self._execution.start_timeout, cancel=self.cancel)
            except Exception as error:
                self.goes_on = self.goes_on and not self._is_over()
                if not self.goes_on or isinstance(error, TimeoutError):
                    raise
                raise ImagepivotError(
                    f"lost {self.job.words} ({_first_line(error)}): it may go on; the same command waits for it again"
                ) from error
            self.goes_on = False

    def _words(self) -> str:
        if self._service is None:
            return f"stopped waiting for a job of {self.job.runner}, which may go on: look at that runner"
        return (
            f"stopped waiting, and {self.job.words} goes on: the same command waits for it again, "
            f"imagepivot cancel {self._folder.location} ends it"
        )

    def _detached(self) -> DetachedError:
        page = f" See {self.job.page}" if self.job.page else ""
        return DetachedError(
            f"{self.job.words} is at work, and goes on without this command: given again without --detach it waits for the job, "
            f"imagepivot cancel {self._folder.location} ends it.{page}",
            {"runner": self.job.runner, "id": self.job.id, "page": self.job.page},
        )

    def _state(self) -> str | None:
        return self._result.state if self._service is None else self._service.state(self.job.id)

    def _is_over(self) -> bool:
        """Whether the runner says that the job has ended; where nobody can be asked later, its result has said so."""
        if self._service is None:
            return True
        with contextlib.suppress(SilentError):
            return has_ended(self._state())
        return False

    def _has_started(self) -> bool:
        with contextlib.suppress(DatasetError):  # A store that does not answer now may do so in a moment.
            return self._folder.size(SIGN) is not None
        return False

    def _state_of(self, found: RemoteJob) -> str | None:
        """Ask about the job of another launcher.

        Raises:
            DatasetError: nobody can say what it is doing; the message says what to do.
        """
        location, file = self._folder.location, self._folder.path_of(JOB_NAME)
        start = f"{location!r} is being written by {found.words}, {found.origin}"
        if not found.id and found.flags:
            raise DatasetError(
                f"{start}, whose command has not said yet that the runner accepted it: nothing was written. Give this command "
                f"again in a moment; if that command has ended, delete {file!r}"
            )
        if self._service is None or not found.flags:
            raise DatasetError(
                f"{start}, and {found.runner} cannot be asked whether it has ended: nothing was written. Look at that runner, and "
                f"delete {file!r} if it has"
            )
        try:
            state = self._service.state(found.id)
        except SilentError as error:
            raise DatasetError(
                f"{start}, and {self._service.name} did not say whether it has ended ({error}): nothing was written. Check the "
                f"flags behind -- and your credentials; if you know that it has ended, delete {file!r}"
            ) from error
        if state is None and set(found.flags[1:]) != set(self._service.flags):
            raise DatasetError(
                f"{start}, which {self._service.name} does not know; it was submitted with {' '.join(found.flags)}: nothing was "
                f"written. Give these flags behind --; if you know that it has ended, delete {file!r}"
            )
        return state

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Ask the runner again and again what the workers have counted, for the display."""
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(_ASK_SECONDS):
                with contextlib.suppress(Exception):  # Progress is not worth a run.
                    if counts := self._counts():
                        self._meter.report(counts)

        threading.Thread(target=ask, name="counts-of-runner", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _counts(self) -> dict[str, int]:
        if self._service is not None:
            return self._service.counts(self.job.id)
        return counts_of(self._result.metrics().query()["counters"])


def cancel_job(location: str, flags: tuple[str, ...] = ()) -> str:
    """Cancel the job that is at work on a dataset.

    Args:
        location: the dataset's folder.
        flags: flags for Beam besides those with which the job was submitted, e.g. of credentials.

    Returns:
        What became of the job, in words.

    Raises:
        DatasetError: no job is at work there.
        ImagepivotError: the runner does not answer, or did not confirm that the job has ended.
    """
    folder = Folder(location)
    job = RemoteJob.read(folder)
    if job is None:
        raise DatasetError(f"no job is at work on {location!r}: it holds no {JOB_NAME}, which a job leaves there until it ends")
    service = service_of(PipelineOptions([*job.flags, *flags], save_main_session=False)) if job.id and job.flags else None
    if service is None:
        raise ImagepivotError(
            f"{job.words}, {job.origin}, cannot be asked after: look at that runner, and delete {folder.path_of(JOB_NAME)!r} "
            "when it has ended"
        )
    try:
        if has_ended(service.state(job.id)):
            words: str | None = f"{job.words} had ended before; {_KEPT}"
        else:
            service.cancel(job.id)
            words = _confirmed(lambda: service.state(job.id), job)
    except SilentError as error:
        raise ImagepivotError(f"{service.name} did not cancel {job.name} ({error}): it may go on") from error
    if words is None:
        raise ImagepivotError(
            f"asked {service.name} to cancel {job.name}, which it has not confirmed within {_CANCEL_SECONDS:.0f} seconds: it may "
            "go on; give this command again"
        )
    _clear(job, folder)
    return words


def _clear(job: RemoteJob, folder: Folder) -> None:
    """Delete what tells of a job."""
    job.release(folder)
    folder.delete(SIGN)


def _confirmed(state: Callable[[], str | None], job: RemoteJob) -> str | None:
    """Wait until a job that was cancelled has ended; return the words for it, or None where the runner does not say so in time."""
    until = time.monotonic() + _CANCEL_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(Exception):  # It may answer in a moment.
            if has_ended(found := state()):
                if found == "DONE":
                    return f"{job.words} was done before it could be cancelled"
                return f"cancelled: {job.runner} says that {job.name} has ended; {_KEPT}"
        time.sleep(0.5)
    return None


def _id_of(result: Any) -> str:
    """Return the id that a runner gave a job; empty if it does not say."""
    method = getattr(result, "job_id", None)
    return str(method() if callable(method) else getattr(result, "_job_id", "") or "")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}{f': {lines[0][:200]}' if lines else ''}"

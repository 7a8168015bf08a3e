"""Remote runs: submit a job, wait for it or detach, and cancel it on a timeout.

The dataset's folder is the only state: a detached job continues, and the same command finds its shards later.
The runner's messages go to a temporary log file, which is kept and named if the run fails.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_job_api_pb2
from apache_beam.runners.portability.portable_runner import PortableMetrics
from apache_beam.runners.runner import PipelineState

from pipelines.running.execution import Execution
from pipelines.running.meter import Meter, counts_of
from pipelines.running.preflight import PREFLIGHT_MARKER
from schemas.console import events
from schemas.errors import DatasetError, ImagepivotError, LostJobError, UsageError, first_line
from schemas.process.shutdown import DetachedError, set_shutdown_notice, shutdown_notice
from schemas.storage.folder import Folder

_LOST = ("Channel closed prematurely", "SDK worker disconnected")
"""Errors of Beam's job service and of Prism after a worker process has died."""

_JAVA_FRAME = re.compile(r"\s*(at |\.\.\. \d+ more|Driver stacktrace:)")  # Lines after the errors in Java stack traces.
_ANSWER_SECONDS = 60
_MAX_RUN_SECONDS = 365 * 24 * 3600
_POLL_SECONDS = 1.0
_COUNT_SECONDS = 2.0
_CANCEL_SECONDS = 10.0
_HANDOVER_SECONDS = 20.0
_FLINK_MASTER = "beam:option:flink_master:v1"
_MAX_LINE = 500


def check_job_service(options: PipelineOptions, flags: tuple[str, ...]) -> None:
    """Wait until the job service of the flags answers.

    Beam's ``--job_server_timeout`` limits this wait. It is then set to a year, because with some job
    services, e.g. Beam's, it would also limit the whole run.

    Raises:
        ImagepivotError: the job service does not answer in time.
    """
    portable = options.view_as(PortableOptions)
    has_timeout = any(flag.replace("-", "_").startswith("__job_server_timeout") for flag in flags)
    seconds = portable.job_server_timeout if has_timeout else _ANSWER_SECONDS
    portable.job_server_timeout = _MAX_RUN_SECONDS
    endpoint = portable.job_endpoint
    if not endpoint or endpoint == "embed":
        return
    with grpc.insecure_channel(endpoint) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            raise ImagepivotError(
                f"the job service {endpoint!r} does not answer within {seconds} seconds: check that it "
                "runs, and the address of --job_endpoint; or wait longer with --job_server_timeout=SECONDS"
            ) from None


@dataclass(frozen=True)
class RemoteJob:
    """A job that a runner has accepted; unknown fields are empty.

    Attributes:
        page: web page of the job or of its cluster.
        cancel: shell command that cancels the job.
    """

    runner: str
    id: str = ""
    page: str = ""
    cancel: str = ""

    @property
    def words(self) -> str:
        """Description of the job, for messages."""
        return f"job {self.id!r} of {self.runner}" if self.id else f"a job of {self.runner}"

    @property
    def advice(self) -> str:
        """Advice about a detached job."""
        page = f" Its page: {self.page}" if self.page else ""
        cancel = self.cancel or f"use {self.runner}, which has no command for it"
        return f"Run the same command after the job has ended to use its shards.{page} To cancel the job: {cancel}"

    @property
    def farewell(self) -> str:
        """Last line of a command that is stopped while the job runs."""
        return f"stopped waiting, and {self.words} continues. {self.advice}"


def check_detach(execution: Execution) -> None:
    """Check that a detached job outlives this process.

    Raises:
        UsageError: the job service would end with this process.
    """
    endpoint = execution.flags["job_endpoint"]
    if execution.detach and not execution.is_dataflow and endpoint in (None, "", "embed"):
        raise UsageError(
            f"--detach needs a job service that outlives this command, and {execution.runner} has none: "
            "name one with --job_endpoint after --, or leave --detach out"
        )


def watch(result: Any, *, execution: Execution, output: Folder, meter: Meter) -> None:
    """Wait until a remote run ends, or detach.

    ``result`` is that of Beam's ``Pipeline.run``. The first worker writes its marker to the dataset's folder,
    ``output``. ``meter`` shows the workers' counts.

    Raises:
        DetachedError: the execution is detached, and the runner has accepted the job.
        LostJobError: the state of the job is unknown.
        Exception: the job failed, or no worker started in time.
    """
    job_id = getattr(result, "job_id", None)
    job = RemoteJob(execution.runner, str(job_id() if callable(job_id) else getattr(result, "_job_id", "") or ""))
    with shutdown_notice(job.farewell):
        job = _add_page(job, result, execution)
        set_shutdown_notice(job.farewell)
        if execution.detach:
            raise DetachedError(
                f"{job.words} is submitted and continues without this command. {job.advice}",
                asdict(job),
            )
        if job.id:
            events.remark(f"submitted: {job.words}{f', {job.page}' if job.page else ''}", style="dim")
        with _counting(result, meter):
            try:
                wait(result, job, has_started=partial(_has_started, output), seconds=execution.start_timeout)
            except Exception as error:
                if isinstance(error, TimeoutError) or _has_ended(result):
                    raise
                cause = f"{type(error).__name__}: {first_line(error)[:200]}"
                raise LostJobError(f"lost {job.words} ({cause}): it may continue. {job.advice}") from error


def wait(result: Any, job: RemoteJob, *, has_started: Callable[[], bool], seconds: float) -> None:
    """Wait until a run ends; cancel it if no worker starts within some seconds.

    Raises:
        TimeoutError: no worker started; a cancellation was requested.
        Exception: the run failed.
    """
    failures: list[BaseException] = []

    def finish() -> None:
        try:
            result.wait_until_finish()
        except BaseException as error:  # noqa: BLE001 -- raised below
            failures.append(error)

    # In a thread: Beam blocks for workers that died at their start, and for cancelled runs.
    thread = threading.Thread(target=finish, name="wait-for-run", daemon=True)
    thread.start()
    until, started = time.monotonic() + seconds, False
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        started = started or has_started()
        if not started and thread.is_alive() and time.monotonic() > until:
            threading.Thread(target=_cancel, args=(result,), name="cancel-run", daemon=True).start()
            thread.join(_CANCEL_SECONDS)
            raise TimeoutError(
                f"no worker has started within {seconds:.0f} seconds: read the workers' logs, which alone report a crash at the "
                "start, or no connection to job service or OUTPUT; or wait longer with --start-timeout SECONDS. "
                f"{job.runner} was asked to cancel {job.words}, which may still run. {job.advice}"
            )
    if failures:
        raise failures[0]


def _cancel(result: Any) -> None:
    with contextlib.suppress(Exception):  # Any error of a runner; the message says that the job may still run.
        result.cancel()


def _add_page(job: RemoteJob, result: Any, execution: Execution) -> RemoteJob:
    """Add page and cancel command, if the runner has them."""
    if execution.is_dataflow:
        region, project = execution.flags["region"], execution.flags["project"]
        page = f"https://console.cloud.google.com/dataflow/jobs/{region}/{job.id}?project={project}"
        place = f"--project={project} --region={region}"
        return replace(job, page=page, cancel=f"gcloud dataflow jobs cancel {job.id} {place}")
    master, name = _flink_of(result, execution.flags.get("flink_master"))
    if not master:
        return job
    address = (master if "://" in master else f"http://{master}").rstrip("/")
    flink_id = _flink_id(address, name)
    if not flink_id:
        return replace(job, page=address)
    page = f"{address}/#/job/running/{flink_id}/overview"
    # Beam's job service drops a cancelled job without telling Flink: Flink's own API cancels it.
    return replace(job, page=page, cancel=f"curl -X PATCH '{address}/jobs/{flink_id}?mode=cancel'")


def _flink_of(result: Any, flag: str | None) -> tuple[str, str]:
    """Return a job service's Flink address and the job's name; empty without Flink."""
    if (service := getattr(result, "_job_service", None)) is None:
        return "", ""
    try:
        jobs = service.GetJobs(beam_job_api_pb2.GetJobsRequest(), timeout=_ANSWER_SECONDS).job_info
    except grpc.RpcError:  # Not every job service lists jobs.
        return "", ""
    for job in jobs:
        if job.job_id == result._job_id:
            for master in (flag, dict(job.pipeline_options).get(_FLINK_MASTER)):
                # Beam's option leads to no cluster if it is empty, `[auto]` or `[local]`.
                if isinstance(master, str) and master and not master.startswith("["):
                    return master, job.job_name
    return "", ""


def _flink_id(address: str, name: str) -> str:
    """Return Flink's id of the newest job of a name; empty if none is listed."""
    until = time.monotonic() + _HANDOVER_SECONDS
    while True:  # The job service may not have submitted it to Flink yet.
        try:
            with urlopen(f"{address}/jobs/overview", timeout=_ANSWER_SECONDS) as answer:
                jobs = [job for job in json.load(answer)["jobs"] if job["name"] == name]
            if jobs:
                return str(max(jobs, key=lambda job: job["start-time"])["jid"])
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            return ""
        if time.monotonic() > until:
            return ""
        time.sleep(_POLL_SECONDS)


def _has_started(output: Folder) -> bool:
    with contextlib.suppress(DatasetError):  # A store may be unavailable for a moment.
        return output.stat(PREFLIGHT_MARKER) is not None
    return False


def _has_ended(result: Any) -> bool:
    """Return whether the runner reports a terminal state."""
    with contextlib.suppress(Exception):  # Any runner's.
        return bool(PipelineState.is_terminal(result.state))
    return False


@contextlib.contextmanager
def _counting(result: Any, meter: Meter) -> Iterator[None]:
    """Poll the runner for the workers' counts, for the display."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(_COUNT_SECONDS):
            with contextlib.suppress(Exception):  # Progress is not worth a run.
                if counts := counts_of(_counters(result)):
                    meter.report(counts)

    meter.report({})
    threading.Thread(target=ask, name="counts-of-runner", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _counters(result: Any) -> Iterable[Any]:
    """Return the metric results of a run's counters."""
    if (service := getattr(result, "_job_service", None)) is None:
        return result.metrics().query()["counters"]
    # Not `result.metrics()`, which caches the first answer.
    request = beam_job_api_pb2.GetJobMetricsRequest(job_id=result._job_id)
    return PortableMetrics(service.GetJobMetrics(request, timeout=_ANSWER_SECONDS)).query()[PortableMetrics.COUNTERS]


@contextlib.contextmanager
def runner_log(runner: str) -> Iterator[None]:
    """Log the runner's messages to a file, which its errors name.

    Raises:
        ImagepivotError: the run failed; our own errors pass unchanged.
    """
    descriptor, name = tempfile.mkstemp(prefix="imagepivot-run-", suffix=".log")
    os.close(descriptor)
    root = logging.getLogger()
    file = logging.FileHandler(name, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = root.level

    def is_shown(record: logging.LogRecord) -> bool:
        is_runners = record.name == "root" or record.name.startswith("apache_beam")
        return record.levelno >= level and not (is_runners and record.levelno >= logging.ERROR)

    handlers = list(root.handlers)
    for handler in handlers:
        handler.addFilter(is_shown)
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
            f"{runner} did not finish the run: {_last_line(error)}. Its log is {name!r}; finished shards "
            "are kept, and the same command continues from them"
        ) from error
    finally:
        root.setLevel(level)
        root.removeHandler(file)
        for handler in handlers:
            handler.removeFilter(is_shown)
        file.close()
        if not failed:
            Path(name).unlink(missing_ok=True)


def _last_line(error: Exception) -> str:
    """Return the last line of an error, which names the cause in a worker's trace."""
    text = str(error.details()) if isinstance(error, grpc.Call) else str(error)
    if any(words in text for words in _LOST):
        return "a worker process ended unexpectedly, because it was killed or ran out of memory"
    lines = [line.strip().rstrip(".") for line in text.splitlines() if line.strip() and not _JAVA_FRAME.match(line)]
    line = (lines[-1] if lines else type(error).__name__)[:_MAX_LINE]
    return f"{line} (the workers' environment lacks it)" if "No module named" in line else line

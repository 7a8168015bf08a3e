"""Running a pipeline: on all cores of this machine, or on the runner that Beam's own flags name.

The local runner is Beam's in-process portable runner, named explicitly: the default would first try to download
another one. With more than one worker it starts processes with ``pipelines.running.worker``, and here the end of a process counts.
Beam itself notices only by the connection for data that one has ended. It would wait forever for a worker that was killed before it
opened that connection, or after it had sent its last data.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.fn_api_runner.worker_handlers import (
    ControlConnection,
    ControlFuture,
    SubprocessSdkWorkerHandler,
    WorkerHandler,
)
from apache_beam.transforms.environments import Environment, SubprocessSDKEnvironment

from pipelines.running.execution import Execution
from pipelines.running.package_wheel import stage
from pipelines.running.remote import WORKER_LOST, check_job_service, runner_log
from schemas import errors
from schemas.process.shutdown import DetachedError

# Matches one of our errors in the text with which Beam reports it from a worker process.
_CARRIED_ERROR = re.compile(r"schemas\.errors\.(\w+): (.*?)(?: \[while running '[^']*'\])?$", re.MULTILINE)

LARGEST_GRAPH = 10_000_000
"""Most bytes of a pipeline: what Dataflow accepts."""


def run_pipeline(
    build: Callable[[beam.Pipeline], object],
    execution: Execution,
    *,
    extras: Iterable[str] = ("pipelines",),
    watch: Callable[[Any], None] | None = None,
) -> None:
    """Run a pipeline to its end.

    Args:
        build: adds the transforms to an empty pipeline.
        execution: where and how to run it.
        extras: names of the extras that workers on other machines need.
        watch: waits, given Beam's result, until a run on other machines ends, or as long as it wants.

    Raises:
        ImagepivotError: a worker met an error that the user can fix; class and message are those of the worker's error. Or another
            runner did not finish the run.
    """
    options = execution.options
    with tempfile.TemporaryDirectory(prefix="imagepivot-run-") as running, _interrupts(running) as interrupted:
        if execution.is_local:
            pipeline = beam.Pipeline(runner=_local_runner(options, execution.local_workers, running), options=options)
        else:
            if not execution.runs_here:
                stage(options, Path(running), extras)
                check_job_service(options, execution.beam_flags)
            pipeline = _pipeline(options, execution.runner)
        build(pipeline)
        if not execution.runs_here:
            _refuse_large(pipeline, execution.runner)
        with _quiet() if execution.is_local else runner_log(execution.runner):
            try:
                result = pipeline.run()
                if watch is not None:
                    watch(result)
                else:
                    result.wait_until_finish()
            except DetachedError:
                raise
            except Exception as error:
                if interrupted:  # Beam has wrapped the interrupt, or failed on its consequences.
                    raise KeyboardInterrupt from error
                raise _user_error(error, is_local=execution.is_local) from error


def _pipeline(options: PipelineOptions, runner: str) -> beam.Pipeline:
    """Return an empty pipeline of the runner that the options name."""
    try:
        return beam.Pipeline(options=options)
    except (ImportError, ValueError) as error:  # It is unknown, not installed, or lacks options.
        raise errors.UsageError(f"Beam cannot start the runner {runner!r}: {' '.join(str(error).split())}") from error


def _refuse_large(pipeline: beam.Pipeline, runner: str) -> None:
    """Refuse a pipeline before it is submitted: it names every shard, and for captions every file."""
    if (size := pipeline.to_runner_api().ByteSize()) > LARGEST_GRAPH:
        raise errors.UsageError(
            f"the pipeline that {runner} would get is {size:,} bytes, and at most {LARGEST_GRAPH:,} are accepted: it names every "
            "shard, and for captions every file. Give fewer --shards, or the captions in fewer files"
        )


def _user_error(error: Exception, *, is_local: bool) -> Exception:
    """Return the error of ours that Beam's error carries, or the same error if it carries none."""
    if isinstance(error, errors.ImagepivotError):
        return type(error)(_without_label(str(error)))
    carried = _carried(str(error))
    if carried is None and is_local and WORKER_LOST in str(error):
        carried = errors.ImagepivotError(
            "a worker process ended unexpectedly: it was killed, or ran out of memory. Finished shards are kept; "
            "run the same command again, with fewer --workers if memory is short"
        )
    return carried or error


@contextmanager
def _interrupts(running: str) -> Iterator[list[int]]:
    """Record the signals that interrupt Python code, which otherwise act as usual: after one, the yielded list is not empty.

    The folder is deleted with the first signal, so that the workers end and Beam does not wait for them.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Only the main thread may handle signals, and only it is interrupted.
        return
    before: dict[int, Callable[[int, FrameType | None], object]] = {}
    for stopping in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(handler := signal.getsignal(stopping)):
            before[stopping] = handler

    def record(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        shutil.rmtree(running, ignore_errors=True)
        before[number](number, frame)

    for number in before:
        signal.signal(number, record)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Beam from logging errors that are raised anyway."""
    logger, hook = logging.getLogger("apache_beam"), threading.excepthook
    level = logger.level

    def report_unless_beams(fault: threading.ExceptHookArgs) -> None:
        # Threads that serve a worker fail when it ends; every error that matters reaches the main thread.
        files = [frame.filename for frame in traceback.extract_tb(fault.exc_traceback)]
        if not any("apache_beam" in file or "grpc" in file for file in files):
            hook(fault)

    logger.setLevel(logging.CRITICAL)
    threading.excepthook = report_unless_beams
    try:
        yield
    finally:
        logger.setLevel(level)
        threading.excepthook = hook


def _local_runner(options: PipelineOptions, workers: int, running: str) -> FnApiRunner:
    options.view_as(StandardOptions).runner = None
    direct = options.view_as(DirectOptions)
    direct.direct_num_workers = workers
    if workers == 1:
        return FnApiRunner()
    # Not Beam's running mode 'multi_processing': it starts workers with `python -m`, which puts the user's current folder
    # first on the path.
    command = shlex.join([sys.executable, "-c", f"{_START}main({os.getpid()}, {running!r})"])
    command = f"exec 3>&2 2>/dev/null; exec env {_WORKER_ENVIRONMENT} {command}"
    return FnApiRunner(default_environment=WorkerProcesses.from_command_string(command))


def _without_label(message: str) -> str:
    return re.sub(r" \[while running '[^']*'\]$", "", message)


def _carried(text: str) -> errors.ImagepivotError | None:
    if not (matches := _CARRIED_ERROR.findall(text)):
        return None
    name, message = matches[-1]
    return getattr(errors, name, errors.ImagepivotError)(message)


_URN = "imagepivot:env:worker_process:v1"

# Arrow's own pool would hold on to memory besides malloc's. That of malloc itself is set where the worker begins.
_WORKER_ENVIRONMENT = "ARROW_DEFAULT_MEMORY_POOL=${ARROW_DEFAULT_MEMORY_POOL:-system}"

# Importing `imagepivot` makes the names of our packages mean ours. `-c` puts the user's current folder first on the path, where any
# module may hide another: the folder of our packages takes that place for the one import, and is then removed.
# Python reports an interrupt of its own start with a traceback: until the worker ends silently by itself, its errors lead nowhere.
_START = (
    f"import sys; sys.path[0] = {str(Path(__file__).resolve().parents[2])!r}; "
    "import os, signal; signal.signal(signal.SIGINT, lambda *_: os._exit(0)); os.dup2(3, 2); os.close(3); "
    "import imagepivot; del sys.path[0]; from pipelines.running.worker import main; "
)


@Environment.register_urn(_URN, bytes)
class WorkerProcesses(SubprocessSDKEnvironment):
    """Beam's environment of processes, the end of each of which ends the run with an error."""

    def to_runner_api_parameter(self, context: Any) -> tuple[str, bytes]:
        """Return what Beam keeps of this environment."""
        return _URN, super().to_runner_api_parameter(context)[1]

    @staticmethod
    def from_runner_api_parameter(
        payload: bytes, capabilities: Any, artifacts: Any, resource_hints: Any, context: Any
    ) -> WorkerProcesses:
        """Return the environment that `to_runner_api_parameter` has described."""
        return WorkerProcesses(payload.decode(), capabilities, artifacts, resource_hints)


@WorkerHandler.register_environment(_URN, bytes)
class _WatchedProcess(SubprocessSdkWorkerHandler):
    """A worker process, as the runner sees it: what waits for it fails when it ends."""

    control_conn: ControlConnection | _EndedConnection

    def start_worker(self) -> None:
        super().start_worker()
        threading.Thread(target=self._end_with_process, name="end_of_worker", daemon=True).start()

    def _end_with_process(self) -> None:
        self.worker_thread.join()
        connection: ControlConnection = self.control_conn
        # No request may follow those that are aborted.
        self.control_conn = _EndedConnection(connection)
        connection.abort(RuntimeError(WORKER_LOST))
        self.data_conn.close()


class _EndedConnection:
    """The connection to a worker that has ended: it takes no more requests."""

    def __init__(self, connection: ControlConnection) -> None:
        self._connection = connection

    def push(self, request: Any) -> ControlFuture:
        raise RuntimeError(WORKER_LOST)

    def close(self) -> None:
        self._connection.close()

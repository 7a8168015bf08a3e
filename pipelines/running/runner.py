"""Runners: Beam's portable runner on this machine, or the one in the flags.

The local runner is named explicitly, because Beam's default first tries to download another one. Several workers are processes of
``pipelines.running.worker``, and the exit of a process fails the run. Beam alone detects an exit only by the data connection, and
would wait forever for a worker that was killed before opening it or after sending its last data.
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
from pipelines.running.package_wheel import add_wheel
from pipelines.running.remote import WORKER_LOST, check_job_service, runner_log
from schemas import errors
from schemas.process.shutdown import DetachedError

# One of our errors in the text of Beam's error from a worker process.
_CARRIED_ERROR = re.compile(r"schemas\.errors\.(\w+): (.*?)(?: \[while running '[^']*'\])?$", re.MULTILINE)

MAX_GRAPH_BYTES = 10_000_000
"""Maximum size of a pipeline on Dataflow."""


def run_pipeline(
    build: Callable[[beam.Pipeline], object],
    execution: Execution,
    *,
    extras: Iterable[str] = ("pipelines",),
    watch: Callable[[Any], None] | None = None,
) -> None:
    """Run a pipeline to its end.

    ``build`` adds the transforms to an empty pipeline. Workers on other machines need the ``extras``. ``watch`` waits for the
    result of a remote run, or detaches from it.

    Raises:
        ImagepivotError: a worker's error that the user can fix, with its class and message; or another runner did not finish.
    """
    options = execution.options
    with tempfile.TemporaryDirectory(prefix="imagepivot-run-") as running, _interrupts(running) as interrupted:
        if execution.is_local:
            pipeline = beam.Pipeline(runner=_local_runner(options, execution.local_workers, running), options=options)
        else:
            if not execution.runs_here:
                add_wheel(options, Path(running), extras)
                check_job_service(options, execution.beam_flags)
            try:
                pipeline = beam.Pipeline(options=options)
            except (ImportError, ValueError) as error:  # Unknown, not installed, or without required options.
                reason = " ".join(str(error).split())
                raise errors.UsageError(f"Beam cannot start the runner {execution.runner!r}: {reason}") from error
        build(pipeline)
        if not execution.runs_here and (size := pipeline.to_runner_api().ByteSize()) > MAX_GRAPH_BYTES:
            raise errors.UsageError(
                f"the pipeline for {execution.runner} is {size:,} bytes, expected at most {MAX_GRAPH_BYTES:,}: it names every "
                "shard, and for captions every file. Give fewer --shards, or fewer files of captions"
            )
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
                if interrupted:  # Beam wrapped the interrupt, or failed because of it.
                    raise KeyboardInterrupt from error
                raise _user_error(error, is_local=execution.is_local) from error


def _user_error(error: Exception, *, is_local: bool) -> Exception:
    """Return our error inside Beam's error, or else Beam's error."""
    if isinstance(error, errors.ImagepivotError):
        return type(error)(re.sub(r" \[while running '[^']*'\]$", "", str(error)))
    if matches := _CARRIED_ERROR.findall(str(error)):
        name, message = matches[-1]
        return getattr(errors, name, errors.ImagepivotError)(message)
    if is_local and WORKER_LOST in str(error):
        return errors.ImagepivotError(
            "a worker process ended unexpectedly: it was killed, or ran out of memory. Finished shards are kept; "
            "run the same command again, with fewer --workers if memory is short"
        )
    return error


@contextmanager
def _interrupts(running: str) -> Iterator[list[int]]:
    """Yield a list of received signals, which keep their handlers.

    A signal also deletes the folder ``running``, so that workers exit and Beam does not wait for them.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Only the main thread handles signals.
        return
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    for stopping in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(handler := signal.getsignal(stopping)):
            handlers[stopping] = handler

    def record(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        shutil.rmtree(running, ignore_errors=True)
        handlers[signum](signum, frame)

    for signum in handlers:
        signal.signal(signum, record)
    try:
        yield signals
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Beam's log of errors, which are raised anyway."""
    logger, hook = logging.getLogger("apache_beam"), threading.excepthook
    level = logger.level

    def report_unless_beams(fault: threading.ExceptHookArgs) -> None:
        # Threads that serve a worker fail when it exits; relevant errors reach the main thread.
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
    # Beam's running mode 'multi_processing' uses `python -m`, which puts the current folder first on the path.
    command = shlex.join([sys.executable, "-c", f"{_START}main({os.getpid()}, {running!r})"])
    command = f"exec 3>&2 2>/dev/null; exec env {_WORKER_ENVIRONMENT} {command}"
    return FnApiRunner(default_environment=WorkerProcesses.from_command_string(f"{running}\0{command}"))


_STOP_SECONDS = 5.0

_URN = "imagepivot:env:worker_process:v1"

# Arrow's default pool would keep freed memory, too; the worker configures malloc.
_WORKER_ENVIRONMENT = "ARROW_DEFAULT_MEMORY_POOL=${ARROW_DEFAULT_MEMORY_POOL:-system}"

# `-c` puts the current folder first on the path, where modules may shadow ours. Our folder replaces it for the import of
# `imagepivot`, which pins the names of our packages. Python prints a traceback if its start is interrupted: standard error is the
# null device until the worker handles Ctrl-C.
_START = (
    f"import sys; sys.path[0] = {str(Path(__file__).resolve().parents[2])!r}; "
    "import os, signal; signal.signal(signal.SIGINT, lambda *_: os._exit(0)); os.dup2(3, 2); os.close(3); "
    "import imagepivot; del sys.path[0]; from pipelines.running.worker import main; "
)


@Environment.register_urn(_URN, bytes)
class WorkerProcesses(SubprocessSDKEnvironment):
    """Beam environment of worker processes; the exit of a process fails the run."""

    def to_runner_api_parameter(self, context: Any) -> tuple[str, bytes]:
        """Serialize the environment for Beam."""
        return _URN, super().to_runner_api_parameter(context)[1]

    @staticmethod
    def from_runner_api_parameter(
        payload: bytes, capabilities: Any, artifacts: Any, resource_hints: Any, context: Any
    ) -> WorkerProcesses:
        """Deserialize the result of `to_runner_api_parameter`."""
        return WorkerProcesses(payload.decode(), capabilities, artifacts, resource_hints)


@WorkerHandler.register_environment(_URN, bytes)
class _WatchedProcess(SubprocessSdkWorkerHandler):
    """Handle of a worker process; its exit fails all waits for it."""

    control_conn: ControlConnection | _EndedConnection

    def __init__(self, payload: bytes, *settings: Any) -> None:
        running, command = payload.split(b"\0")
        super().__init__(command, *settings)
        self._running = running.decode()

    def start_worker(self) -> None:
        super().start_worker()
        threading.Thread(target=self._end_with_process, name="end_of_worker", daemon=True).start()

    def stop_worker(self) -> None:
        # A worker that is still starting waits forever for the server, which is closed.
        self.worker_thread.join(_STOP_SECONDS)
        if self.worker_thread.is_alive():
            shutil.rmtree(self._running, ignore_errors=True)
        super().stop_worker()

    def _end_with_process(self) -> None:
        self.worker_thread.join()
        connection: ControlConnection = self.control_conn
        # No request may follow the aborted ones.
        self.control_conn = _EndedConnection(connection)
        connection.abort(RuntimeError(WORKER_LOST))
        self.data_conn.close()


class _EndedConnection:
    """Connection to an exited worker, which refuses requests."""

    def __init__(self, connection: ControlConnection) -> None:
        self._connection = connection

    def push(self, request: Any) -> ControlFuture:
        raise RuntimeError(WORKER_LOST)

    def close(self) -> None:
        self._connection.close()

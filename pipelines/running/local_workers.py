"""The worker processes of a run on this machine with more than one worker: how they start, and how their end is noticed.

Beam's own environment for processes starts any command, but notices only by the connection for data that one has ended. It would
wait for ever for a worker that was killed before it opened that connection, or after it had sent its last data. Here the end of the
process itself counts.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

from apache_beam.runners.portability.fn_api_runner.worker_handlers import (
    ControlConnection,
    ControlFuture,
    SubprocessSdkWorkerHandler,
    WorkerHandler,
)
from apache_beam.transforms.environments import Environment, SubprocessSDKEnvironment

from pipelines.running.remote import WORKER_LOST

_URN = "imagepivot:env:worker_process:v1"

# Arrow's own pool would hold on to memory besides malloc's. That of malloc itself is set where the worker begins.
_WORKER_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system"}

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
    """Beam's environment of processes with `pipelines.running.worker`, the end of each of which ends the run with an error."""

    @classmethod
    def of_run(cls, running: str) -> WorkerProcesses:
        """Return the environment of a run of this process.

        Args:
            running: folder that exists as long as the run.
        """
        command = shlex.join([sys.executable, "-c", f"{_START}main({os.getpid()}, {running!r})"])
        settings = " ".join(f"{name}=${{{name}:-{value}}}" for name, value in _WORKER_ENVIRONMENT.items())
        return cls.from_command_string(f"exec 3>&2 2>/dev/null; exec env {settings} {command}")

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

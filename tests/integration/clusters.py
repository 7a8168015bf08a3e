"""Beam's job service and a pool of workers, each a process with a folder of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.processes import wait_for

__all__ = ["Cluster", "free_port", "started"]


@dataclass(frozen=True)
class Cluster:
    """A runner whose workers are in a folder of their own.

    Attributes:
        folder: the workers' folder.
        flags: Beam's flags that choose it.
        pool: process id of the pool, whose children the workers are.
    """

    folder: Path
    flags: tuple[str, ...]
    pool: int


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def served(module: str, *arguments: str, port: int, folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of Beam's services, in a folder with foreign modules and a temporary folder of its own."""
    (folder / "schemas").mkdir(parents=True)
    for name in ("schemas/__init__.py", "train.py"):
        (folder / name).write_text("raise RuntimeError('this is not ours')\n")
    (folder / "tmp").mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PATH": path, **environment}
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", f"apache_beam.runners.{module}", *arguments]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: accepts(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


@contextmanager
def started(root: Path, **environment: str) -> Iterator[Cluster]:
    """Run a cluster whose workers have these variables of the environment."""
    jobs, workers = free_port(), free_port()
    service = served("portability.local_job_service_main", f"--port={jobs}", port=jobs, folder=root / "service")
    pool = served("worker.worker_pool_main", f"--service_port={workers}", port=workers, folder=root / "workers", **environment)
    with service, pool as process:
        yield Cluster(
            root / "workers",
            (
                "--runner=PortableRunner",
                f"--job_endpoint=localhost:{jobs}",
                "--environment_type=EXTERNAL",
                f"--environment_config=localhost:{workers}",
            ),
            process.pid,
        )

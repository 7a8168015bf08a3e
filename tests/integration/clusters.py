"""Runners on other machines, emulated: each service and each worker is a process in a folder of its own.

That folder holds a package ``schemas`` and a module ``train`` that are not ours, and each process has temporary files of its own.

* `job_service`: Beam's portable job service and a pool of workers.
* `dask`: a scheduler of Dask and its workers.
* `dataflow`: Beam's own client of Google Cloud Dataflow, and a service on this machine that executes what it stages.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from apache_beam.runners.dataflow import dataflow_runner

import tests.dataflow_service
from tests.integration.processes import wait_for
from tests.stores import emulator, free_port, use


@dataclass(frozen=True)
class Cluster:
    """A runner whose workers are in a folder of their own.

    Attributes:
        folder: the folder of the workers.
        flags: Beam's flags that choose the runner.
    """

    folder: Path
    flags: tuple[str, ...]


def accepts(port: int) -> bool:
    """Return whether something listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def foreign_modules(folder: Path) -> dict[str, str]:
    """Write modules with the names of ours into a folder; return the environment in which ``python`` is the one that runs this."""
    (folder / "schemas").mkdir(parents=True)
    for name in ("schemas/__init__.py", "train.py"):
        (folder / name).write_text("raise RuntimeError('this is not ours')\n")
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def served(*arguments: str, port: int, folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with these arguments, in a folder with foreign modules and a temporary folder of its own, until it listens."""
    (folder / "tmp").mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **foreign_modules(folder), **environment}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: accepts(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


@contextmanager
def job_service(root: Path, **environment: str) -> Iterator[Cluster]:
    """Run Beam's job service and a pool of workers, which have these variables of the environment."""
    jobs, workers = free_port(), free_port()
    service = ("-m", "apache_beam.runners.portability.local_job_service_main", f"--port={jobs}")
    pool = ("-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={workers}")
    with ExitStack() as stack:
        stack.enter_context(served(*service, port=jobs, folder=root / "service"))
        stack.enter_context(served(*pool, port=workers, folder=root / "workers", **environment))
        yield Cluster(
            root / "workers",
            (
                "--runner=PortableRunner",
                f"--job_endpoint=localhost:{jobs}",
                "--environment_type=EXTERNAL",
                f"--environment_config=localhost:{workers}",
            ),
        )


@contextmanager
def dask(root: Path, workers: int = 2, **environment: str) -> Iterator[Cluster]:
    """Run a scheduler of Dask and worker processes, which have these variables of the environment."""
    import distributed

    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    scheduler = ("-m", "distributed.cli.dask_scheduler", "--host=127.0.0.1", f"--port={port}", "--no-dashboard")
    started = ("-m", "distributed.cli.dask_worker", address, "--host=127.0.0.1", f"--nworkers={workers}", "--nthreads=1")
    with ExitStack() as stack:
        stack.enter_context(served(*scheduler, port=port, folder=root / "scheduler"))
        stack.enter_context(
            served(*started, "--no-dashboard", "--preload=imagepivot", port=port, folder=root / "workers", **environment)
        )
        try:
            yield Cluster(
                root / "workers",
                ("--runner=apache_beam.runners.dask.dask_runner.DaskRunner", f"--dask_client_address={address}"),
            )
        finally:
            for client in list(distributed.Client._instances):  # Beam leaves them open: they would ask for the scheduler.
                client.close()


@contextmanager
def silent_afterwards(logger: str) -> Iterator[None]:
    """Take no message of a logger after the block: threads of Beam's client ask for news of jobs that were left, to the end."""
    try:
        yield
    finally:
        logging.getLogger(logger).disabled = True


@contextmanager
def dataflow(root: Path) -> Iterator[Cluster]:
    """Run the stand-in for Dataflow, beside an emulated store.

    Inside the block this process uses that store, and Beam's client asks for news more often.
    """
    with emulator("gs") as store, pytest.MonkeyPatch.context() as patch:
        use(store.environment, patch)
        patch.setattr(dataflow_runner, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(seconds / 10)))
        port = free_port()
        service = (tests.dataflow_service.__file__, str(port), str(root / "workers"))
        with served(*service, port=port, folder=root / "service"), silent_afterwards("apache_beam.utils.retry"):
            yield Cluster(
                root / "workers",
                (
                    "--runner=DataflowRunner",
                    f"--dataflow_endpoint=http://localhost:{port}",  # For this name alone the client does without TLS.
                    "--no_auth",
                    "--project=project",
                    "--region=europe-west4",
                    f"--temp_location={store.address('tmp')}",
                    f"--staging_location={store.address('staging')}",
                ),
            )

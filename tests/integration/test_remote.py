"""What goes wrong on another runner: Beam's job service and a pool of workers, each a process with a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pytest

from pipelines.running.execution import Execution
from pipelines.running.runner import run_pipeline
from schemas.errors import ImagepivotError
from tests.integration.clusters import Cluster, job_service
from tests.integration.workload import commands, files, make_inputs, one_line
from tests.stores import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with job_service(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_local_paths_are_refused_before_anything_starts(inputs, imagepivot, tmp_path):
    """No job service is needed to say so."""
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    before = files(folder)
    for name, arguments in {"SOURCE 'captions.tsv'": commands()[0], "IMAGES 'photos'": commands()[-1]}.items():
        for runner in ("PortableRunner", "FlinkRunner", "DataflowRunner"):
            done = imagepivot(*arguments, "--", f"--runner={runner}", "--job_endpoint=localhost:1", cwd=folder, code=2)
            assert f"the workers of {runner} run on others" in done.stderr
            assert name.partition(" ")[0] in done.stderr
    assert files(folder) == before


def test_a_users_mistake_on_a_worker(cluster, inputs, imagepivot, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    (folder / "captions.tsv").write_text("image_id\ttext\na\tx\ny\n")
    done = imagepivot(*commands("--shared-disk")[0], "--", *cluster.flags, cwd=folder, code=1)
    assert "captions.tsv', row 2 (line 3): 1 columns, expected the 2 of the header" in one_line(done)
    assert not list((folder / "plain").glob("part-*"))


def test_a_worker_with_other_code(inputs, imagepivot, tmp_path, monkeypatch):
    """Its copy of the package has one more file."""
    from pipelines.running import staging

    with zipfile.ZipFile(staging.build_wheel(tmp_path, ())) as wheel:
        wheel.extractall(tmp_path / "other")
    (tmp_path / "other" / "schemas" / "more.py").write_text("")
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    with job_service(tmp_path / "cluster", PYTHONPATH=str(tmp_path / "other")) as cluster:
        done = imagepivot(*commands("--shared-disk")[0], "--", *cluster.flags, cwd=folder, code=2)
    assert "the first worker cannot do the work: it has imagepivot '0.1.0' with other code in it" in " ".join(
        done.stderr.replace("│", " ").split()
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [("--device", "cuda"), ("--gpu", "nvidia-l4")])
def test_a_worker_without_the_device(cluster, inputs, imagepivot, tmp_path, options):
    """The launcher needs no GPU; the first worker says that it has none, and no image is looked at."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    done = imagepivot(*commands("--shared-disk")[-1], *options, "--", *cluster.flags, cwd=folder, code=2)
    message = " ".join(done.stderr.replace("│", " ").split())
    assert re.search(r"the first worker cannot do the work: device 'cuda(:0)?' is not on this host", message)
    assert not [path for path in (folder / "features").rglob("*") if path.is_file()]


def test_a_job_service_that_does_not_answer(inputs, imagepivot, tmp_path):
    """One that refuses connections, and one that accepts them and says nothing."""
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    before = files(folder)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (free_port(), silent.getsockname()[1]):
            flags = ("--runner=PortableRunner", f"--job_endpoint=127.0.0.1:{port}", "--job_server_timeout=2")
            done = imagepivot(*commands("--shared-disk")[0], "--", *flags, cwd=folder, code=1)
            assert f"the job service '127.0.0.1:{port}' does not answer within 2 seconds" in one_line(done)
    assert files(folder) == before


def test_a_worker_that_dies_at_its_start(inputs, imagepivot, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    with job_service(tmp_path / "cluster", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}") as cluster:
        options = ("--shared-disk", "--start-timeout", "5")
        done = imagepivot(*commands(*options)[0], "--", *cluster.flags, cwd=folder, code=1)
    message = one_line(done)
    assert "PortableRunner did not finish the run: no worker has started within 5 seconds" in message
    (log,) = tmp_path.glob("imagepivot-run-*.log")
    assert f"Its log is in '{log}'" in message
    assert "TimeoutError" in log.read_text()


def test_a_fault_on_a_worker_leaves_its_trace_in_a_file(cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    execution = Execution(beam_flags=cluster.flags, shared_disk=True)
    with pytest.raises(ImagepivotError, match=r"PortableRunner did not finish the run: ZeroDivisionError") as fault:
        run_pipeline(lambda pipeline: pipeline | beam.Create([0]) | beam.Map(lambda number: 1 // number), execution)
    (log,) = tmp_path.glob("imagepivot-run-*.log")
    assert f"Its log is in '{log}'" in str(fault.value)
    assert "Traceback" in log.read_text()
    assert "Traceback" not in capfd.readouterr().err


def test_a_run_lasts_longer_than_any_answer_may_take(cluster):
    """Beam itself ends a run of its own job service after that time."""
    execution = Execution(beam_flags=(*cluster.flags, "--job_server_timeout=3"))
    run_pipeline(lambda pipeline: pipeline | beam.Create([8]) | beam.Map(time.sleep), execution)

"""Jobs on another runner, and what goes wrong there: Beam's job service and workers, each a process in its own folder."""

import json
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from tests.builders import tree
from tests.integration.clusters import job_service
from tests.integration.gate import GATE, at_work
from tests.integration.processes import Started, start, wait_for
from tests.integration.workload import commands, make_inputs, one_line
from tests.stores import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Gated:
    """A cluster whose workers publish no shard while the file ``hold`` exists, so that a job lasts as long as a test wants."""

    flags: tuple[str, ...]
    hold: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Gated]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "sitecustomize.py").write_text(GATE)
    with job_service(folder / "root", PYTHONPATH=str(folder), HOLD=str(folder / "hold")) as cluster:
        yield Gated(cluster.flags, folder / "hold")


@pytest.fixture
def held(cluster) -> Iterator[Gated]:
    cluster.hold.touch()
    yield cluster
    cluster.hold.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_unreachable_job_service_is_reported(inputs, imagepivot, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "inputs")
    before = tree(folder)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (free_port(), silent.getsockname()[1]):
            flags = ("--runner=PortableRunner", f"--job_endpoint=127.0.0.1:{port}", "--job_server_timeout=2")
            done = imagepivot(*commands("--shared-disk")[0], "--", *flags, cwd=folder, code=1)
            assert f"the job service '127.0.0.1:{port}' does not answer within 2 seconds" in one_line(done)
    assert tree(folder) == before


def test_worker_killed_at_start_is_reported(inputs, imagepivot, tmp_path, monkeypatch):
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
    assert f"Its log is '{log}'" in message
    assert "TimeoutError" in log.read_text()


# --- the life of a job -----------------------------------------------------------------------------------------------


@pytest.fixture
def words(inputs, tmp_path, cluster) -> tuple[object, ...]:
    """A command on the cluster, which writes ``out``."""
    _, source, _, *rest = commands("--shared-disk")[0]
    return ("captions", inputs / source, tmp_path / "out", *rest, "--", *cluster.flags)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


ADVICE = (
    "Run the same command after the job has ended to use its shards. To cancel the job: use PortableRunner, which has no command "
    "for it"
)


def submitted(started: Started) -> str:
    """Return the id of the job that a command says it has submitted."""
    found: list[str] = []

    def said() -> bool:
        found[:] = re.findall(r"submitted: job '([^']+)' of PortableRunner", (started.folder / "stderr").read_text())
        return bool(found)

    wait_for(said)
    return found[0]


def test_job_survives_its_killed_launcher(held, words, imagepivot, tmp_path):
    output = tmp_path / "out"
    with start(*words, folder=tmp_path / "first") as first:
        at_work(output)
        first.send(signal.SIGKILL)
        wait_for(lambda: not first.runs)
    held.hold.unlink()
    wait_for((output / "_manifest.json").exists)
    imagepivot(*words)
    assert open_dataset(output).manifest.rows == 40
    assert imagepivot("validate", output).returncode == 0
    assert not [name for name in tree(output) if name.startswith((".first", "_job"))]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143)])
def test_signal_leaves_the_job(held, words, tmp_path, number, code):
    output = tmp_path / "out"
    with start(*words, folder=tmp_path / "first") as first:
        job = submitted(first)
        at_work(output)
        first.send(number)
        ended = first.wait()
    assert (ended.returncode, ended.stdout) == (code, "")
    assert last_line(ended.stderr) == f"stopped waiting, and job '{job}' of PortableRunner continues. {ADVICE}"
    held.hold.unlink()
    wait_for(lambda: (output / "_manifest.json").exists() and not (output / ".first-worker.tmp-0").exists())
    assert open_dataset(output).manifest.rows == 40


def test_remote_progress_comes_from_the_runner(held, words, tmp_path):
    """Beam's own job service says nothing before the end, and then everything; nothing is not zero."""
    with start(*words[:7], "--log-json", *words[7:], folder=tmp_path / "first") as first:
        at_work(tmp_path / "out")
        before = len(progress_of(first))
        wait_for(lambda: len(progress_of(first)) > before)
        last = progress_of(first)[-1]
        assert (last["done"], last["failed"]) == (None, None)
        held.hold.unlink()
        assert first.wait().returncode == 0
    assert progress_of(first)[-1]["done"] == 40


def progress_of(started: Started) -> list[dict[str, object]]:
    events = map(json.loads, (started.folder / "stderr").read_text().splitlines())
    return [event for event in events if event["event"] == "progress"]

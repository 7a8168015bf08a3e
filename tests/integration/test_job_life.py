"""The life of a job on another runner: left alone, and its shards found again; by real processes, signals and a terminal.

The workers stop before they publish a shard for as long as a file exists, so that a job lasts as long as a test wants.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.storage.folder import Folder
from schemas.writing.output import PUBLISHING_NAME
from schemas.writing.shard_writer import lock_file, lock_folder
from tests.integration.clusters import Cluster, job_service
from tests.integration.conftest import PROGRESS
from tests.integration.gate import GATE, at_work
from tests.integration.processes import Started, start, wait_for
from tests.integration.terminals import on_terminal, shown

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Gated:
    """A cluster whose workers publish no shard while the file ``hold`` exists."""

    cluster: Cluster
    hold: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return self.cluster.flags


@pytest.fixture(scope="module")
def gated(tmp_path_factory) -> Iterator[Gated]:
    folder = tmp_path_factory.mktemp("gated")
    (folder / "sitecustomize.py").write_text(GATE)
    with job_service(folder / "cluster", PYTHONPATH=str(folder), HOLD=str(folder / "hold")) as cluster:
        yield Gated(cluster, folder / "hold")


@pytest.fixture
def held(gated) -> Iterator[Gated]:
    gated.hold.touch()
    yield gated
    gated.hold.unlink(missing_ok=True)


@pytest.fixture
def source(tmp_path) -> Path:
    """Raw captions in a folder that is no command's working folder."""
    rows = [f"i{number}\t{language}\tThe Dog of Anna runs {number}" for number in range(20) for language in ("en", "de")]
    path = tmp_path / "inputs" / "captions.tsv"
    path.parent.mkdir()
    path.write_text("\n".join(["image_id\tlanguage\ttext", *rows]) + "\n")
    return path


@pytest.fixture
def words(source, tmp_path, gated) -> tuple[object, ...]:
    """A command on the cluster, which writes ``out``."""
    return captions(source, tmp_path / "out", *gated.flags)


def captions(source: Path, output: Path, *flags: str, options: tuple[str, ...] = ()) -> tuple[object, ...]:
    fixed = ("captions", source, output, "--format", "table", "--shards", "2")
    return (*fixed, *options, *(("--shared-disk", "--", *flags) if flags else ("--workers", "1")))


def with_options(words: tuple[object, ...], *options: str) -> tuple[object, ...]:
    place = words.index("--")
    return (*words[:place], *options, *words[place:])


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


ADVICE = (
    "The same command, given again when the job has ended, finds what is done. To cancel the job: there is no command, look at "
    "PortableRunner"
)


def submitted(started: Started) -> str:
    """Return the id of the job that a command says it has submitted."""
    found: list[str] = []

    def said() -> bool:
        found[:] = re.findall(r"submitted: job '([^']+)' of PortableRunner", (started.folder / "stderr").read_text())
        return bool(found)

    wait_for(said)
    return found[0]


def test_a_detached_job_goes_on_and_the_same_command_finds_its_shards(held, source, words, imagepivot, tmp_path):
    local, output = tmp_path / "local", tmp_path / "out"
    imagepivot(*captions(source, local))
    done = imagepivot(*with_options(words, "--detach", "--log-json"))
    end = json.loads(last_line(done.stderr))
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "detached", 0)
    job = end["job"]["id"]
    assert end["job"] == {"runner": "PortableRunner", "id": job, "page": "", "cancel": ""}
    assert done.stdout == f"job '{job}' of PortableRunner is at work, and goes on without this command. {ADVICE}\n"
    at_work(output)
    assert "is not a dataset: it holds no _manifest.json" in imagepivot("inspect", output, code=1).stderr
    held.hold.unlink()
    wait_for((output / "_manifest.json").exists)
    times = {path.name: path.stat().st_mtime_ns for path in output.glob("part-*")}
    expected = imagepivot(*captions(source, local)).stdout
    assert imagepivot(*words).stdout.replace(str(output), "X") == expected.replace(str(local), "X")
    assert files(output) == files(local)
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("part-*")} == times


def test_a_second_command_on_one_disk_is_refused(held, words, imagepivot, tmp_path):
    with start(*words, folder=tmp_path / "first") as first:
        at_work(tmp_path / "out")
        assert "is in use: another run is writing it" in imagepivot(*words, code=1).stderr
        held.hold.unlink()
        assert first.wait().returncode == 0


def test_a_job_whose_launcher_was_killed_goes_on(held, source, words, imagepivot, tmp_path):
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
    assert not [name for name in files(output) if name.startswith((".first", "_job"))]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_the_job(held, words, tmp_path, number, code):
    """What the workers need no launcher for, they do."""
    output = tmp_path / "out"
    with start(*words, folder=tmp_path / "first") as first:
        job = submitted(first)
        at_work(output)
        first.send(number)
        ended = first.wait()
    assert (ended.returncode, ended.stdout) == (code, "")
    assert last_line(ended.stderr) == f"stopped waiting, and job '{job}' of PortableRunner goes on. {ADVICE}"
    held.hold.unlink()
    wait_for(lambda: (output / "_manifest.json").exists() and not (output / ".first-worker.tmp-0").exists())
    assert open_dataset(output).manifest.rows == 40


def test_ctrl_c_on_a_terminal_leaves_the_job(held, words, tmp_path):
    output = tmp_path / "out"
    with on_terminal(words) as (process, terminal):
        at_work(output)
        os.write(terminal, b"\x03")
        shown(terminal, "of PortableRunner goes on. The same command, given again when the job has ended")
        assert process.wait(60) == 130
    held.hold.unlink()
    wait_for((output / "_manifest.json").exists)


def test_a_worker_that_publishes_keeps_its_lock_when_the_launcher_leaves(tmp_path):
    """A launcher that leaves its job deletes only the lock of a publisher that was killed."""
    folder = Folder(str(tmp_path / "out"))
    publishing = tmp_path / "out" / PUBLISHING_NAME
    with lock_folder(folder):
        worker = lock_file(publishing)
    assert publishing.exists()
    os.close(worker)
    with lock_folder(folder):
        pass
    assert not publishing.exists()


def test_a_worker_that_is_killed(held, words, tmp_path):
    """The reason in a line, and a log file; the trace is only there."""
    output = tmp_path / "out"
    with start(*words, folder=tmp_path / "first") as first:
        at_work(output)
        wait_for(lambda: list(output.glob(".part-*")))  # Beam's job service misses workers that die between two of its steps.
        for worker in workers(held.cluster.pool):
            os.kill(worker, signal.SIGKILL)
        ended = first.wait()
    assert ended.returncode == 1
    said = PROGRESS.sub("", ended.stderr)
    log = Path(said.rpartition("Its log is in '")[2].partition("'")[0])
    assert [line for line in said.splitlines() if line][1:] == [
        "Error: PortableRunner did not finish the run: a worker process ended unexpectedly, because it was killed or ran out of "
        f"memory. Its log is in '{log}'; finished shards are kept, and the same command goes on from them"
    ]
    assert "Channel closed prematurely" in log.read_text()


def test_how_far_a_job_is_comes_from_the_runner(held, words, tmp_path):
    """Beam's own job service says nothing before the end, and then everything; nothing is not zero."""
    with start(*with_options(words, "--log-json"), folder=tmp_path / "first") as first:
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


def workers(pool: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pool:
                children.append(int(stat.parent.name))
    return children

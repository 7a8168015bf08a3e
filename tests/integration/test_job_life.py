"""The life of a job on another runner: left alone, found again, cancelled; by real processes, signals and a terminal.

The workers stop before they publish a shard for as long as a file exists, so that a job lasts as long as a test wants.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.running.portable_service import PortableService
from schemas.dataset import open_dataset
from tests.integration.clusters import Cluster, job_service
from tests.integration.conftest import PROGRESS
from tests.integration.gate import GATE, at_work, job_of
from tests.integration.processes import Started, start, wait_for
from tests.integration.terminals import on_terminal, shown
from tests.stores import free_port

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]


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


def kept(folder: Path) -> dict[str, bytes]:
    """Files but for the temporary ones, which a job at work makes whenever it likes."""
    return {name: content for name, content in files(folder).items() if ".tmp-" not in name}


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_job_is_left_alone_and_found_again(held, source, words, imagepivot, tmp_path):
    local, output = tmp_path / "local", tmp_path / "out"
    imagepivot(*captions(source, local))
    done = imagepivot(*with_options(words, "--detach"))
    job = str(job_of(output)["id"])
    assert done.stdout.startswith(f"job '{job}' of PortableRunner is at work, and goes on without this command")
    at_work(output)

    assert (
        f"is not a dataset yet: job '{job}' of PortableRunner is at work on it, submitted by"
        in imagepivot("inspect", output, code=1).stderr
    )
    before = kept(output)
    here = imagepivot(*captions(source, output), code=1).stderr
    assert f"is being written by job '{job}' of PortableRunner" in here
    assert "nothing was written" in here
    for wrong, why in ((("--languages", "en"), "this is other work"), (("--overwrite",), "would start anew (--overwrite)")):
        refused = imagepivot(*with_options(words, *wrong), code=1).stderr
        assert job in refused
        assert why in refused
        assert f"imagepivot cancel {output}" in refused
    assert kept(output) == before

    again = imagepivot(*with_options(words, "--detach", "--log-json"))
    end = json.loads(last_line(again.stderr))
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "detached", 0)
    assert end["job"] == {"runner": "PortableRunner", "id": job, "page": ""}

    with start(*words, folder=tmp_path / "elsewhere") as joined:
        wait_for(lambda: "waiting for it" in (joined.folder / "stderr").read_text())
        held.hold.unlink()
        ended = joined.wait()
    assert ended.returncode == 0
    expected = imagepivot(*captions(source, local)).stdout
    assert ended.stdout.replace(str(output), "X") == expected.replace(str(local), "X")
    assert files(output) == files(local)


def test_a_launcher_that_was_killed_is_replaced(held, source, words, imagepivot, tmp_path):
    output = tmp_path / "out"
    with start(*words, folder=tmp_path / "first") as first:
        job = at_work(output)
        first.send(signal.SIGKILL)
        wait_for(lambda: not first.runs)
    with start(*words, folder=tmp_path / "second") as second:
        wait_for(lambda: f"job '{job}' of PortableRunner is at work on this" in (second.folder / "stderr").read_text())
        held.hold.unlink()
        assert second.wait().returncode == 0
    assert open_dataset(output).manifest.rows == 40
    assert imagepivot("validate", output).returncode == 0
    assert not [name for name in files(output) if name.startswith((".first", "_job"))]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_the_job(held, words, tmp_path, number, code):
    """Without a terminal nobody can be asked. What the workers need no launcher for, they do."""
    output = tmp_path / "out"
    with start(*words, folder=tmp_path / "first") as first:
        job = at_work(output)
        first.send(number)
        ended = first.wait()
    assert (ended.returncode, ended.stdout) == (code, "")
    assert last_line(ended.stderr) == (
        f"stopped waiting, and job '{job}' of PortableRunner goes on: the same command waits for it again, imagepivot cancel "
        f"{output} ends it"
    )
    assert job_of(output)["id"] == job
    held.hold.unlink()
    wait_for(lambda: (output / "_manifest.json").exists() and not (output / "_job.json").exists())
    assert not (output / ".first-worker.tmp-0").exists()
    assert open_dataset(output).manifest.rows == 40


def test_ctrl_c_on_a_terminal_leaves_the_job(held, words, tmp_path):
    output = tmp_path / "out"
    with on_terminal(words) as (process, terminal):
        job = at_work(output)
        os.write(terminal, b"\x03")
        shown(terminal, "cancel the job, or leave it running? [c/l]")
        os.write(terminal, b"what\n")
        shown(terminal, "cancel the job, or leave it running? [c/l]")
        os.write(terminal, b"l\n")
        shown(terminal, f"stopped waiting, and job '{job}' of PortableRunner goes on")
        assert process.wait(60) == 130
    held.hold.unlink()
    wait_for(lambda: (output / "_manifest.json").exists() and not (output / "_job.json").exists())


def test_ctrl_c_twice_leaves_the_job_at_once(held, words, tmp_path):
    output = tmp_path / "out"
    with on_terminal(words) as (process, terminal):
        job = at_work(output)
        os.write(terminal, b"\x03")
        shown(terminal, "[c/l]")
        os.write(terminal, b"\x03")
        shown(terminal, f"stopped waiting, and job '{job}' of PortableRunner goes on")
        assert process.wait(60) == 130
    assert job_of(output)["id"] == job
    held.hold.unlink()
    wait_for(lambda: (output / "_manifest.json").exists())


def test_ctrl_c_on_a_terminal_cancels_the_job(held, words, imagepivot, tmp_path):
    output = tmp_path / "out"
    with on_terminal(words) as (process, terminal):
        job = at_work(output)
        os.write(terminal, b"\x03")
        shown(terminal, "[c/l]")
        os.write(terminal, b"c\n")
        shown(terminal, f"cancelled: PortableRunner says that job '{job}' has ended; finished shards are kept")
        assert process.wait(60) == 130
    assert not (output / "_job.json").exists()
    held.hold.unlink()
    imagepivot(*words)
    assert open_dataset(output).manifest.rows == 40


def test_a_job_is_cancelled_by_a_command(held, words, imagepivot, tmp_path):
    output = tmp_path / "out"
    with start(*words, folder=tmp_path / "first") as first:
        job = at_work(output)
        cancelled = imagepivot("cancel", output).stdout
        assert cancelled.startswith(f"cancelled: PortableRunner says that job '{job}' has ended; finished shards are kept")
        ended = first.wait()  # The launcher that waits hears of it.
    assert ended.returncode == 1
    assert "failed in state CANCELLED" in last_line(ended.stderr)
    assert "no job is at work on" in imagepivot("cancel", output, code=1).stderr
    held.hold.unlink()


def test_a_job_that_has_ended_is_forgotten(gated, words, imagepivot, tmp_path):
    """Its service was restarted; or it failed while nobody waited."""
    output = tmp_path / "out"
    failing = with_options(words, "--detach")
    source = Path(str(words[1]))
    text = source.read_text()
    source.write_text("image_id\ttext\na\tx\ny\n")
    imagepivot(*failing)
    job = job_of(output)
    done = imagepivot(
        *with_options(words, "--log-json"), code=1
    )  # Whether it joins or starts anew, it fails for the same reason.
    assert "1 columns, expected the 2 of the header" in json.loads(last_line(done.stderr))["message"]
    source.write_text(text)
    (output / "_job.json").write_text(json.dumps({**job, "id": "job-0"}))
    imagepivot(*words)
    assert sorted(name for name in files(output) if "part" not in name) == ["_manifest.json"]


def test_a_runner_that_cannot_be_asked(gated, source, words, imagepivot, tmp_path):
    output = tmp_path / "out"
    imagepivot(*with_options(words, "--detach"))
    job = job_of(output)
    port = free_port()
    nobody = (*words[: words.index("--") + 1], "--runner=PortableRunner", f"--job_endpoint=127.0.0.1:{port}")
    wait_for(lambda: (output / "_manifest.json").exists() and not (output / "_job.json").exists())
    shutil.rmtree(output)
    output.mkdir()
    (output / "_job.json").write_text(json.dumps(job))
    silent = imagepivot(*nobody, code=1).stderr
    assert f"the job service '127.0.0.1:{port}' did not say whether it has ended" in silent
    assert f"delete '{output}/_job.json'" in silent
    (output / "_job.json").write_text(json.dumps({**job, "id": "job-0", "flags": ["--runner=X", "--job_endpoint=other:1"]}))
    unknown = imagepivot(*words, code=1).stderr
    assert "does not know; it was submitted with --runner=X --job_endpoint=other:1" in unknown
    (output / "_job.json").write_text(json.dumps({**job, "flags": []}))
    assert "cannot be asked whether it has ended" in imagepivot(*words, code=1).stderr
    (output / "_job.json").write_text(json.dumps({**job, "id": "", "host": "elsewhere"}))
    assert "has not said yet that the runner accepted it" in imagepivot(*words, code=1).stderr
    assert sorted(files(output)) == ["_job.json"]
    (output / "_job.json").write_text(json.dumps({**job, "id": "", "process": 2**22 + 1}))  # More than any process has.
    imagepivot(*words)
    assert open_dataset(output).manifest.rows == 40


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
    assert not (output / "_job.json").exists()


def test_how_far_a_job_is_comes_from_the_runner(held, words, tmp_path):
    """Beam's own job service says nothing before the end, and then everything; nothing is not zero."""
    with start(*with_options(words, "--log-json"), folder=tmp_path / "first") as first:
        job = at_work(tmp_path / "out")
        before = len(progress_of(first))
        wait_for(lambda: len(progress_of(first)) > before)
        last = progress_of(first)[-1]
        assert (last["done"], last["failed"]) == (None, None)
        held.hold.unlink()
        assert first.wait().returncode == 0
    assert progress_of(first)[-1]["done"] == 40
    (endpoint,) = (flag.partition("=")[2] for flag in held.flags if flag.startswith("--job_endpoint"))
    service = PortableService(endpoint)
    assert service.state(job) == "DONE"
    assert service.state("job-0") is None
    assert service.counts(job) == {"captions": 40, "failed": 0}


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

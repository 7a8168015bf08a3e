"""Every pipeline command on engines as users run them: the bytes of a local run, also where something is killed in the middle."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.validation import validate
from tests.cluster import engines
from tests.integration.gate import GATE, at_work, job_of
from tests.integration.processes import start, wait_for
from tests.integration.workload import commands, files, make_inputs, one_line

pytest.importorskip("timm", reason="the extra dev installs it")

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.timeout(1800)]

CODES = (0, 0, 0, 0, 0, 3)  # A photo is broken.
SECONDS = 300.0


@dataclass(frozen=True)
class Held:
    """An engine whose workers publish no shard while the file ``hold`` exists."""

    engine: engines.Engine
    hold: Path

    def words(self, *command: str) -> tuple[str, ...]:
        return (*command, "--", *self.engine.flags)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def local(inputs, imagepivot, tmp_path_factory) -> dict[str, bytes]:
    """The truth: all files after local runs of the commands, with what they read."""
    folder = shutil.copytree(inputs, tmp_path_factory.mktemp("local") / "here")
    for command, code in zip(commands("--workers", "1"), CODES, strict=True):
        imagepivot(*command, cwd=folder, code=code)
    return files(folder)


@contextmanager
def at_hand(
    run: Callable[..., AbstractContextManager[engines.Engine]], request: pytest.FixtureRequest, root: Path
) -> Iterator[Held]:
    """Run an engine with the gate in its workers; skip where it cannot be had, and show what it said where a test failed."""
    (root / "gate").mkdir()
    (root / "gate" / "sitecustomize.py").write_text(GATE)
    hold, failed = root / "hold", request.session.testsfailed
    environment = {"PYTHONPATH": str(root / "gate"), "HOLD": str(hold)}
    try:
        with run(root / "engine", **environment) as engine:
            yield Held(engine, hold)
            if request.session.testsfailed > failed:
                print(engine.logs())
    except engines.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def flink(request, tmp_path_factory) -> Iterator[Held]:
    with at_hand(engines.flink, request, tmp_path_factory.mktemp("flink")) as held:
        yield held


@pytest.fixture(scope="module")
def spark(request, tmp_path_factory) -> Iterator[Held]:
    with at_hand(engines.spark, request, tmp_path_factory.mktemp("spark")) as held:
        yield held


@pytest.fixture(scope="module")
def prism(request, tmp_path_factory) -> Iterator[Held]:
    with at_hand(engines.prism, request, tmp_path_factory.mktemp("prism")) as held:
        yield held


def test_what_cannot_be_had_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "BUILD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(engines.UnavailableError, match=r"^there is no java on this machine$"):
        engines.fetched("flink", "mvn", "package", source="")
    (tmp_path / "go").write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    (tmp_path / "go").chmod(0o755)
    with pytest.raises(engines.UnavailableError, match=r"^go install x failed: no such module$"):
        engines.fetched("prism", "go", "install", "x", source="")


# --- the same bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flink", "spark", "prism"])
def test_every_command_makes_the_bytes_of_a_local_run(name, request, inputs, local, imagepivot, tmp_path):
    held = request.getfixturevalue(name)
    folder = shutil.copytree(inputs, tmp_path / "there")
    for command, code in zip(commands("--shared-disk"), CODES, strict=True):
        done = imagepivot(*held.words(*command), cwd=folder, code=code)
        assert "Traceback" not in done.stderr
    assert files(folder) == local
    if name == "flink":
        assert set(held.engine.states()) == {"FINISHED"}
        assert len(held.engine.states()) == len(CODES)


# --- what is killed in the middle --------------------------------------------------------------------------------------


@contextmanager
def holding(held: Held) -> Iterator[None]:
    """Let no worker publish a shard during the block."""
    held.hold.touch()
    try:
        yield
    finally:
        held.hold.unlink(missing_ok=True)


def written(output: Path) -> Callable[[], list[Path]]:
    """Return what finds the shards that workers are about to publish."""
    return lambda: list(output.glob(".part-*"))


def outputs(folder: Path, name: str) -> dict[str, bytes]:
    return {path: data for path, data in files(folder).items() if path.startswith(f"{name}/")}


def expected(local: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {path: data for path, data in local.items() if path.startswith(f"{name}/") and not path.endswith(".lock")}


def test_flink_goes_on_without_a_task_manager_that_is_killed(flink, inputs, local, tmp_path):
    """The job is restarted on the other one."""
    folder = shutil.copytree(inputs, tmp_path / "there")
    engine = flink.engine
    with start(*flink.words(*commands("--shared-disk")[0]), folder=folder) as launcher:
        with holding(flink):
            at_work(folder / "plain", SECONDS)
            wait_for(written(folder / "plain"), SECONDS)
            (lost, *_) = engine.busy()
            engine.processes[lost].kill()
            wait_for(lambda: engine.task_managers() == 1, SECONDS)
        ended = launcher.wait(SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert outputs(folder, "plain") == expected(local, "plain")
    assert validate(str(folder / "plain")) == []
    assert "FAILED" not in engine.states()


def test_a_worker_that_is_killed(flink, inputs, local, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "there")
    with start(*flink.words(*commands("--shared-disk")[0]), folder=folder) as launcher:
        with holding(flink):
            at_work(folder / "plain", SECONDS)
            wait_for(written(folder / "plain"), SECONDS)
            for worker in flink.engine.workers():
                os.kill(worker, signal.SIGKILL)
        ended = launcher.wait(SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert outputs(folder, "plain") == expected(local, "plain")


@pytest.mark.parametrize("name", ["spark", "prism"])
def test_a_worker_that_is_killed_ends_the_job_and_the_same_command_goes_on(name, request, inputs, local, imagepivot, tmp_path):
    held = request.getfixturevalue(name)
    folder = shutil.copytree(inputs, tmp_path / "there")
    words = held.words(*commands("--shared-disk")[0])
    with start(*words, folder=folder) as launcher:
        with holding(held):
            at_work(folder / "plain", SECONDS)
            wait_for(written(folder / "plain"), SECONDS)
            for worker in held.engine.workers():
                os.kill(worker, signal.SIGKILL)
        ended = launcher.wait(SECONDS)
    assert ended.returncode == 1
    said = {
        "spark": "client cancelled",
        "prism": "a worker process ended unexpectedly, because it was killed or ran out of memory",
    }
    assert said[name] in ended.stderr
    imagepivot(*words, cwd=folder)
    assert outputs(folder, "plain") == expected(local, "plain")


# --- cancelling --------------------------------------------------------------------------------------------------------


def test_a_job_of_flink_is_cancelled(flink, inputs, local, imagepivot, tmp_path):
    """Beam's job server gives it up and does not tell Flink, where it is cancelled by itself. The same command makes the rest."""
    folder = shutil.copytree(inputs, tmp_path / "there")
    words = flink.words(*commands("--shared-disk")[0])
    with start(*words, folder=folder) as launcher, holding(flink):
        job = at_work(folder / "plain", SECONDS)
        cancelled = imagepivot("cancel", folder / "plain").stdout
        assert cancelled.startswith(f"cancelled: PortableRunner says that job '{job}' has ended; finished shards are kept")
        ended = launcher.wait(SECONDS)
        assert flink.engine.states().count("RUNNING") == 1
        flink.engine.cancel()
        wait_for(lambda: "CANCELED" in flink.engine.states(), SECONDS)
    assert ended.returncode == 1
    assert "failed in state CANCELLED" in ended.stderr
    assert not job_of(folder / "plain")
    imagepivot(*words, cwd=folder)
    assert outputs(folder, "plain") == expected(local, "plain")


# --- what a user gets wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flink", "spark", "prism"])
def test_a_users_mistake_on_a_worker_is_one_line(name, request, imagepivot, tmp_path):
    held = request.getfixturevalue(name)
    (tmp_path / "captions.tsv").write_text("image_id\ttext\na\tx\ny\n")
    done = imagepivot(*held.words(*commands("--shared-disk")[0]), cwd=tmp_path, code=1)
    assert "captions.tsv', row 2 (line 3): 1 columns, expected the 2 of the header" in one_line(done)
    assert not list((tmp_path / "plain").glob("part-*"))

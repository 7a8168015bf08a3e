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

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.timeout(900)]

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

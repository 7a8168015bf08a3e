"""Plans whose results go to an object store: built twice, changed, killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.plans import building
from schemas.storage import Folder
from tests.integration.processes import wait_for
from tests.integration.test_plans import plan_in, processes_in
from tests.pipelines.plans.conftest import ForkedStep
from tests.stores import PACKAGES, emulator, far_away, is_installed, use

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]

SCRIPT = Path(sys.executable).with_name("imagepivot")
KILLS = 3


@pytest.fixture(scope="module", params=["gs", "s3"])
def store(request):
    if not is_installed(request.param):
        pytest.skip(f"no emulator: pip install '{PACKAGES[request.param]}'")
    with emulator(request.param) as near, far_away(near, 0.0) as far:
        yield far


@pytest.fixture
def run(store, tmp_path, imagepivot, monkeypatch):
    """Build a plan in the store; return the commands that ran, and what was said."""
    use(store.environment, monkeypatch)
    monkeypatch.setattr(building, "StepProcess", ForkedStep)
    folder = plan_in(tmp_path / "plan")

    def build(name: str, *words: str, code: int = 0) -> tuple[list[str], str]:
        ForkedStep.started = []
        done = imagepivot("build", "plan.toml", "--output", store.address(name), *words, cwd=folder, code=code)
        return [words[0] for words in ForkedStep.started], done.stdout + done.stderr

    return build


def files_of(location: str) -> dict[str, bytes]:
    folder = Folder(location)
    return {name: folder.read(name) for name in folder.names() if not name.startswith(".plan/")}


def results(files: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out the records, which name the tags that this copy has in the store."""
    return {name: data for name, data in files.items() if "/.records/" not in name}


def test_twice_and_changed(run, store):
    assert run("twice")[0] == ["captions", "vocabulary", "encode"]
    before = files_of(store.address("twice"))
    store.asked()
    ran, said = run("twice")
    assert ran == []
    assert "all 3 steps are up to date" in said
    assert {request.method for request in store.asked().all} <= {"GET", "HEAD"}  # Nothing is written.
    assert files_of(store.address("twice")) == before

    changed = ("--set", "steps.vocabulary.min-count=2")
    _, said = run("twice", *changed, code=1)
    assert "in a store nothing can be moved aside: give --replace" in " ".join(said.split())
    assert files_of(store.address("twice")) == before
    ran, _ = run("twice", *changed, "--replace")
    assert set(ran) == {"vocabulary", "encode"}
    assert run("twice", *changed)[0] == []
    run("fresh", *changed)
    assert results(files_of(store.address("twice"))) == results(files_of(store.address("fresh")))
    # Back again, since nothing was kept.
    ran, _ = run("twice", "--replace")
    assert set(ran) == {"vocabulary", "encode"}
    assert results(files_of(store.address("twice"))) == results(before)


def test_a_report_is_replaced(run, store, tmp_path):
    pairs = ["4.0\ta red circle\ta Red circle", "1.0\ta square\ta large circle", "2.5\ta circle\ta square"]
    (tmp_path / "plan/pairs.tsv").write_text("".join(f"{pair}\n" for pair in pairs), encoding="utf-8")
    (tmp_path / "plan/plan.toml").write_text("[steps.similarity]\ncommand = 'sts'\nplaces = ['pairs.tsv']\n", encoding="utf-8")
    assert run("report")[0] == ["sts"]
    before = files_of(store.address("report"))
    assert run("report")[0] == []
    changed = ("--set", "steps.similarity.language=de")
    assert "nothing can be moved aside: give --replace" in " ".join(run("report", *changed, code=1)[1].split())
    assert files_of(store.address("report")) == before
    assert run("report", *changed, "--replace")[0] == ["sts"]
    assert run("report", *changed)[0] == []


def test_a_result_that_is_gone_is_made_again_and_nothing_else(run, store):
    run("gone")
    before = files_of(store.address("gone"))
    Folder(store.address("gone/vocabulary")).delete("part-00000-of-00001.parquet")
    assert run("gone")[0] == ["vocabulary"]
    assert results(files_of(store.address("gone"))) == results(before)


def test_killed_anywhere_it_goes_on_to_the_same_bytes(run, store, tmp_path):
    run("calm")
    rough = plan_in(tmp_path / "rough")
    build = [SCRIPT, "build", "plan.toml", "--output", store.address("rough")]
    moments = random.Random(0)
    for attempt in range(KILLS + 1):
        started = time.monotonic()
        process = subprocess.Popen(build, cwd=rough, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        wait_for(lambda process=process: processes_in(rough)[1:] or process.poll() is not None)  # The first of its steps.
        begun = time.monotonic() - started
        if attempt < KILLS:
            try:
                process.wait(moments.uniform(0.2, 1.5) * begun)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)  # The build alone: its steps have to notice.
        _, said = process.communicate()
        wait_for(lambda: not processes_in(rough))
    assert process.returncode == 0, said
    assert results(files_of(store.address("rough"))) == results(files_of(store.address("calm")))
    assert run("rough")[0] == []

"""``reproduce`` with a bad row among good ones: the others go on, and the same command mends it."""

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from pipelines.commands import app as cli
from pipelines.commands.results import console, notes
from tests.integration.processes import wait_for
from tests.train.trainings import SMALL
from train.config.sections import load_config
from train.reports import reproduce as running
from train.reports.reproduce import Task

pytestmark = pytest.mark.cluster

ROWS = ("vse-en", "oe-en", "vse-de")
BAD = "oe-en"
LONGER = SMALL | {"schedule.eval_every_steps": "20", "schedule.max_steps": "60", "schedule.patience": "0"}
LARGE = {"model.embed_dim": "300"}  # Its checkpoint takes some 3 MB.
train_words = Task.train_words
LONG = {"schedule.max_steps": "600"}


@pytest.fixture
def command(toy_2016, capfd, monkeypatch):
    """Give the command ``reproduce`` for three rows, with other values for the bad one; return exit code, output and messages."""
    for each in (console, notes):
        monkeypatch.setattr(each, "_width", 1000)

    def run(output: Path, bad: dict[str, str], *, workers: int, rows=ROWS) -> tuple[int, str, str]:
        def resolved(preset, overrides):
            return load_config(preset, {**overrides, **(bad if preset.endswith(BAD) else {})})

        def words(task, device):
            settings = [f"--set={key}={value}" for key, value in bad.items()] if task.preset.endswith(BAD) else []
            return [*train_words(task, device), *settings]

        monkeypatch.setattr(running, "load_config", resolved)
        monkeypatch.setattr(Task, "train_words", words)
        arguments = ["reproduce", "gella2017", str(output), "--seeds=1", f"--workers={workers}", "--device=cpu", "--no-plot"]
        arguments += [f"--{name}={getattr(toy_2016, name)}" for name in ("captions", "features", "vocabulary")]
        for row in rows:
            arguments += ["--rows", row]
        for key, value in LONGER.items():
            arguments += ["--set", f"{key}={value}"]
        capfd.readouterr()
        code = cli.app(arguments, standalone_mode=False)
        return (code or 0, *capfd.readouterr())

    return run


def results(output: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in output.glob("results/gella2017/*/seed-0.json")}


def failure(output: Path) -> dict:
    return json.loads((output / "results" / "gella2017" / BAD / "failed-seed-0.json").read_text())


def check_failed(done: tuple[int, str, str], output: Path, undisturbed: dict[str, bytes], kind: str, reason: str) -> None:
    """Check what a command says and leaves of which one row failed."""
    code, out, errors = done
    assert code == 3
    assert results(output) == {row: result for row, result in undisturbed.items() if row != BAD}
    assert failure(output)["kind"] == kind
    assert reason in failure(output)["reason"]
    assert f"gella2017/{BAD}, seed 0: failed ({kind})\n" in errors
    (line,) = (
        line for line in errors.splitlines() if line.startswith(f"1 of 3 runs failed ({kind}): gella2017/{BAD}, seed 0: ")
    )
    assert reason in line
    assert "Traceback" not in errors + out
    assert f"gella2017/{BAD}: seeds: 0 of 1" in out
    assert f"| gella2017/{BAD} | 0 | {kind} | " in (output / "gella2017.md").read_text()
    assert multiprocessing.active_children() == []


def check_mended(done: tuple[int, str, str], output: Path, undisturbed: dict[str, bytes]) -> None:
    """Check that nothing is left of a failure."""
    code, out, errors = done
    assert code == 0, errors
    assert results(output) == undisturbed
    assert not list(output.rglob("failed-*"))
    assert not list(output.rglob("traceback.txt"))
    assert "failed" not in out + errors + (output / "gella2017.md").read_text()


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], dict[str, bytes]]:
    """Results by the values of the bad row, made once."""
    return {}


@pytest.fixture
def undisturbed(command, tmp_path, known):
    """Results of the same rows, each trained alone in this process, with other values for the bad one."""

    def run(bad: dict[str, str]) -> dict[str, bytes]:
        if (key := tuple(bad)) not in known:
            for row in ROWS:
                code, _, errors = command(tmp_path / "undisturbed", bad, workers=1, rows=(row,))
                assert code == 0, errors
            known[key] = results(tmp_path / "undisturbed")
        return known[key]

    return run


@pytest.mark.parametrize("workers", [1, 2])
def test_diverging_row(command, undisturbed, tmp_path, workers):
    expected, output = undisturbed({}), tmp_path / "o"
    wild = {"optimizer.learning_rate": "1e30"}
    check_failed(command(output, wild, workers=workers), output, expected, "diverged", "the training has diverged")
    run = output / "runs" / "gella2017" / BAD / "seed-0"
    log = (run / "log.jsonl").read_bytes()
    again = command(output, wild, workers=workers)
    check_failed(again, output, expected, "diverged", "the training has diverged")
    assert "diverged runs would mostly diverge again: change their settings" in again[2]
    assert (run / "log.jsonl").read_bytes() == log  # From the beginning: a resumed run would have added to it.

    check_mended(command(output, {}, workers=workers), output, expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_worker(command, undisturbed, tmp_path, workers):
    expected, output = undisturbed(LONG), tmp_path / "o"
    run = output / "runs" / "gella2017" / BAD / "seed-0"

    def kill() -> None:
        wait_for((run / "last.pt").exists)
        (worker,) = (child for child in multiprocessing.active_children() if has_open(child.pid, run / "log.jsonl"))
        os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    done = command(output, LONG, workers=workers)
    thread.join()
    check_failed(done, output, expected, "killed", "a training process was killed, probably because memory ran out")
    assert "the same command retries failed runs" in done[2]
    assert (run / "last.pt").exists()
    check_mended(command(output, LONG, workers=workers), output, expected)


def has_open(pid: int | None, path: Path) -> bool:
    """Tell whether a process has a file open."""
    return any(os.path.realpath(entry) == str(path) for entry in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk(command, undisturbed, disk, workers):
    expected, output = undisturbed(LARGE), disk(2500) / "o"
    check_failed(command(output, LARGE, workers=workers), output, expected, "disk", "the disk is full: free some space")
    assert not [path for path in output.rglob(".*") if path.is_file()]
    disk(20_000)
    check_mended(command(output, LARGE, workers=workers), output, expected)

"""Signals during training: the current step is saved, and the run resumes bit for bit."""

import os
import signal

import pytest

from schemas.storage.folder import Folder
from tests.integration.processes import start, wait_for
from tests.train.trainings import FOREVER, assert_same_checkpoints, contents, lasting_log
from train.runs.checkpoints import LAST, read_checkpoint


@pytest.mark.cluster
@pytest.mark.parametrize("step", [10, 17, 30, 44])
def test_ctrl_c_saves_the_step(train_toy, finished_run, tmp_path, step):
    def interrupt(report):
        if report.step == step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_toy(on_report=interrupt)
    assert read_checkpoint(Folder(str(tmp_path / "run")), LAST).progress.step == step
    assert not list((tmp_path / "run").glob(".*"))
    train_toy(resume=True)
    assert lasting_log(tmp_path / "run") == lasting_log(finished_run[0])
    assert_same_checkpoints(tmp_path / "run", finished_run[0])


@pytest.mark.slow
def test_second_ctrl_c_stops_immediately(train_toy, tmp_path, monkeypatch):
    def write(folder, name, checkpoint):
        with folder.replace(name) as file:
            file.write(b"half")
            signal.raise_signal(signal.SIGINT)
            file.write(b"whole")

    def interrupt(report):
        if report.step == 10:
            monkeypatch.setattr("train.loop.training.write_checkpoint", write)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_toy(save_every=5, curves=True, on_report=interrupt)
    monkeypatch.undo()
    assert read_checkpoint(Folder(str(tmp_path / "run")), LAST).progress.step == 5
    assert set(contents(tmp_path / "run")) == {"last.pt", "config.toml", "log.jsonl", "metrics.csv", "curves.png"}
    assert train_toy(resume=True).progress.step == 44


@pytest.fixture
def data(toy) -> tuple[str, ...]:
    return ("--captions", toy.captions, "--features", toy.features, "--vocabulary", toy.vocabulary, "--device", "cpu")


@pytest.mark.cluster
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_command_reports_the_saved_step(data, tmp_path, number, code):
    (tmp_path / "own.toml").write_text(FOREVER)
    with start("train", "own.toml", "run", *data, "--save-every", "20", folder=tmp_path) as process:
        wait_for(lambda: (tmp_path / "run" / "last.pt").exists())
        process.send(number)
        done = process.wait()
    step = read_checkpoint(Folder(str(tmp_path / "run")), LAST).progress.step
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.splitlines()[-1] == f"stopped at step {step:,}; last.pt holds it, the same command with --resume goes on"
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run").glob(".*"))
    arguments = ("train", "own.toml", "run", *data, "--resume", "--max-steps", str(step + 2))
    with start(*arguments, folder=tmp_path) as process:
        assert f"{step + 2:,} steps in run" in process.wait().stdout


@pytest.mark.cluster
def test_command_interrupted_before_training(data, tmp_path):
    with start("train", "demo", "run", *data, folder=tmp_path, before=_interrupt_loading) as process:
        done = process.wait()
    assert (done.returncode, done.stderr) == (130, "stopped before training began; nothing was changed\n")
    assert not (tmp_path / "run").exists()


def _interrupt_loading() -> None:
    import train.loop.training

    train.loop.training.load_training_inputs = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGINT)

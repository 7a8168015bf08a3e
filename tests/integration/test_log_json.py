"""``--log-json``: standard error is nothing but lines of JSON, and the last one says how the command ended."""

import functools
import json
import os
import signal
import sys
import threading
from datetime import datetime, timedelta

import numpy as np
import pytest

from schemas.process.shutdown import DetachedError
from schemas.storage.folder import Folder
from tests.integration.processes import start, wait_for
from tests.train.conftest import toy, write_run  # noqa: F401
from tests.train.trainings import CONFIG
from train.runs.checkpoints import LAST, read_checkpoint


def events_of(done) -> list[dict]:
    found = [json.loads(text) for text in done.stderr.splitlines()]
    for event in found:
        assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)
        assert event["event"] in ("progress", "remark", "warning", "error", "end")
        assert event["severity"] in ("INFO", "WARNING", "ERROR")
        assert event["message"]
    assert [event["event"] for event in found].count("end") == 1
    assert found[-1]["event"] == "end"
    return found


def last_of(done) -> dict:
    """The last event without its time."""
    return {name: value for name, value in events_of(done)[-1].items() if name not in ("time", "severity", "event")}


def progress_of(done) -> dict:
    return [event for event in events_of(done) if event["event"] == "progress"][-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table of captions, one of them empty, and an array of features with its ids."""
    folder = tmp_path_factory.mktemp("log_json")
    rows = [f"img{number}\ta dog runs" for number in range(40)]
    (folder / "good.tsv").write_text("\n".join(["image_id\ttext", *rows]) + "\n")
    (folder / "bad.tsv").write_text("image_id\ttext\na\tone\nb\t \nc\t\n")
    np.save(folder / "x.npy", np.arange(12, dtype=np.float32).reshape(3, 4))
    (folder / "x.txt").write_text("a.jpg\nb.jpg\nc.jpg\n")
    return folder


def captions(folder, output, name="good", *arguments):
    return ("captions", folder / f"{name}.tsv", output, "--format", "table", "--shards", "4", "--log-json", *arguments)


def end_reader_after(lines: int) -> None:
    """Make standard error a pipe whose reader ends."""
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    sys.stderr = os.fdopen(2, "w", closefd=False)

    def read() -> None:
        with os.fdopen(reading) as reader:
            for _ in range(lines):
                reader.readline()

    thread = threading.Thread(target=read)
    thread.start()
    if not lines:
        thread.join()


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "lines"), [("captions", 0), ("import", 0), ("captions", 1), ("evaluate", 1)])
def test_reader_that_ends_stops_the_command(forked, folder, toy, write_run, tmp_path, name, lines):  # noqa: F811
    output = tmp_path / "out"
    arguments = {
        "captions": (folder / "good.tsv", output, "--format", "table", "--shards", "4", "--workers", "1"),
        "import": (folder / "x.npy", output, "--name", "x"),
        "evaluate": ("--captions", toy.captions, "--features", toy.features, "--splits", "val", "--output", output),
    }[name]
    run = (write_run(),) if name == "evaluate" else ()
    forked(name, *run, *arguments, "--log-json", code=141, before=functools.partial(end_reader_after, lines))
    forked(name, *run, *arguments)  # The same command continues.


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--log-json",), ()])
def test_reader_that_ends_leaves_the_checkpoint_of_the_logged_step(forked, toy, tmp_path, options):  # noqa: F811
    (tmp_path / "small.toml").write_text(CONFIG)
    data = ("--captions", toy.captions, "--features", toy.features, "--vocabulary", toy.vocabulary)
    words = ("train", tmp_path / "small.toml", tmp_path / "run", *data, "--device", "cpu", "--no-tensorboard", "--no-curves")
    forked(*words, *options, code=141, before=functools.partial(end_reader_after, 0))
    *_, last = (json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert 0 < last["step"] < 44
    assert read_checkpoint(Folder(str(tmp_path / "run")), LAST).progress.step == last["step"]
    forked(*words, "--resume")


@pytest.mark.slow
def test_end_event_counts_written_rows_and_shards(imagepivot, folder, tmp_path):
    done = imagepivot(*captions(folder, tmp_path / "captions", "good", "--workers", "1"))
    assert last_of(done) == {
        "command": "captions",
        "output": str(tmp_path / "captions"),
        "counts": {"rows": 40, "shards": 4, "failed": {}},
        "status": "done",
        "exit_code": 0,
        "message": "captions: done",
    }
    done = imagepivot("vocabulary", tmp_path / "captions", tmp_path / "vocabulary", "--log-json")
    assert last_of(done)["counts"] == {"rows": 7, "shards": 1, "failed": {}}
    assert (progress_of(done)["done"], progress_of(done)["total"], progress_of(done)["failed"]) == (40, 40, 0)
    places = (tmp_path / "captions", tmp_path / "vocabulary", tmp_path / "encoded")
    done = imagepivot("encode", *places, "--workers", "1", "--log-json")
    assert last_of(done)["counts"] == {"rows": 40, "shards": 4, "failed": {}}
    assert progress_of(done)["done"] == 40


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.cluster)])
def test_failures_are_counted_by_reason(imagepivot, forked, folder, tmp_path, workers):
    """The last counts of worker processes are complete, though none writes more often than five times a second."""
    run = imagepivot if workers == 1 else forked
    done = run(*captions(folder, tmp_path / "o", "bad", "--workers", workers), code=3)
    end = last_of(done)
    assert (end["status"], end["exit_code"]) == ("failures", 3)
    assert end["counts"] == {"rows": 1, "shards": 4, "failed": {"empty_caption": 2}}
    assert (progress_of(done)["done"], progress_of(done)["failed"]) == (3, 2)
    [remark] = [event["message"] for event in events_of(done) if event["event"] == "remark"]
    assert remark.startswith("2 inputs failed: 2 empty_caption. They are listed by: imagepivot inspect ")


def test_error_is_an_event_and_the_reason_of_the_end(imagepivot, folder, tmp_path):
    done = imagepivot(*captions(folder, tmp_path / "o", "none"), code=1)
    [error] = [event for event in events_of(done) if event["event"] == "error"]
    assert "none.tsv' does not exist" in error["message"]
    assert error["kind"] == "InputError"
    end = last_of(done)
    assert (end["status"], end["exit_code"], end["output"]) == ("failed", 1, str(tmp_path / "o"))
    assert end["message"] == error["message"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("captions", "x.tsv", "o", "--format", "table", "--bogus", "--log-json"), "No such option: --bogus"),
        (("captions", "x.tsv", "", "--format", "table", "--log-json"), "OUTPUT is '', expected a value"),
        (("inspect", "x", "--log-json"), "No such option: --log-json"),
        (("nonsense", "--log-json"), "No such command 'nonsense'"),
    ],
)
def test_wrong_usage_is_an_event(imagepivot, words, says):
    done = imagepivot(*words, code=2)
    assert [event["event"] for event in events_of(done)] == ["error", "end"]
    end = last_of(done)
    assert (end["status"], end["exit_code"]) == ("failed", 2)
    assert says.lower() in end["message"].lower()


def test_internal_error_event_has_a_traceback(imagepivot, folder, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("pipelines.inputs.captions.opening.open_captions", broken)
    done = imagepivot(*captions(folder, tmp_path / "o"), code=1)
    [error] = [event for event in events_of(done) if event["event"] == "error"]
    assert (error["kind"], error["message"]) == ("ZeroDivisionError", "ZeroDivisionError: ours")
    assert error["traceback"].startswith("Traceback (most recent call last):")
    assert last_of(done)["message"] == error["message"]


def test_detached_job_is_in_the_last_event(imagepivot, folder, tmp_path, monkeypatch):
    job = {"runner": "FlinkRunner", "id": "job-1", "page": "", "cancel": ""}

    def detach(*_, **__):
        raise DetachedError("job 'job-1' of FlinkRunner is submitted", job)

    monkeypatch.setattr("pipelines.inputs.captions.opening.open_captions", detach)
    done = imagepivot(*captions(folder, tmp_path / "o"))
    end = last_of(done)
    assert (end["status"], end["exit_code"], end["job"]) == ("detached", 0, job)
    assert done.stdout == "job 'job-1' of FlinkRunner is submitted\n"


@pytest.mark.slow
def test_ctrl_c_is_the_last_event(folder, tmp_path):
    (tmp_path / "t.tsv").write_text("image_id\ttext\n" + "".join(f"i{n}\tA dog runs.\n" for n in range(200_000)))
    words = ("captions", tmp_path / "t.tsv", tmp_path / "o", "--format", "table", "--workers", "2", "--log-json")
    with start(*words, folder=tmp_path / "run") as process:
        wait_for(lambda: '"progress"' in (tmp_path / "run" / "stderr").read_text())
        process.send(signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130
    end = last_of(done)
    assert (end["status"], end["exit_code"], end["output"]) == ("stopped", 130, str(tmp_path / "o"))
    assert end["message"] == "stopped; finished shards are kept, the same command continues from here"

"""Files of a run that were cut, emptied, changed or replaced: one clear error, or the results of the undamaged run."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import DatasetError, ImagepivotError
from tests.train.trainings import CONFIG, assert_equal, reproduce_job, weights
from train.config.sections import from_toml
from train.evaluation.embedding import embed
from train.evaluation.scores import evaluate
from train.evaluation.search import search
from train.jobs import EmbedJob, EvaluateJob, SearchJob, TrainJob
from train.loop.training import train
from train.reports.reproduce import reproduce
from train.reports.reproduce_report import read_report

pytestmark = pytest.mark.cluster

FLIPS = 10
ADVICE = ("weights_only", "allow_pickle", "add_safe_globals", "set_default", "trust")


def damages(data: bytes, seed: int, flips: int = FLIPS) -> Iterator[tuple[str, bytes | None]]:
    """Yield names and contents of damaged files; None is a folder in the place of the file."""
    rng = random.Random(seed)
    size = len(data)
    cuts = {0, 1, 2, size // 3, size // 2, size - 100, size - 23, size - 1, *(rng.randrange(size) for _ in range(4))}
    for cut in sorted(cut for cut in cuts if 0 <= cut < size):
        yield f"cut at {cut}", data[:cut]
    for _ in range(flips):
        place, bit = rng.randrange(size), rng.randrange(8)
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        yield f"bit {bit} of byte {place}", bytes(flipped)
    for place in (rng.randrange(size) for _ in range(3)):
        yield f"zeros from {place}", data[:place] + bytes(min(512, size - place)) + data[place + 512 :]
    yield "nonsense", rng.randbytes(size)
    yield "text", b"this is text\n"
    yield "JSON", b'{"step": 3}\n'
    yield "an archive", b"PK\x05\x06" + bytes(18)
    yield "more at the end", data + b"\x00"
    yield "a folder", None


def put(path: Path, content: bytes | None) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def attempt(use: Callable[[], object]) -> tuple[object, ImagepivotError | None]:
    """Return what a use of a file gives, or its error, which is for users."""
    try:
        return use(), None
    except ImagepivotError as error:
        return None, error


def check_message(error: ImagepivotError, name: str, way: str) -> None:
    """An error of damage names the file, is one line, and gives none of the libraries' advice."""
    message = str(error)
    assert isinstance(error, DatasetError), (way, error)
    assert name in message, way
    assert "\n" not in message, way
    assert not any(word in message for word in ADVICE), message


def survives(use: Callable[[], object], path: Path, expected: object, capfd, seed: int = 0) -> set[str]:
    """Use a file that is damaged in many ways; return the ways that were an error.

    Everything else must give what the undamaged file gives. Nothing may be printed.
    """
    whole, refused = path.read_bytes(), set()
    for way, content in damages(whole, seed):
        put(path, content)
        found, error = attempt(use)
        if error is None:
            assert found == expected, way
        else:
            check_message(error, path.name, way)
            refused.add(way)
        out, err = capfd.readouterr()
        remarks = [line for line in err.splitlines() if not line.endswith("is up to date: nothing was left to do")]
        assert (out, remarks) == ("", []), way
    put(path, whole)
    return refused


def test_damaged_model(toy, copied_run, tmp_path, capfd):
    features = {"run": str(copied_run), "features": toy.features, "device": "cpu"}
    commands: dict[str, Callable[[], object]] = {
        "evaluate": lambda: evaluate(EvaluateJob(captions=toy.captions, splits=("test",), **features)),
        "search": lambda: search(SearchJob(query="en1 en2", tokenized=True, language="en", **features)),
        "embed": lambda: [
            manifest.fingerprint for manifest in embed(EmbedJob(output=str(tmp_path / "embeddings"), **features))
        ],
    }
    for seed, (name, use) in enumerate(commands.items()):
        refused = survives(use, copied_run / "best.pt", use(), capfd, seed)
        cut = {way for way in refused if way.startswith("cut")}
        assert len(cut) >= 9, name  # Every cut is found.
        assert {"nonsense", "text", "JSON", "an archive", "a folder"} <= refused, name


def test_damaged_training(toy, train_toy, tmp_path, capfd):
    train_toy(CONFIG.replace("max_steps = 44", "max_steps = 30"), "begun")
    train_toy(name="whole")
    job = TrainJob(from_toml(CONFIG, "test"), toy, str(tmp_path / "run"), device="cpu", resume=True)
    expected = weights(tmp_path / "whole")

    for seed, name in enumerate(("last.pt", "log.jsonl", "config.toml", "best.pt")):
        refused, whole = set(), (tmp_path / "begun" / name).read_bytes()
        ways = list(damages(whole, seed, flips=8))
        for way, content in ways if name in ("last.pt", "log.jsonl") else ways[-6:]:  # Nothing is read from the last two.
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            shutil.copytree(tmp_path / "begun", tmp_path / "run")
            put(tmp_path / "run" / name, content)
            before = contents_of(tmp_path / "run")
            result, error = attempt(lambda: train(job))
            if error is None:
                assert result.progress.step == 44, way
                assert_equal(weights(tmp_path / "run"), expected)
            elif (name, way) == ("last.pt", "a folder"):
                assert "has no last.pt to resume from" in str(error)
            else:
                check_message(error, name, way)
                refused.add(way)
                # Nothing was lost: what is damaged can be replaced.
                after = contents_of(tmp_path / "run")
                assert {name: after[name] for name in before if name != "config.toml"} == {
                    name: data for name, data in before.items() if name != "config.toml"
                }, way
            assert capfd.readouterr() == ("", ""), (name, way)
        if name == "last.pt":
            assert len([way for way in refused if way.startswith("cut")]) >= 9
            assert {"nonsense", "text", "JSON", "an archive"} <= refused


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_damaged_result_of_tables(toy_2016, tmp_path, capfd):
    overrides = {"model.embed_dim": "6", "model.word_dim": "4", "schedule.batch_size": "8", "schedule.max_steps": "2"}
    job = reproduce_job(
        paper="gella2017", output=str(tmp_path), corpus=toy_2016, rows=("vse-en",), seeds=1, overrides=overrides, device="cpu"
    )
    reproduce(job)
    path = tmp_path / "results" / "gella2017" / "vse-en" / "seed-0.json"
    whole, expected = path.read_bytes(), read_report(str(tmp_path), "gella2017")
    for way, content in damages(whole, 0):
        put(path, content)
        report, error = attempt(lambda: reproduce(job) or read_report(str(tmp_path), "gella2017"))
        if error is None:
            assert way.startswith("bit") or content == whole or content == whole[:-1], way
            assert report == expected, way  # Another space or line end, or the name of the digest.
            assert report.begun.sections, way
        else:
            check_message(error, path.name, way)
        assert capfd.readouterr() == ("", ""), way


def test_damaged_copy_of_features(toy, write_run, tmp_path, monkeypatch, capfd):
    folder = write_run()
    monkeypatch.setattr("train.data.features.memory_limit", lambda: 1)
    where = {"device": "cpu", "memory_map": str(tmp_path / "map")}
    job = EvaluateJob(folder, toy.captions, toy.features, splits=("test",), **where)
    expected = evaluate(job)
    [path] = (tmp_path / "map").iterdir()
    values = np.load(path, mmap_mode="r").offset

    whole = path.read_bytes()
    for way, content in damages(whole, 0):
        if way.startswith(("bit", "zeros")):
            continue
        put(path, content)
        scores, error = attempt(lambda: evaluate(job))
        if error is None:
            assert scores == expected, way
            assert path.read_bytes() == whole, way
        else:
            assert way == "a folder"
            check_message(error, path.name, way)
    for place in range(values):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        put(path, bytes(flipped))
        assert evaluate(job) == expected, place
    assert capfd.readouterr() == ("", "")

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer

from schemas.console import events
from schemas.errors import DatasetError, InputError, UsageError
from schemas.made_from import MADE_FROM_NAME
from train.commands import options, sts
from train.evaluation.sts_scoring import StsJob
from train.evaluation.sts_scoring import sts as measure
from train.reports.tables import sts_report

ROWS = ["3.5\ten1 en2\ten2 en1", "1.0\ten7 en9\ten20", "\ten1\ten2", "0.5\ten12\ten3 en4", "4.8\ten5\ten5 en6"]


def tokenize(text, language, recipe, truecaser) -> list[str]:
    return text.split()


STS = ("sts-pairs.csv", "sts.csv", "sts.json", "sts.png")


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the command, mounted as an application mounts it; return its standard output and standard error."""
    for console in (options.console, options.notes):
        monkeypatch.setattr(console, "_width", 80)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(sts.app)

    def run(*arguments: object, obj=tokenize) -> tuple[str, str]:
        app(["sts", *map(str, arguments)], standalone_mode=False, obj=obj)
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


@pytest.fixture
def pairs(tmp_path) -> Path:
    (tmp_path / "pairs.tsv").write_text("\n".join(ROWS) + "\n")
    return tmp_path / "pairs.tsv"


def test_runs_and_data_are_told_apart_in_any_order(command, write_run, pairs):
    folders = write_run("one"), write_run("two", seed=1)
    expected = sts_report(measure(StsJob((str(pairs),), folders, device="cpu"), tokenize))
    for order in ((*folders, pairs), (pairs, *folders), (folders[0], pairs, *folders)):
        assert json.loads(command(*order, "--device", "cpu", "--json")[0]) == expected
    out, err = command(*folders, pairs, "--device", "cpu")
    assert "pairs: 1 pairs without a score are left out" in err
    assert "4 pairs" in out
    baseline = expected["systems"][0]["scores"]["pairs"]
    numbers = f"word overlap {baseline['pearson']:.1f} ({baseline['spearman']:.1f})"
    assert numbers in " ".join(out.split())


def test_without_runs_vectors_and_the_baseline_are_measured(command, pairs, tmp_path):
    words = tmp_path / "words.vec"
    words.write_text("en1 1 0\nen2 0 1\nen5 1 1\nen20 2 1\n")
    np.savez(tmp_path / "mine.npz", sentences=[cell for row in ROWS for cell in row.split("\t")[1:]], vectors=np.eye(10))
    report = json.loads(command(pairs, "--vectors", words, "--vectors", tmp_path / "mine.npz", "--json", obj=None)[0])
    assert [system["name"] for system in report["systems"]] == ["word overlap", str(words), str(tmp_path / "mine.npz")]
    assert report["systems"][2]["scores"]["pairs"] == {"pearson": None, "spearman": None}


def test_output_holds_numbers_pairs_and_a_picture(command, pairs, tmp_path):
    _, err = command(pairs, "--output", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MADE_FROM_NAME, *STS]
    assert (tmp_path / "out" / "sts.png").read_bytes().startswith(b"\x89PNG")
    assert f"{tmp_path}/out/sts.json" in err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    out, err = command(pairs, "--output", tmp_path / "out", "--json")
    assert out == (tmp_path / "out" / "sts.json").read_text()
    assert "out' is up to date" in err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    pairs.write_text(pairs.read_text().replace("\n", " \n", 1))
    assert "written: " in command(pairs, "--output", tmp_path / "out")[1]


def test_options_reach_the_job(command, write_run, pairs):
    folder, asked = write_run(), set()

    def listening(text, language, recipe, truecaser):
        asked.add((language, truecaser))
        return text.split()

    command(folder, pairs, "--language", "de", "--truecaser", "models", "--device", "cpu", obj=listening)
    assert asked == {("de", "models")}
    command(folder, pairs, "--tokenized", "--device", "cpu", obj=None)
    with pytest.raises(UsageError, match="--tokenized"):
        command(folder, pairs, "--device", "cpu", obj=None)


def test_mistakes_are_named(command, write_run, pairs, tmp_path):
    with pytest.raises(UsageError, match="there are no sentence pairs"):
        command(write_run())
    with pytest.raises(
        InputError, match=r"there is no file or folder '.*nothing': give sentence pairs of a shared task, or runs"
    ):
        command(pairs, tmp_path / "nothing")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "log.jsonl").touch()
    with pytest.raises(DatasetError, match=r"begun' is not a run: it holds no best\.pt"):
        command(pairs, tmp_path / "begun")
    with pytest.raises(DatasetError, match=r"cannot use '.*pairs\.tsv/out'"):
        command(tmp_path / "nothing", "--output", pairs / "out")


def test_events_count_pairs(command, pairs, monkeypatch):
    recorded = {}
    monkeypatch.setattr(events, "record", lambda **values: recorded.update(values))
    command(pairs)
    assert recorded["counts"] == {"pairs": 4, "systems": 1}

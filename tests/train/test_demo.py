"""The parts of the demo that need no scenes; tests/integration/test_demo.py has the rest."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from schemas.storage import Folder
from tests.builders import write_rows
from train.demo import train_demo
from train.runs.checkpoints import BEST, LAST
from train.runs.resuming import checkpoint_to_resume


def test_nothing_is_trained_if_no_scene_is_held_out(tmp_path):
    row = {
        "image_id": "a",
        "language": "en",
        "portion": "translation",
        "index": 0,
        "split": "train",
        "text": "x",
        "tokens": ["x"],
    }
    write_rows(tmp_path / "captions", "captions", [row])
    console, notes = Console(file=io.StringIO()), Console(file=io.StringIO(), width=200)
    train_demo(tmp_path, console=console, notes=notes, tokenize=lambda *_: [])
    assert "draw at least 10 with --scenes" in notes.file.getvalue()
    assert console.file.getvalue() == ""
    assert not (tmp_path / "run").exists()


def test_an_earlier_model_is_deleted(tmp_path, monkeypatch):
    rows = [
        {
            "image_id": split,
            "language": "en",
            "portion": "translation",
            "index": 0,
            "split": split,
            "text": "x",
            "tokens": ["x"],
        }
        for split in ("test", "train", "val")
    ]
    write_rows(tmp_path / "captions", "captions", rows)
    left = Folder(str(tmp_path / "run"))

    class TrainedError(Exception):
        pass

    def check(job, watch):
        assert checkpoint_to_resume(Folder(job.output), resume=False) is None
        raise TrainedError

    monkeypatch.setattr("train.demo.train", check)
    for names in ((BEST, LAST), (BEST,), (LAST,)):
        for name in names:
            left.write(name, b"of other scenes")
        with pytest.raises(TrainedError):
            train_demo(tmp_path, console=Console(file=io.StringIO()), notes=Console(file=io.StringIO()), tokenize=lambda *_: [])
        assert left.names() == []

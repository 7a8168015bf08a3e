"""What needs no scenes; tests/integration/test_demo.py has the rest."""

from __future__ import annotations

import io

import pyarrow as pa
from rich.console import Console

from schemas.fingerprints import Identity
from schemas.kinds import CAPTIONS
from schemas.output import Output, commit
from schemas.shards import write_shard
from schemas.storage import Folder
from train.demo import train_demo


def test_nothing_is_trained_where_no_scene_is_held_out(tmp_path):
    row = {
        "image_id": "a",
        "language": "en",
        "portion": "translation",
        "index": 0,
        "split": "train",
        "text": "x",
        "tokens": ["x"],
    }
    output = Output(folder=Folder(str(tmp_path / "captions")), identity=Identity(kind="captions", parameters={}))
    (name,) = output.names()
    table = pa.Table.from_pylist([row], schema=CAPTIONS)
    write_shard(output.folder, name, [table], schema=CAPTIONS, identity=output.identity)
    commit(output, statistics=lambda _: {}, libraries=())
    console, notes = Console(file=io.StringIO()), Console(file=io.StringIO(), width=200)
    train_demo(tmp_path, console=console, notes=notes, tokenize=lambda *_: [])
    assert "draw at least 10 with --scenes" in notes.file.getvalue()
    assert console.file.getvalue() == ""
    assert not (tmp_path / "run").exists()

"""A small plan of real commands."""

from __future__ import annotations

from pathlib import Path

import pytest

PLAN = """
description = "a small plan"

[paths]
table = "captions.tsv"

[steps.captions]
command = "captions"
source = "table"
format = "table"
shards = 2
workers = 1

[steps.vocabulary]
command = "vocabulary"
captions = "captions"
min-count = 1

[steps.encoded]
command = "encode"
captions = "captions"
vocabulary = "vocabulary"
workers = 1
"""
WORDS = ("a dog runs", "a cat sleeps", "the dog sees a cat", "two cats", "a bird sings", "the bird and the dog")


def write_table(path: Path, words=WORDS) -> None:
    rows = [f"image-{n}\ten\ttranslation\t0\ttrain\t{text}\n" for n, text in enumerate(words)]
    path.write_text("image_id\tlanguage\tportion\tindex\tsplit\ttext\n" + "".join(rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the plan and its table."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    write_table(tmp_path / "captions.tsv")
    return tmp_path

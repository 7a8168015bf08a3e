"""A small plan of real commands, whose steps run in forked processes: nothing is imported anew."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.processes import start

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


class ForkedSteps:
    """In place of `schemas.process.steps.run_command`.

    Args:
        before: called in each process, before its command.
    """

    def __init__(self, before: Callable[[], object] | None = None) -> None:
        self.before = before
        self.started: list[list[str]] = []

    def __call__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str] | None = None,
        read: Callable[[str], object] | None = None,
    ) -> int:
        self.started.append(list(words))
        with tempfile.TemporaryDirectory() as folder, start(*words, folder=Path(folder), before=self.before) as process:
            done = process.wait(600)  # The whole of Multi30K takes minutes on a busy machine.
        if read is None:
            print(done.stdout)
            print(done.stderr, file=sys.stderr)
        else:
            for line in done.stderr.splitlines():
                read(line)
        return done.returncode


def write_table(path: Path, words=WORDS) -> None:
    rows = [f"image-{n}\ten\ttranslation\t0\ttrain\t{text}\n" for n, text in enumerate(words)]
    path.write_text("image_id\tlanguage\tportion\tindex\tsplit\ttext\n" + "".join(rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the plan and its table."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    write_table(tmp_path / "captions.tsv")
    return tmp_path

"""A small plan of real commands, whose steps run in forked processes: nothing is imported anew."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.commands.build import build_plan
from pipelines.plans import building
from pipelines.plans.job import Build, BuildJob
from pipelines.plans.processes import Outcome, read_events
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


class ForkedStep:
    """In place of `pipelines.plans.processes.StepProcess`."""

    started: list[list[str]]
    before: Callable[[], object] | None = None  # Called in each process, before its command.

    def __init__(self, words, environment, holding=(), tell=lambda event: None) -> None:
        self.words, self.tell = words, tell

    def run(self) -> Outcome:
        self.started.append(list(self.words))
        with tempfile.TemporaryDirectory() as folder, start(*self.words, folder=Path(folder), before=self.before) as process:
            done = process.wait(600)  # The whole of Multi30K takes minutes on a busy machine.
            message, refused = read_events(done.stderr.encode().splitlines(keepends=True), self.tell)
        return Outcome(done.returncode, message, refused, done.stdout.encode())

    def send(self, number: int) -> None:
        raise AssertionError("nothing is stopped here")


def write_table(path: Path, words=WORDS) -> None:
    rows = [f"image-{n}\ten\ttranslation\t0\ttrain\t{text}\n" for n, text in enumerate(words)]
    path.write_text("image_id\tlanguage\tportion\tindex\tsplit\ttext\n" + "".join(rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the plan and its table."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    write_table(tmp_path / "captions.tsv")
    return tmp_path


@pytest.fixture
def built(folder, monkeypatch) -> Callable[..., tuple[Build, list[str]]]:
    """Build the plan; return what came of it and the commands that ran."""
    monkeypatch.setattr(building, "StepProcess", ForkedStep)

    def run(**options) -> tuple[Build, list[str]]:
        ForkedStep.started = []
        options.setdefault("plan", str(folder / "plan.toml"))
        build = build_plan(BuildJob(**options))
        return build, [words[0] for words in ForkedStep.started]

    return run

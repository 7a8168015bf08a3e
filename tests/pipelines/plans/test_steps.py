"""Every command that may be a step, in one plan: a second build writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from pipelines.commands import build as commands
from pipelines.commands.app import app
from pipelines.plans.plan import COMMANDS
from schemas.storage.folder import TEMPORARY_MARK
from tests.integration.processes import ForkedSteps
from tests.tiny_bert import make_tiny_bert
from tests.train.conftest import write_toy
from tests.train.trainings import SMALL

pytest.importorskip("transformers", reason="text-features needs the extra bert")
pytest.importorskip("sklearn", reason="figures needs the extra figures")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

PLAN = f"""
extends = "demo"

[paths]
one = "one.vec"
bert = "bert"
pairs = "pairs.tsv"
toy = "toy"

[steps.scenes]
scenes = 20

[steps.vocabulary]
min-count = 1

[steps.words]
command = "word-vectors"
vocabulary = "vocabulary"
files = ["one", "one", "one", "one"]
languages = ["en", "de", "fr", "cs"]

[steps.tokens]
command = "text-features"
captions = "captions"
model = "bert"
device = "cpu"

[steps.picture]
dataset = "features"
images = "scenes/images"
output = "picture.png"

[steps.run]
word-vectors = "words"
set = ["model.embed_dim=8", "model.word_dim=3", "model.word_vectors=finetuned", "schedule.eval_every_steps=2"]
max-steps = 4

[steps.comparison]
runs = ["run", "evaluation"]

[steps.embeddings]
command = "embed"
run = "run"
captions = "encoded"
features = "features"
device = "cpu"

[steps.drawings]
command = "figures"
run = "run"
captions = "encoded"
features = "features"
images = "scenes/images"
split = "train"
points = 10
device = "cpu"

[steps.similarity]
command = "sts"
places = ["run", "pairs"]
language = "en"
device = "cpu"

[steps.found]
command = "search"
run = "run"
query = ["a red circle", "ein blaues Quadrat"]
language = "en,de"
features = "features"
images = "scenes/images"
device = "cpu"

[steps.arrays]
command = "export"
dataset = "features"
format = "npy"

[steps.imported]
command = "import"
sources = ["arrays/features.npy"]
ids = ["arrays/ids.txt"]
name = "resnet50-pool"
shards = 2

[steps.rows]
command = "reproduce"
paper = "gella2017"
captions = "toy/encoded"
features = ["toy/features"]
vocabulary = "toy/vocabulary"
rows = ["vse-en"]
seeds = 1
set = {json.dumps([f"{key}={value}" for key, value in SMALL.items()])}
device = "cpu"
workers = 1
"""


TARGETS = ("words", "tokens", "picture", "comparison", "embeddings", "drawings", "similarity", "found", "imported", "rows")


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and modification time of every file but temporary ones and those that a command always draws again."""
    drawn = ("picture.png", "comparison.png", "found.html", "gella2017.md", "gella2017.json", "gella2017.png")
    paths = (
        path for path in folder.rglob("*") if path.is_file() and path.name not in drawn and TEMPORARY_MARK not in path.name
    )
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_second_build_runs_every_command_and_writes_nothing(tmp_path, monkeypatch):
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    words = ("a circle square", "ein kreis das", "un cercle une", "kruh a na")
    lines = "".join(f"{word} {number} {number % 3} 1\n" for number, word in enumerate(" ".join(words).split()))
    (tmp_path / "one.vec").write_text(lines, encoding="utf-8")
    make_tiny_bert(tmp_path / "bert")
    rows = ["4.0\ta red circle\ta small red circle", "1.0\ta blue square\ta large green circle", "2.5\ta circle\ta square"]
    (tmp_path / "pairs.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    write_toy(tmp_path / "toy", test="test_2016")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def build() -> list[str]:
        """Build the plan; return the commands that ran."""
        steps = ForkedSteps()
        monkeypatch.setattr("schemas.process.steps.run_command", steps)
        context = typer.Context(typer.main.get_command(app))
        commands.build_plan(str(tmp_path / "plan.toml"), targets=TARGETS, context=context)
        return sorted(words[0] for words in steps.started)

    assert build() == sorted(COMMANDS)
    before = files(tmp_path)
    assert build() == sorted(COMMANDS)
    assert files(tmp_path) == before

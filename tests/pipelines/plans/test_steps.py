"""Every command that may be a step, in one plan: a second build writes nothing, and a step that was killed continues."""

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
from tests.pipelines.plans.conftest import ENCODED
from tests.tiny_bert import make_tiny_bert
from tests.train.conftest import write_toy
from tests.train.trainings import SMALL

pytest.importorskip("transformers", reason="text-features needs the extra bert")
pytest.importorskip("sklearn", reason="figures needs the extra figures")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

PLAN = f"""
[paths]
one = "one.vec"
bert = "bert"
pairs = "pairs.tsv"
toy = "toy"

[steps.scenes]
command = "demo"
only = "scenes"
scenes = 20

[steps.captions]
command = "captions"
source = "scenes/captions.tsv"
format = "table"
shards = 2
workers = 1

{ENCODED}
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

[steps.features]
command = "features"
images = "scenes/images"
weights = "random:0"
device = "cpu"
shards = "like:captions"

[steps.picture]
command = "view"
dataset = "features"
images = "scenes/images"
image = "scene-00000"

[steps.run]
command = "train"
config = "demo"
captions = "encoded"
features = "features"
vocabulary = "vocabulary"
word-vectors = "words"
set = ["model.embed_dim=8", "model.word_dim=3", "model.word_vectors=finetuned", "schedule.eval_every_steps=2"]
max-steps = 4
device = "cpu"
tensorboard = false

[steps.evaluation]
command = "evaluate"
run = ["run"]
captions = "encoded"
features = "features"
splits = "test"
device = "cpu"

[steps.comparison]
command = "compare"
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


def build(folder: Path, steps: ForkedSteps, **options) -> list[str]:
    """Build the plan in a folder; return the commands that ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schemas.process.steps.run_command", steps)
        patch.setenv("OMP_NUM_THREADS", "1")
        context = typer.Context(typer.main.get_command(app))  # type: ignore[arg-type]
        commands.build_plan(str(folder / "plan.toml"), context=context, **options)
    return [words[0] for words in steps.started]


def write_inputs(folder: Path) -> None:
    (folder / "plan.toml").write_text(PLAN, encoding="utf-8")
    words = ("a circle square", "ein kreis das", "un cercle une", "kruh a na")
    lines = "".join(f"{word} {number} {number % 3} 1\n" for number, word in enumerate(" ".join(words).split()))
    (folder / "one.vec").write_text(lines, encoding="utf-8")
    make_tiny_bert(folder / "bert")
    rows = ["4.0\ta red circle\ta small red circle", "1.0\ta blue square\ta large green circle", "2.5\ta circle\ta square"]
    (folder / "pairs.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    write_toy(folder / "toy", test="test_2016")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A folder in which the plan was built."""
    folder = tmp_path_factory.mktemp("first")
    write_inputs(folder)
    assert sorted(build(folder, ForkedSteps())) == sorted(COMMANDS)
    return folder


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and modification time of every file but temporary ones and those that a command always draws again."""
    drawn = ("picture.png", "comparison.png", "found.html", "gella2017.md", "gella2017.json", "gella2017.png")
    paths = (
        path for path in folder.rglob("*") if path.is_file() and path.name not in drawn and TEMPORARY_MARK not in path.name
    )
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_second_build_runs_every_command_and_writes_nothing(first):
    before = files(first)
    assert sorted(build(first, ForkedSteps())) == sorted(COMMANDS)
    assert files(first) == before

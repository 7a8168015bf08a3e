"""Every command that may be a step, in one plan: nothing runs twice, and after a change only what depends on it."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.commands.build import build_plan, outlook_of_plan
from pipelines.plans import building
from pipelines.plans.catalogue import COMMANDS
from pipelines.plans.job import Build, BuildJob, LockError, StepError
from pipelines.plans.processes import Outcome
from schemas.dataset import open_dataset
from tests.integration.processes import start, wait_for
from tests.pipelines.plans.conftest import ForkedStep
from tests.tiny_bert import make_tiny_bert
from tests.train.conftest import write_toy
from tests.train.trainings import SMALL

pytest.importorskip("transformers", reason="token-features needs the extra bert")
pytest.importorskip("sklearn", reason="figures needs the extra figures")

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]

PLAN = f"""
[paths]
one = "one.vec"
other = "other.vec"
bert = "bert"
pairs = "pairs.tsv"
toy = "toy"

[steps.scenes]
command = "scenes"
count = 20

[steps.captions]
command = "captions"
source = "scenes/captions.tsv"
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

[steps.words]
command = "word-vectors"
vocabulary = "vocabulary"
files = ["one", "one", "one", "one"]
languages = ["en", "de", "fr", "cs"]

[steps.tokens]
command = "token-features"
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
set = ["model.embedding=8", "model.words=3", "model.word_vectors=trained", "schedule.evaluate_every=2"]
max-steps = 4
device = "cpu"
tensorboard = false

[steps.evaluation]
command = "evaluate"
run = ["run"]
captions = "encoded"
features = "features"
split = "test"
device = "cpu"

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
command = "tables"
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
OF_A_RUN = {"evaluate", "embed", "figures", "sts"}

Rebuilt = Callable[..., tuple[Build, list[str], Path]]


def build(folder: Path, *, step: type[ForkedStep] = ForkedStep, **options) -> tuple[Build, list[str]]:
    """Build the plan in a folder; return what came of it and the commands that ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "StepProcess", step)
        patch.setenv("OMP_NUM_THREADS", "1")
        ForkedStep.started = []
        done = build_plan(BuildJob(str(folder / "plan.toml"), **options))
    return done, [words[0] for words in ForkedStep.started]


def write_inputs(folder: Path) -> None:
    (folder / "plan.toml").write_text(PLAN, encoding="utf-8")
    for name, width in (("one", 3), ("other", 2)):
        words = ("a circle square", "ein kreis das", "un cercle une", "kruh a na")
        lines = "".join(f"{word} {number} {number % width} 1\n" for number, word in enumerate(" ".join(words).split()))
        (folder / f"{name}.vec").write_text(lines, encoding="utf-8")
    make_tiny_bert(folder / "bert")
    rows = ["4.0\ta red circle\ta small red circle", "1.0\ta blue square\ta large green circle", "2.5\ta circle\ta square"]
    (folder / "pairs.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    write_toy(folder / "toy", test="test_2016")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A folder in which the plan was built."""
    folder = tmp_path_factory.mktemp("first")
    write_inputs(folder)
    done, ran = build(folder)
    assert {end.done for end in done.steps} == {"made"}
    assert sorted(ran) == sorted(COMMANDS)
    return folder


@pytest.fixture
def rebuilt(first, tmp_path) -> Rebuilt:
    """Build the plan in a copy of the folder."""
    folder = tmp_path / "copy"
    shutil.copytree(first, folder)

    def run(**options) -> tuple[Build, list[str], Path]:
        return *build(folder, **options), folder / "build/plan"

    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nothing_runs_the_second_time_not_even_in_another_folder(rebuilt):
    done, ran, _ = rebuilt()
    assert ran == []
    assert {end.done for end in done.steps} == {"up to date"}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps.vocabulary.min-count", "2", {"vocabulary", "encode", "word-vectors", "train", *OF_A_RUN}),
        ("steps.words.files", '["one", "one", "other", "one"]', {"word-vectors", "train", *OF_A_RUN}),
        ("steps.tokens.sub-words", "first", {"token-features"}),
        ("steps.run.max-steps", "6", {"train", *OF_A_RUN}),
        ("steps.evaluation.split", "val", {"evaluate"}),
        ("steps.embeddings.splits", '"test"', {"embed"}),
        ("steps.drawings.seed", "1", {"figures"}),
        ("steps.similarity.tokenized", "true", {"sts"}),
        ("steps.arrays.l2", "true", {"export", "import"}),
        ("steps.imported.source", "elsewhere", {"import"}),
        ("steps.picture.image", "scene-00001", {"view"}),
        ("steps.rows.set", json.dumps([f"{key}={value}" for key, value in {**SMALL, "model.words": "5"}.items()]), {"tables"}),
        ("steps.tokens.batch-size", "2", set()),
        ("steps.rows.plot", "false", set()),
    ],
)
def test_after_a_change_only_its_dependants_run_and_back_again_nothing(rebuilt, key, value, expected):
    done, ran, _ = rebuilt(settings={key: value})
    assert set(ran) == expected
    assert {end.name for end in done.steps if end.done == "made"} == {
        step for step, command in commands().items() if command in expected
    }
    assert rebuilt(settings={key: value})[1] == []
    again, ran, _ = rebuilt()
    assert ran == []
    assert {end.name for end in again.steps if end.done == "taken back"} == {
        step for step, command in commands().items() if command in expected
    }


def commands() -> dict[str, str]:
    """Return the command of each step."""
    steps = PLAN.split("[steps.")[1:]
    return {text.partition("]")[0]: text.partition('command = "')[2].partition('"')[0] for text in steps}


def test_seeds_and_rows_of_a_table_are_added_to_those_that_are_there(rebuilt):
    folder = rebuilt()[2]
    results = folder / "rows/results/gella2017"
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.json")}
    assert len(before) == 1
    _, ran, _ = rebuilt(settings={"steps.rows.seeds": "2", "steps.rows.rows": '["vse-en", "pivot-sym"]'})
    assert ran == ["tables"]
    after = {path: path.stat().st_mtime_ns for path in results.rglob("*.json")}
    assert len(after) == 4
    assert {path: after[path] for path in before} == before
    assert not (folder / ".plan/earlier").exists()


class KilledStep(ForkedStep):
    """A step that is killed as soon as something is in its folder."""

    output: Path

    def run(self) -> Outcome:
        self.started.append(list(self.words))
        with start(*self.words, folder=self.output.parent / "killed") as process:
            wait_for(lambda: any(path.is_file() for path in self.output.rglob("*")) or not process.runs)
            process.send(signal.SIGKILL)
            return Outcome(process.wait().returncode, "killed", False, b"")


@pytest.mark.parametrize("name", ["tokens", "run", "embeddings", "drawings", "arrays", "imported", "rows"])
def test_a_step_that_is_killed_goes_on_to_the_same_result(first, rebuilt, monkeypatch, name):
    folder = rebuilt()[2]
    shutil.rmtree(folder / name)
    monkeypatch.setattr(KilledStep, "output", folder / name, raising=False)
    with pytest.raises(StepError, match=rf"step {name} \({commands()[name]}\) failed: killed"):
        build(folder.parents[1], step=KilledStep)
    done, ran, _ = rebuilt()
    assert ran == [commands()[name]]
    assert {end.name for end in done.steps if end.done == "made"} == {name}
    assert (folder.parents[1] / "plan.lock").read_bytes() == (first / "plan.lock").read_bytes()
    assert rebuilt()[1] == []


def test_the_lock_file_of_all_steps_holds_on_another_machine(first, tmp_path):
    """All is made anew in a folder of another name; a result that names its folder would differ."""
    folder = tmp_path / "another machine"
    folder.mkdir()
    write_inputs(folder)
    shutil.copy(first / "plan.lock", folder / "plan.lock")
    _, ran = build(folder, locked=True)
    assert sorted(ran) == sorted(COMMANDS)
    build(folder)
    assert (folder / "plan.lock").read_bytes() == (first / "plan.lock").read_bytes()
    assert not [text for text in (str(first), str(folder)) if text in (first / "plan.lock").read_text()]
    with pytest.raises(LockError, match=r"steps\.similarity: parameter language: locked 'en', here 'de'"):
        build(folder, locked=True, settings={"steps.similarity.language": "de"})


def test_reports_name_steps_and_inputs_not_where_they_lie(first):
    report = json.loads((first / "build/plan/similarity.json").read_text())
    assert [system["name"] for system in report["systems"]] == ["word overlap", "run"]
    assert [data["location"] for data in report["data"]] == ["pairs.tsv"]
    assert str(first) not in (first / "build/plan/evaluation.json").read_text()


def test_what_every_command_makes_can_be_used(first):
    folder = first / "build/plan"
    assert {open_dataset(folder / name).kind for name in ("words", "tokens")} == {"word-vectors", "token-features"}
    assert open_dataset(folder / "imported").numpy().tobytes() == open_dataset(folder / "features").numpy().tobytes()
    assert open_dataset(folder / "embeddings/captions").kind == "embeddings"
    assert (folder / "drawings/retrieval.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "evaluation.json").read_text())["scores"]
    assert "VSE" in (folder / "rows/gella2017.md").read_text()


def test_a_dry_run_knows_every_step(first):
    outlook = outlook_of_plan(BuildJob(str(first / "plan.toml")))
    assert {step.state for step in outlook.steps} == {"up to date"}
    changed = outlook_of_plan(BuildJob(str(first / "plan.toml"), settings={"steps.run.max-steps": "6"}))
    states = {step.name: step.state for step in changed.steps if step.state != "up to date"}
    assert states == {"run": "runs"} | dict.fromkeys(("evaluation", "embeddings", "drawings", "similarity"), "depends")


def test_a_model_in_a_cache_is_a_name_and_a_folder_a_location(first):
    settings = {"steps.tokens.model": "some/name"}
    tokens = {step.name: step for step in outlook_of_plan(BuildJob(str(first / "plan.toml"), settings=settings)).steps}[
        "tokens"
    ]
    assert tokens.why == "model changed"

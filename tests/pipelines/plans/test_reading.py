"""Plans as TOML: every mistake is named with its place, and names stand for steps and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.commands.steps import Commands
from pipelines.plans.reading import Reference, plan_names, read_plan
from schemas.errors import UsageError
from tests.pipelines.plans.conftest import PLAN

LINE = Commands()


def read(folder: Path, text: str = "", **options):
    if text:
        (folder / "plan.toml").write_text(text, encoding="utf-8")
    return read_plan(str(folder / "plan.toml"), LINE, **options)


def test_names_stand_for_steps_and_paths_and_the_rest_are_locations(folder):
    plan = read(folder)
    assert list(plan.steps) == ["captions", "vocabulary", "encoded"]
    assert plan.output == str(folder / "build/plan")
    assert plan.steps["captions"].inputs == {"source": (Reference("", str(folder / "captions.tsv")),)}
    assert plan.steps["encoded"].inputs == {
        "captions": (Reference("captions", ""),),
        "vocabulary": (Reference("vocabulary", ""),),
    }
    assert plan.steps["encoded"].needs == ("captions", "vocabulary")


def test_steps_stand_behind_those_that_they_need(folder):
    sections = PLAN.split("\n[steps.")
    plan = read(folder, sections[0] + "".join(f"\n[steps.{section}" for section in reversed(sections[1:])))
    assert list(plan.steps) == ["captions", "vocabulary", "encoded"]


def test_what_lies_below_a_step_and_a_folder_of_its_name(folder):
    text = '[steps.scenes]\ncommand = "scenes"\n[steps.a]\ncommand = "captions"\nformat = "table"\nsource = {}\n'
    assert read(folder, text.format('"scenes/captions.tsv"')).steps["a"].inputs["source"] == (
        Reference("scenes", "captions.tsv"),
    )
    assert read(folder, text.format('"./scenes"')).steps["a"].inputs["source"] == (Reference("", str(folder / "scenes")),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[step.a]\ncommand = "captions"', "has a key 'step': did you mean 'steps'"),
        ("[steps.a]\nformat = 'table'", r"steps\.a has no command: there are 'scenes', 'captions'"),
        ("[steps.a]\ncommand = 'caption'", r"steps\.a\.command is 'caption': did you mean 'captions'"),
        ("[steps.a]\ncommand = 'validate'", r"steps\.a\.command is 'validate'"),
        ("[steps.a]\ncommand = 'vocabulary'\nmin-cout = 3", r"steps\.a: vocabulary has no option .*'min-cout': did you mean"),
        ("[steps.a]\ncommand = 'vocabulary'\nmin-count = 'x'", r"steps\.a: 'min-count' is 'x', expected a whole number"),
        ("[steps.a]\ncommand = 'vocabulary'\nmin-count = 3\nmin_count = 3", "are the same: keep one"),
        ("[steps.a]\ncommand = 'vocabulary'\noverwrite = true", r"steps\.a\.overwrite is not for a plan: a plan keeps"),
        ("[steps.a]\ncommand = 'train'\nresume = true", r"steps\.a\.resume is not for a plan: a plan always goes on"),
        ("[steps.a]\ncommand = 'features'\ndry_run = true", r"steps\.a\.dry_run is not for a plan"),
        ("[steps.a]\ncommand = 'vocabulary'\nconfig = 'x'", r"steps\.a\.config is not for a plan"),
        ("[steps.a]\ncommand = 'vocabulary'\nsplits = []", r"steps\.a\.splits is empty"),
        ("[steps.a]\ncommand = 'vocabulary'\ncaptions = 'a'", "the steps need each other in a circle: a -> a"),
        (
            "[paths]\nphotos = ''\n[steps.a]\ncommand = 'features'\nimages = 'photos'",
            r"needs paths\.photos, which is not given",
        ),
        ("[paths]\nphotos = 'x'\n[steps.a]\ncommand = 'features'\nimages = 'photo'", "did you mean 'photos'"),
        ("[paths]\na = 'x'\n[steps.a]\ncommand = 'scenes'", "have one name"),
        ("[steps.a]\ncommand = 'scenes'\noutput = ''", r"steps\.a\.output is ''"),
        ("[steps.a]\ncommand = 'scenes'\nenvironment = 'x'", "expected a table of texts"),
        ("[steps.'a b']\ncommand = 'scenes'", "a step is called by letters"),
        ("description = 'nothing'", "it has no steps"),
        ("steps = 3", "steps is 3, expected a table"),
        ("[steps", "is not a plan"),
        ("extends = 'demmo'", "extends 'demmo', but there is no plan 'demmo': did you mean 'demo'"),
        ("extends = 'plan.toml'", "extends goes round in a circle"),
        ("extends = 'none.toml'", "but there is no file .*none.toml'"),
    ],
)
def test_a_mistake_is_named(folder, text, message, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=message):
        read_plan("plan.toml", LINE) if (folder / "plan.toml").write_text(text) else None


def test_settings_take_the_place_of_values_however_they_are_written(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    plan = read(folder, settings={"steps.vocabulary.min_count": "7", "paths.table": "other.tsv", "output": "out"})
    assert plan.steps["vocabulary"].values == {"min_count": 7}
    # What is given on the command line starts at the current folder.
    assert plan.steps["captions"].inputs["source"] == (Reference("", str(folder.parent / "other.tsv")),)
    assert plan.output == str(folder.parent / "out")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("vocabulary.min-count", "expected paths.NAME, steps.NAME.OPTION or output"),
        ("steps.vocabularies.min-count", "no step 'vocabularies': did you mean 'vocabulary'"),
    ],
)
def test_settings_that_are_not_understood(folder, key, message):
    with pytest.raises(UsageError, match=message):
        read(folder, settings={key: "1"})


def test_a_plan_extends_another(folder):
    (folder / "own.toml").write_text(
        'extends = "plan.toml"\n[steps.vocabulary]\nmin_count = 2\n[steps.more]\ncommand = "scenes"\n'
    )
    plan = read_plan(str(folder / "own.toml"), LINE)
    assert list(plan.steps) == ["captions", "vocabulary", "encoded", "more"]
    assert plan.steps["vocabulary"].values == {"min_count": 2}
    assert plan.steps["vocabulary"].needs == ("captions",)


def test_targets_that_are_not_there(folder):
    with pytest.raises(UsageError, match="has no step 'vocab': did you mean 'vocabulary'"):
        read(folder).chosen(["vocab"])


def test_the_plans_of_the_package_are_understood():
    assert plan_names() == ("coco", "demo", "flickr30k", "multi30k")
    for name in plan_names():
        plan = read_plan(name, LINE)
        assert plan.description
        assert plan.file is None


def test_multi30k_gives_what_the_readme_gives_command_by_command():
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    plan = read_plan("multi30k", LINE)
    for step in plan.steps.values():
        values = dict(step.values)
        words = LINE.words(step.command, {name: value for name, value in values.items() if name not in ("config",)})[1:]
        [line] = [line for line in readme.splitlines() if line.startswith(f"imagepivot {step.command} ") and "`" not in line]
        for word in words:
            option, _, value = word.partition("=")
            assert f"{option} {value}" in line
        assert values.get("config", "") in line
        options = {part for part in line.split() if part.startswith("--")}
        named = {word.partition("=")[0] for word in words} | {f"--{name}" for name in step.inputs}
        assert options <= named


@pytest.mark.parametrize(
    ("command", "values", "words"),
    [
        ("vocabulary", {"captions": ["a"], "output": "b", "min_count": 3}, ["vocabulary", "--min-count=3", "a", "b"]),
        ("import", {"sources": ["a", "b"], "output": "c", "name": "n"}, ["import", "--name=n", "a", "b", "c"]),
        ("train", {"config": "demo", "output": "o", "tensorboard": False}, ["train", "--no-tensorboard", "demo", "o"]),
        ("features", {"images": ["i"], "output": "o", "grid": True}, ["features", "--grid", "i", "o"]),
        (
            "captions",
            {"source": ["i"], "output": "o", "beam_flags": ["--runner=X"]},
            ["captions", "i", "o", "--", "--runner=X"],
        ),
    ],
)
def test_values_become_the_words_of_a_command_line(command, values, words):
    assert LINE.words(command, values) == words


def test_a_training_depends_on_every_value_of_its_configuration():
    values = LINE.configuration("train", {"config": "demo", "settings": ["model.embedding=32"], "max_steps": 7})
    assert values["model.embedding"] == "32"
    assert values["schedule.max_steps"] == "7"
    assert values["loss.hinges"] == '"sum"'
    assert LINE.configuration("captions", {}) == {}

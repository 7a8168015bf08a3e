"""Plans: read strictly, names replaced by locations, and run in order up to the first step that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from pipelines.commands.app import app
from pipelines.plans.plan import COMMANDS, StepError, build, command_lines, plan_names, read_plan, read_plan_table
from schemas.errors import UsageError
from tests.pipelines.plans.conftest import PLAN

LINE = typer.main.get_command(app).commands


def read(folder: Path, text: str = "", **options):
    if text:
        (folder / "plan.toml").write_text(text, encoding="utf-8")
    return read_plan(str(folder / "plan.toml"), LINE, **options)


def test_names_of_steps_and_paths_are_replaced_by_locations(folder):
    plan = read(folder)
    assert list(plan.steps) == ["captions", "vocabulary", "encoded"]
    assert plan.output == str(folder / "build/plan")
    assert plan.steps["captions"].values["source"] == str(folder / "captions.tsv")
    encoded = plan.steps["encoded"]
    assert [encoded.values[key] for key in ("captions", "vocabulary", "output")] == [
        str(folder / "build/plan" / name) for name in ("captions", "vocabulary", "encoded")
    ]
    assert encoded.dependencies == ("captions", "vocabulary")


def test_read_plan_sorts_steps_after_their_dependencies(folder):
    sections = PLAN.split("\n[steps.")
    plan = read(folder, sections[0] + "".join(f"\n[steps.{section}" for section in reversed(sections[1:])))
    assert list(plan.steps) == ["captions", "vocabulary", "encoded"]


def test_location_below_a_step_and_a_folder_of_its_name(folder):
    text = '[steps.scenes]\ncommand = "demo"\nonly = "scenes"\n[steps.a]\ncommand = "captions"\nformat = "table"\nsource = {}\n'
    below = read(folder, text.format('"scenes/captions.tsv"')).steps["a"]
    assert (below.values["source"], below.dependencies) == (str(folder / "build/plan/scenes/captions.tsv"), ("scenes",))
    beside = read(folder, text.format('"./scenes"')).steps["a"]
    assert (beside.values["source"], beside.dependencies) == (str(folder / "scenes"), ())


@pytest.mark.parametrize("output", ["x/../encoded", "file://{folder}/build/plan/encoded", "link"])
def test_two_steps_with_one_output_are_an_error(folder, output):
    (folder / "build/plan").mkdir(parents=True)
    (folder / "build/plan/link").symlink_to("encoded")
    step = "[steps.again]\ncommand = 'encode'\ncaptions = 'captions'\nvocabulary = 'vocabulary'\noutput = '{}'\n"
    with pytest.raises(UsageError, match=r"steps\.encoded and steps\.again both write '.*': give one of them another output"):
        read(folder, PLAN + step.format(output.format(folder=folder)))
    inside = read(folder, PLAN + step.format("encoded/again"))
    assert inside.steps["again"].output == str(folder / "build/plan/encoded/again")


def test_two_steps_with_one_output_in_a_store_are_an_error(folder):
    step = "[steps.again]\ncommand = 'encode'\ncaptions = 'captions'\nvocabulary = 'vocabulary'\noutput = 's3://b/encoded/'\n"
    with pytest.raises(UsageError, match="both write 's3://b/encoded"):
        read(folder, PLAN + step, output="s3://b")


def test_shards_like_those_of_another_step(folder):
    plan = read(folder, PLAN + "[steps.f]\ncommand = 'features'\nimages = 'photos/'\nshards = 'like:captions'\n")
    assert plan.steps["f"].values["shards"] == f"like:{folder}/build/plan/captions"
    assert plan.steps["f"].dependencies == ("captions",)


@pytest.mark.parametrize(("value", "is_name"), [("default", True), ("random:0", True), ("w.pth", False)])
def test_weights_are_a_name_or_a_location(folder, value, is_name):
    plan = read(folder, f"[steps.f]\ncommand = 'features'\nimages = 'photos/'\nweights = '{value}'\n")
    assert plan.steps["f"].values["weights"] == (value if is_name else str(folder / value))


def test_read_plan_sets_defaults_for_rerunning_commands(folder):
    features = "command = 'features'\nimages = 'photos/'\n"
    plan = read(folder, f"[steps.f]\n{features}[steps.g]\n{features}update = false\n")
    assert [step.values["update"] for step in plan.steps.values()] == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[step.a]\ncommand = "captions"', "has a key 'step': did you mean 'steps'"),
        ("[steps.a]\ncommand = 'caption'", r"steps\.a\.command is 'caption': did you mean 'captions'"),
        ("[steps.a]\ncommand = 'vocabulary'\nmin-cout = 3", r"steps\.a: vocabulary has no option .*'min-cout': did you mean"),
        (
            "[steps.a]\ncommand = 'vocabulary'\nmin-count = 'x'",
            r"--min-count is 'x', expected a whole number, written 20 \(in steps\.a\)",
        ),
        ("[steps.a]\ncommand = 'vocabulary'\nsplits = []", r"steps\.a\.splits is empty"),
        ("[steps.a]\ncommand = 'demo'\noutput = ''", r"steps\.a\.output is ''"),
        ("[paths]\na = 'x'\n[steps.a]\ncommand = 'demo'", "have the same name"),
        ("[steps.a]\ncommand = 'vocabulary'\ncaptions = 'a'", "the steps depend on each other: a -> a"),
        (
            "[paths]\nphotos = ''\n[steps.a]\ncommand = 'features'\nimages = 'photos'",
            r"steps\.a\.images needs paths\.photos, which is not set: give --set paths\.photos=",
        ),
        ("extends = 'demmo'", "extends 'demmo', but there is no plan 'demmo': did you mean 'demo'"),
        ("extends = 'plan.toml'", "extends itself: .*plan.toml"),
    ],
)
def test_mistake_is_named(folder, text, message, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=message):
        read_plan("plan.toml", LINE) if (folder / "plan.toml").write_text(text) else None


def test_settings_take_the_place_of_values_however_they_are_written(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    plan = read(folder, settings={"steps.vocabulary.min_count": "7", "paths.table": "other.tsv", "output": "out"})
    assert plan.steps["vocabulary"].values["min_count"] == 7
    # What is given on the command line starts at the current folder.
    assert plan.steps["captions"].values["source"] == "other.tsv"
    assert plan.output == "out"


def test_location_that_looks_like_an_option_is_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert read_plan("plan.toml", LINE, output="-o").output == f"{folder}/-o"


def test_plan_extends_another(folder):
    (folder / "own.toml").write_text(
        'extends = "plan.toml"\n[steps.vocabulary]\nmin_count = 2\n[steps.more]\ncommand = "demo"\n'
    )
    plan = read_plan(str(folder / "own.toml"), LINE)
    assert list(plan.steps) == ["captions", "vocabulary", "encoded", "more"]
    assert plan.steps["vocabulary"].values["min_count"] == 2
    assert plan.steps["vocabulary"].dependencies == ("captions",)


def test_plans_of_the_package_are_understood():
    assert plan_names() == ("coco", "demo", "flickr30k", "multi30k", "zero-shot")
    for name in plan_names():
        plan = read_plan(name, LINE)
        assert read_plan_table(name)["description"]
        assert {step.command for step in plan.steps.values()} <= COMMANDS.keys()


def test_multi30k_plan_has_the_commands_of_the_readme():
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    plan = read_plan("multi30k", LINE)
    for step in plan.steps.values():
        values = dict(step.values)
        # Locations are not, nor what lets a command be given again.
        elsewhere = tuple(f"--{name.replace('_', '-')}" for name in ("output", "update", "resume", *COMMANDS[step.command]))
        words = [
            word for word in LINE[step.command].words(values)[1:] if word.startswith("--") and not word.startswith(elsewhere)
        ]
        [line] = [line for line in readme.splitlines() if line.startswith(f"imagepivot {step.command} ") and "`" not in line]
        for word in words:
            option, _, value = word.partition("=")
            assert f"{option} {value}" in line
        assert values.get("config", "") in line
        options = {part for part in line.split() if part.startswith("--")}
        named = {word.partition("=")[0] for word in words} | {f"--{name}" for name in COMMANDS[step.command]}
        assert options <= named


def test_flags_for_beam_are_last_in_a_command_line():
    values = {"source": "i", "output": "o", "format": "table", "beam_flags": ("--runner=DirectRunner",)}
    assert LINE["captions"].words(values) == ["captions", "--format=table", "i", "o", "--", "--runner=DirectRunner"]


def test_build_runs_steps_in_order_with_their_own_variables(folder):
    plan = read(folder, PLAN + "environment = { OMP_NUM_THREADS = '1' }\n")
    steps, ran, told = plan.choose(["encoded"]), [], []

    def run(words, environment):
        ran.append((words[0], environment))
        return 0

    build(steps, command_lines(steps, LINE), run, told.append)
    assert ran == [("captions", {}), ("vocabulary", {}), ("encode", {"OMP_NUM_THREADS": "1"})]
    assert told[1] == (
        f"vocabulary: imagepivot vocabulary --min-count=1 {folder}/build/plan/captions {folder}/build/plan/vocabulary"
    )


def test_build_ends_at_the_first_failed_step_with_its_exit_code(folder):
    steps, ran = read(folder).choose([]), []

    def run(words, environment):
        ran.append(words[0])
        return 137 if words[0] == "vocabulary" else 0

    message = r"step vocabulary .* failed with exit code 137, these steps did not run: encoded"
    with pytest.raises(StepError, match=message) as error:
        build(steps, command_lines(steps, LINE), run)
    assert error.value.code == 137
    assert ran == ["captions", "vocabulary"]


def test_choose_adds_dependencies(folder):
    assert [step.name for step in read(folder).choose(["vocabulary"])] == ["captions", "vocabulary"]
    with pytest.raises(UsageError, match="has no step 'vocab': did you mean 'vocabulary'"):
        read(folder).choose(["vocab"])


def test_overwrite_is_for_the_command_of_a_step(folder):
    text = PLAN + "[steps.f]\ncommand = 'features'\nimages = 'photos/'\n[steps.run]\ncommand = 'train'\nconfig = 'demo'\n"
    steps = read(folder, text).choose([])
    words = command_lines(steps, LINE, ["vocabulary", "f"])
    assert [line[0] for line in words if "--overwrite" in line] == ["vocabulary", "features"]
    assert "--update" not in words[3]
    with pytest.raises(UsageError, match=rf"imagepivot train has no --overwrite; delete '{folder}/build/plan/run' instead"):
        command_lines(steps, LINE, ["run"])

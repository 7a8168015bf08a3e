"""Options of all commands, one by one: words, a file, the environment and a plan give the same, and refuse the same alike."""

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer

from extractors import ExtractorRequest
from pipelines.commands import app as cli
from pipelines.commands.binding import Option
from schemas.errors import UsageError

GROUP = typer.main.get_command(cli.app)
BOUND = GROUP.commands

# What an option needs beside it, and values of those whose form is their own.
NEEDS = {
    **{key: {"update": True} for key in ("keep_removed", "only_add", "check_content")},
    "targets": {"plan": "demo"},
    ("evaluate", "relevance"): {"annotations": "a.json"},
    **{key: {"gpu": "nvidia-l4"} for key in ("gpus_per_worker", "worker_machine", "gpu_driver")},
    "karpathy_key": {"karpathy": "dataset.json"},
    ("features", "max_regions"): {"min_regions": 5},
    ("export", "format"): {"captions": "c"},
    ("export", "captions"): {"format": "webdataset"},
    **{("export", key): {"format": "webdataset", "captions": "c"} for key in ("language", "portion", "splits")},
    **{("export", key): {"format": "scan", "captions": "c"} for key in ("split_names", "text", "captions_per_image")},
    ("export", "columns"): {"format": "tsv"},
    **{("text-features", key): {"model": "open_clip:ViT-B-32"} for key in ("weights", "prefix", "space")},
}
VALUES = {
    "task": "1/4",
    "max_failures": "2.5%",
    "languages": ("en", "de"),
    "gpu": "nvidia-l4",
    "delimiter": ";",
    "detach": None,
    "embeddings": None,
    "texts": None,
    "worker_machine": "m",
    "gpu_driver": "5xx",
    "name": "toy",
    "space": "toy",
    "lists": ("order.txt",),
    "note": ("job=1", "image=a,b"),
    "metrics_file": "night.prom",
}
NEEDED = {
    "captions": {"format": "multi30k"},
    "word-vectors": {"files": ("a", "b"), "languages": ("en", "de")},
    "export": {"format": "npy"},
    "train": {"config": "vsepp", "captions": "c", "features": "f", "vocabulary": "v"},
    "embed": {"captions": "c"},
    "search": {"features": "f"},
    "figures": {"run": "r", "output": "o"},
}
WRONG = {int: "seven", float: "much", bool: "maybe"}


@pytest.fixture(params=BOUND)
def command(request, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    return request.param


def options_of(command: str) -> dict[str, Option]:
    return BOUND[command].options


def other_than_default(option: Option) -> Any:
    """A value, as TOML has it, that is not the default; None for an option that does not go with those of this test."""
    if option.key in VALUES:
        value = VALUES[option.key]
        return option.text(value) if isinstance(value, tuple) and not option.is_list else value
    [hint, *_] = option.types
    if option.is_list and option.opt.completion:
        return tuple(option.opt.completion[:2])
    if option.is_list:
        return (f"{option.key}-1", f"{option.key}-2")
    if option.is_table:
        return {"image_id": "file", "text": "words"}
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != option.default)
    return {bool: not option.default, int: 7, float: 0.25, str: f"a {option.key}"}[hint]


def needed(command: str) -> dict[str, Any]:
    """Values that the command cannot do without."""
    must = {key: o for key, o in options_of(command).items() if o.opt.is_required or "MISSING" in repr(o.default)}
    return {key: other_than_default(option) for key, option in must.items()} | NEEDED.get(command, {})


def cases(command: str) -> dict[str, dict[str, Any]]:
    """Values by option: the needed ones, its own, and those that it needs."""
    found = {}
    for key, option in options_of(command).items():
        value = other_than_default(option)
        if value is None or option.opt.is_behind_dashes or key == "trust":
            continue
        beside = NEEDS.get((command, key), NEEDS.get(key, {}))
        found[key] = {**needed(command), **beside, key: value}
    return found


def words_of(command: str, values: dict[str, Any]) -> list[str]:
    options = options_of(command)
    words = {key: options[key].words(value if not isinstance(value, list) else tuple(value)) for key, value in values.items()}
    arguments = [word for key, option in options.items() if option.is_argument for word in words.get(key, ())]
    return [word for key in words if not options[key].is_argument for word in words[key]] + arguments


def parse(command: str, *words: str) -> Any:
    with typer.Context(GROUP, info_name="imagepivot") as parent:
        context = BOUND[command].make_context(command, list(words), parent=parent)
    return BOUND[command].arguments(context.params, ())


def toml_of(command: str, values: dict[str, Any]) -> str:
    return "".join(f"{options_of(command)[key].name} = {toml(value)}\n" for key, value in values.items())


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def from_file(command: str, values: dict[str, Any]) -> Any:
    Path("run.toml").write_text(toml_of(command, values), encoding="utf-8")
    trust = ("--trust",) if {"import_", "beam_flags"} & values.keys() else ()
    return parse(command, "--config", "run.toml", *trust)


def from_environment(command: str, values: dict[str, Any], monkeypatch) -> Any:
    with monkeypatch.context() as patch:
        for key, value in values.items():
            option = options_of(command)[key]
            text = str(value).lower() if isinstance(value, bool) else option.text(value)
            if isinstance(value, tuple) and (option.is_argument or option.opt.is_repeated):
                text = " ".join(value)
            patch.setenv(f"IMAGEPIVOT_{command}_{option.name}".upper().replace("-", "_"), text)
        return parse(command)


def from_plan(command: str, values: dict[str, Any]) -> Any:
    table = {options_of(command)[key].name: value for key, value in values.items()}
    table = {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}
    return parse(command, *BOUND[command].words(BOUND[command].convert(table, "a step"))[1:])


def takes_files(command: str) -> bool:
    return command != "train"  # It has files of its own.


def test_options_mean_the_same_in_words_files_environment_and_plans(command, monkeypatch):
    for key, values in cases(command).items():
        expected = parse(command, *words_of(command, values))
        assert expected == from_plan(command, values), key
        if takes_files(command):
            assert expected == from_file(command, values), key
        if not any(" " in item for value in values.values() if isinstance(value, tuple) for item in value):
            assert expected == from_environment(command, values, monkeypatch), key
        del values[key]
        if key not in needed(command):
            assert parse(command, *words_of(command, values)) != expected, key


def refusal(action, *arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        action(*arguments)
    return re.sub(r" \(in [^()]+\)$", "", str(caught.value))


def test_values_of_another_type_are_refused_alike(command, monkeypatch):
    for key, values in cases(command).items():
        option = options_of(command)[key]
        [hint, *_] = option.types
        wrong = "none of them" if get_origin(hint) is Literal else WRONG.get(hint)
        if wrong is None or option.types[1:]:
            continue
        values[key] = wrong
        message = refusal(from_plan, command, values)
        assert message.startswith(f"{option.label} is {wrong!r}, expected "), message
        if takes_files(command):
            assert refusal(from_file, command, values) == message
        assert refusal(from_environment, command, values, monkeypatch) == message
        if hint is not bool:
            assert refusal(parse, command, *words_of(command, values)) == message


def test_empty_value_is_named(command):
    for key, values in cases(command).items():
        option = options_of(command)[key]
        if not option.is_flag:
            words = words_of(command, {**values, key: ("",) if option.takes_several else ""})
            message = rf"^{option.label}(\.\.\.)? is '', expected a value: check the shell variable"
            with pytest.raises(UsageError, match=message):
                parse(command, *words)


@pytest.mark.parametrize(
    ("command", "key", "value", "message"),
    [
        ("vocabulary", "min_count", 0, "--min-count is 0, expected 1 or more"),
        ("encode", "max_length", 0, "--max-length is 0, expected 1 or more"),
        ("features", "batch_size", -1, "--batch-size is -1, expected 1 or more"),
        ("features", "workers", -1, "--workers is -1, expected 0 or more"),
        ("features", "min_regions", 50, "--min-regions is 50 and --max-regions 36, expected 1 <= min <= max <= 300"),
        ("captions", "shards", 0, "--shards is 0, expected 1 to 99,999"),
        ("text-features", "max_failures", "1.5", "--max-failures is '1.5', expected 0 or more, or a share"),
        ("train", "seed", -1, "--seed is -1, expected 0 or more"),
        ("train", "max_steps", 0, "--max-steps is 0, expected 1 or more"),
        ("evaluate", "folds", 0, "--folds is 0, expected 1 or more"),
        ("search", "top", 0, "--top is 0, expected 1 or more"),
        ("figures", "only", ("maps",), "--only names 'maps', expected some of retrieval, map, attention"),
    ],
)
def test_values_out_of_range_are_refused_alike(command, key, value, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {**needed(command), key: value}
    found = [refusal(parse, command, *words_of(command, values)), refusal(from_plan, command, values)]
    found += [refusal(from_environment, command, values, monkeypatch)]
    found += [refusal(from_file, command, values)] if takes_files(command) else []
    assert all(text.startswith(message) for text in found)


def test_refusal_names_the_place_of_the_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("min-count = 0\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"^--min-count is 0, expected 1 or more \(in 'run\.toml'\)$"):
        cli.app(["vocabulary", "c", "o", "--config", "run.toml"], standalone_mode=False)
    monkeypatch.setenv("IMAGEPIVOT_VOCABULARY_MIN_COUNT", "few")
    expected = (
        r"^--min-count is 'few', expected a whole number, written 20 \(in the environment: IMAGEPIVOT_VOCABULARY_MIN_COUNT"
    )
    with pytest.raises(UsageError, match=expected):
        cli.app(["vocabulary", "c", "o"], standalone_mode=False)


def test_argument_keeps_spaces_and_commas():
    job = parse("word-vectors", "v", " a, b.vec ", "o", "--languages", " en ")["job"]
    assert (job.files, job.languages) == ((" a, b.vec ",), ("en",))


@pytest.mark.parametrize(
    ("command", "key", "value"), [("search", "query", ("--import=own", "-5 degrees")), ("train", "config", "--import=own")]
)
def test_argument_of_a_plan_that_looks_like_an_option_is_an_argument(command, key, value):
    assert getattr(from_plan(command, {**needed(command), key: value})["job"], key) == value


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_commas_and_tabs_delimit_but_are_no_list(delimiter):
    assert parse("captions", "c.csv", "o", f"--delimiter={delimiter}")["job"].delimiter == delimiter
    assert from_plan("captions", {"source": "c.csv", "output": "o", "delimiter": delimiter})["job"].delimiter == delimiter
    with pytest.raises(UsageError, match=r"^--languages is .*, expected a value"):
        parse("captions", "c.csv", "o", f"--languages={delimiter}")


def test_options_of_the_extractor_reach_its_request():
    job = parse("features", "i", "o", "--extractor", "timm:resnet18", "--unpooled", "--dtype=float16")["job"]
    assert job.extractor == ExtractorRequest("timm:resnet18", unpooled=True, dtype="float16")


@pytest.mark.parametrize("value", [2**70, -(2**70), "nan", "inf", "-inf", "1e400", "1" * 5000])
def test_numbers_without_a_meaning_are_refused_for_every_option(command, value, monkeypatch):
    for key, option in options_of(command).items():
        if not ({int, float} if isinstance(value, str) else {int}).intersection(option.types):
            continue
        refused = rf"^{option.label} is (?!below)"
        values = {**needed(command), key: value}
        for action, arguments in (
            (parse, words_of(command, values)),
            (from_environment, ({**values, key: str(value)}, monkeypatch)),
        ):
            with pytest.raises(UsageError, match=refused):
                action(command, *arguments)
        if isinstance(value, int) and takes_files(command):
            with pytest.raises(UsageError, match=refused):
                from_file(command, values)
            with pytest.raises(UsageError, match=refused):
                from_plan(command, values)
        elif float in option.types and value in ("nan", "inf", "-inf"):
            with pytest.raises(UsageError, match=refused):
                BOUND[command].arguments({**values, key: float(value)}, ())

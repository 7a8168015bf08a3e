"""Jobs from the words of a command, a file, the environment and a plan: the same from all of them."""

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer

from pipelines.commands import app as cli
from pipelines.commands.binding import job_from
from pipelines.commands.build import Commands
from pipelines.jobs import EncodeJob, TokenFeaturesJob, VocabularyJob, WordVectorsJob
from schemas.errors import UsageError
from schemas.options import Opt

JOBS = {"vocabulary": VocabularyJob, "encode": EncodeJob, "word-vectors": WordVectorsJob, "token-features": TokenFeaturesJob}


@pytest.fixture(scope="module")
def group():
    return typer.main.get_command(cli.app)


@pytest.fixture(params=JOBS)
def command(request) -> str:
    return request.param


@pytest.fixture
def job(command):
    """A job none of whose values is a default."""
    kind = JOBS[command]
    hints = get_type_hints(kind)
    return kind(**{field.name: other_than(field.default, hints[field.name], field.name) for field in fields(kind)})


def other_than(default: Any, hint: Any, name: str) -> Any:
    if get_origin(hint) is tuple:
        return (f"{name}-1", f"{name}-2")
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != default)
    return {bool: True, int: 7, str: f"a {name}"}[hint]


def declared(job) -> dict[str, tuple[Any, str, bool]]:
    """Of each field its value, the name of its option, and whether it is an argument."""
    hints = get_type_hints(type(job), include_extras=True)
    found = {}
    for field in fields(job):
        _, option = get_args(hints[field.name])
        is_argument = field.default is MISSING and not option.is_option
        found[field.name] = getattr(job, field.name), (option.name or field.name).replace("_", "-"), is_argument
    return found


@pytest.fixture
def parsed(group, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def parse(*words: str):
        with typer.Context(group, info_name="imagepivot") as parent:
            context = group.commands[command].make_context(command, list(words), parent=parent)
        return job_from(JOBS[command], context.params)

    return parse


def words_of(job) -> list[str]:
    options, arguments = [], []
    for value, name, is_argument in declared(job).values():
        if is_argument:
            arguments += value if isinstance(value, tuple) else [value]
        elif isinstance(value, bool):
            options += [f"--{name}"] * value
        else:
            options += [f"--{name}", ",".join(value) if isinstance(value, tuple) else str(value)]
    return [*options, *arguments]


def toml_of(job) -> str:
    values = ((name, list(value) if isinstance(value, tuple) else value) for value, name, _ in declared(job).values())
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values)


def test_the_words_of_a_command(job, parsed):
    assert parsed(*words_of(job)) == job


def test_a_file(job, parsed):
    Path("run.toml").write_text(toml_of(job), encoding="utf-8")
    assert parsed("--config", "run.toml") == job


def test_the_environment(job, command, parsed, monkeypatch):
    for value, name, is_argument in declared(job).values():
        text = "true" if value is True else str(value)
        if isinstance(value, tuple):
            text = (" " if is_argument else ",").join(value)
        monkeypatch.setenv(f"IMAGEPIVOT_{command}_{name}".upper().replace("-", "_"), text)
    assert parsed() == job


def test_a_step_of_a_plan(group, job, command, parsed):
    line = Commands(group.commands)
    table = {name: list(value) if isinstance(value, tuple) else value for value, name, _ in declared(job).values()}
    values = line.convert(command, table, "the step")
    assert parsed(*line.words(command, values)[1:]) == job


def test_what_is_not_given_is_the_default(job, parsed):
    given = {field.name: field.default for field in fields(job) if field.default is not MISSING}
    needed = [f"--{name}" for field, (_, name, is_argument) in declared(job).items() if field not in given and not is_argument]
    words = words_of(job)
    options = [word for flag in needed for word in words[words.index(flag) :][:2]]
    arguments = words[len(words) - sum(len(listed(value)) for value, _, is_argument in declared(job).values() if is_argument) :]
    assert parsed(*options, *arguments) == replace(job, **given)


def listed(value) -> list[str]:
    return list(value) if isinstance(value, tuple) else [value]


def test_a_value_of_another_type_is_refused_in_a_file_and_in_a_plan(group, job, command, parsed):
    table = {name: list(value) if isinstance(value, tuple) else value for value, name, _ in declared(job).values()}
    for name, value in table.items():
        wrong = "seven" if isinstance(value, int) and not isinstance(value, bool) else 7
        message = rf"{name} is {wrong!r}, expected "
        with pytest.raises(UsageError, match=f"the step: {message}"):
            Commands(group.commands).convert(command, table | {name: wrong}, "the step")
        lines = (f"{key} = {json.dumps(item)}\n" for key, item in (table | {name: wrong}).items())
        Path("run.toml").write_text("".join(lines), encoding="utf-8")
        with pytest.raises(UsageError, match=f"'run.toml': {message}"):
            parsed("--config", "run.toml")


def test_an_argument_keeps_spaces_and_commas():
    values = {
        "vocabulary": "v",
        "files": [" a, b.vec "],
        "output": "o",
        "languages": " en ",
        "overwrite": False,
        "verify": False,
    }
    job = job_from(WordVectorsJob, values)
    assert (job.files, job.languages) == ((" a, b.vec ",), ("en",))


def test_every_field_declares_its_option(command):
    for hint in get_type_hints(JOBS[command], include_extras=True).values():
        assert get_origin(hint) is Annotated
        _, option = get_args(hint)
        assert isinstance(option, Opt)
        assert option.help.endswith(".")
    assert not any(isinstance(hint, UnionType) for hint in get_type_hints(JOBS[command]).values())

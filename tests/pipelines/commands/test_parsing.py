import shlex
import sys

import pytest
import typer

from pipelines.commands import app as cli
from pipelines.commands.parsing import Command
from schemas.errors import UsageError


@pytest.fixture(scope="module")
def commands():
    return typer.main.get_command(cli.app).commands


def test_every_command_refuses_empty_values(commands):
    assert all(isinstance(command, Command) for command in commands.values())
    assert len(commands) > 10


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("features '' out", "IMAGES"),
        ("features photos ''", "OUTPUT"),
        ("features photos out --extractor ''", "--extractor"),
        ("features photos out --class-names ' '", "--class-names"),
        ("captions '' out --format table", "SOURCE"),
        ("captions source out --format table --languages ,", "--languages"),
        ("vocabulary captions ''", "OUTPUT"),
        ("encode captions '' out", "VOCABULARY"),
        ("import '' out --name x", r"SOURCES\.\.\."),
        ("import x.npy '' out --name x", r"SOURCES\.\.\."),
        ("import x.npy out --name x --ids ''", "--ids"),
        ("export data '' --format npy", "OUTPUT"),
        ("diff a ''", "B"),
        ("inspect ''", "DATASET"),
        ("validate ''", "DATASET"),
        ("view data photos --image '' -o x.png", "--image"),
        ("demo ''", "OUTPUT"),
        ("train ''", "CONFIG"),
        ("train vsepp out --captions ''", "--captions"),
        ("evaluate '' --captions c --features f", r"RUN\.\.\."),
        ("embed run '' --features f", "OUTPUT"),
        ("search run '' --features f", "TEXT"),
        ("tables gella2017 '' --captions c --features f --vocabulary v", "OUTPUT"),
    ],
)
def test_an_empty_value_is_named(commands, words, name):
    command, *arguments = shlex.split(words)
    with pytest.raises(UsageError, match=rf"^{name} is '[ ,]?', expected a value: check the shell variable"):
        commands[command].make_context(command, arguments)


def test_options_that_are_not_given_may_be_empty(commands):
    context = commands["captions"].make_context("captions", ["source", "out", "--format", "table"])
    assert (context.params["languages"], context.params["splits"]) == ("", "")


def test_completing_refuses_nothing(commands):
    assert commands["features"].make_context("features", ["", ""], resilient_parsing=True).params["images"] == ""


def test_the_exit_code_is_that_of_wrong_usage(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["imagepivot", "features", "", "out"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "Error: IMAGES is '', expected a value: check the shell variable that it comes from\n"

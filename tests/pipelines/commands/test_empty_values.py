import re
from typing import Literal, get_args, get_origin

import pytest
import typer

from pipelines.commands import app as cli
from schemas.errors import UsageError

COMMANDS = typer.main.get_command(cli.app).commands


def words_of(command, empty) -> list[str]:
    """Words that give all that is needed, and one of the values empty."""
    words = []
    for parameter in command.params:
        choices = (
            get_args(parameter.type_descriptor.annotation)
            if get_origin(parameter.type_descriptor.annotation) is Literal
            else ()
        )
        value = "" if parameter is empty else next(iter(choices), "x")
        if parameter.param_type_name == "argument":
            words.append(value)
        elif parameter.required or parameter is empty:
            words += [max(parameter.opts, key=len), value]
    return words


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_value_is_named(name):
    command = COMMANDS[name]
    for parameter in command.params:
        if parameter.type_descriptor.annotation in (str, list[str]):
            label = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name.upper()
            with pytest.raises(UsageError, match=rf"^{re.escape(label)} is '', expected a value: check the shell variable"):
                command.make_context(name, words_of(command, parameter))


def test_options_that_are_not_given_may_be_empty():
    context = COMMANDS["captions"].make_context("captions", ["source", "out", "--format", "table"])
    assert (context.params["languages"], context.params["splits"]) == ("", "")


def test_completing_refuses_nothing():
    assert COMMANDS["features"].make_context("features", ["", ""], resilient_parsing=True).params["images"] == ""

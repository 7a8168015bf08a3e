"""Flex Template: launch parameters (``docker/metadata.json``) as a command line.

Google's launcher runs `main` with ``--NAME=VALUE`` for parameters and for its own flags, without positional
arguments or ``--``. Our parameters go before ``--``, all others after it.
"""

import sys
from collections.abc import Mapping, Sequence

from pipelines.commands.app import main as run_command
from pipelines.commands.binding import Option
from pipelines.commands.data import captions, encode, features, vocabulary
from schemas.errors import ImagepivotError, UsageError

COMMANDS = {str(command.name): command for command in (captions, vocabulary, encode, features)}
"""Commands for a launch: those with pipelines."""

LEFT_OUT = {
    "dry-run": "for a person at a terminal",
    **dict.fromkeys(("log-json", "log-seconds", "metrics-file"), "about outputs of the launching machine"),
    **dict.fromkeys(("workers", "task"), "for runs without a runner"),
    "import": "the launcher has no modules of users",
    **dict.fromkeys(("detach", "start-timeout"), "about the wait for a job, and the launcher does not wait"),
    **dict.fromkeys(
        ("overwrite", "verify", "update", "keep-removed", "only-add", "accept-unknown", "check-content", "retry-failed"),
        "about the content of OUTPUT, and a launch builds a dataset from its beginning",
    ),
}
"""Options without a parameter, with the reason."""


def parameters_of(command: str) -> Mapping[str, Option]:
    """Return the options of a command by template parameter."""
    options = COMMANDS[command].options
    return {key: each for key, each in options.items() if not (each.name in LEFT_OUT or each.opt.is_behind_dashes)}


def command_line(arguments: Sequence[str]) -> list[str]:
    """Convert the arguments of a launch to the words of a command.

    Raises:
        UsageError: the command is missing; an argument is positional; a parameter is unknown, missing, given twice or empty.
    """
    values, flags = _split_flags(arguments)
    command = values.pop("command", "")
    if command not in COMMANDS:
        raise UsageError(f"the parameter 'command' is {command!r}, expected one of {', '.join(map(repr, COMMANDS))}")
    words, options = [], []
    own = parameters_of(command)
    for name, option in own.items():
        value = values.pop(name, None)
        if option.is_argument:
            if value is None:
                raise UsageError(f"the parameter {name!r} is missing, and {command} needs it")
            words.append(value)
        elif value is not None and option.is_flag:
            if value not in ("true", "false"):
                raise UsageError(f"the parameter {name!r} is {value!r}, expected true or false")
            options += [option.label] * (value == "true")
        elif value is not None:
            options.append(f"{option.label}={value}")
    if values:
        raise UsageError(f"{command} has no parameter {next(iter(values))!r}: it has {', '.join(map(repr, own))}")
    return [command, *words, *options, "--", *flags]


def _split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split arguments into values of our parameters and flags for Beam."""
    parameters = {"command"}.union(*map(parameters_of, COMMANDS))
    values: dict[str, str] = {}
    flags = []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise UsageError(f"the launch has the argument {argument!r}, expected parameters: --NAME=VALUE")
        if name not in parameters:
            flags.append(argument)
        elif not equals:
            raise UsageError(f"the launch has {argument!r} without a value, expected {argument}=VALUE")
        elif name in values:
            raise UsageError(f"the parameter {name!r} is given twice, as {values[name]!r} and as {value!r}: keep one")
        else:
            values[name] = value
    return values, flags


def main() -> None:
    """Run the command of a launch."""
    try:
        sys.argv = ["imagepivot", *command_line(sys.argv[1:])]
    except ImagepivotError as error:
        sys.exit(f"Error: {error}")
    run_command()

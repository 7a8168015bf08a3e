"""The parameters of Dataflow's Flex Template, and the command that the parameters of a launch mean.

Google's launcher starts `main` with ``--NAME=VALUE`` for each parameter and for each of its own flags, and with nothing else:
no argument stands alone, and there is no ``--``. What is a parameter of ours goes before ``--``, everything else behind it.

``python -m pipelines.commands.flex_template`` prints the metadata with which a template is built, ``docker/metadata.json``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.text import Text

from pipelines.commands.app import app
from pipelines.commands.app import main as run_command
from pipelines.commands.configuration import COMMAS, NUMBERS, PAIRS, keys_of, plain_hint
from schemas.errors import ImagepivotError, UsageError

__all__ = ["COMMANDS", "LEFT_OUT", "command_line", "main", "metadata"]

COMMANDS = ("captions", "vocabulary", "encode", "features")
"""What a launch can do: the commands that run pipelines."""

LEFT_OUT = {
    **dict.fromkeys(("config", "log-json", "json", "list-extractors", "dry-run"), "for whoever sits before the command"),
    **dict.fromkeys(("workers", "task"), "for runs without a runner"),
    **dict.fromkeys(("detach", "start-timeout", "max-failures"), "about the wait for a job, and the launcher does not wait"),
    **dict.fromkeys(
        ("overwrite", "check", "update", "keep-removed", "only-add", "check-content", "retry-failed"),
        "about what OUTPUT holds, and a template makes a dataset from its beginning",
    ),
    "beam-flags": "Google's launcher gives its own",
}
"""Options that are no parameters, with the reason."""

_COMMAND = "command"
_LOCATION = r"(gs|s3)://[^/\s]+/\S.*"
_FILE = rf"({_LOCATION}|/\S.*)"  # Also one in the image of the workers and the launcher.
_WORD = r"[^\s,]+"
_PATTERNS = {
    **dict.fromkeys(("source", "output", "captions", "vocabulary", "images"), _LOCATION),
    **dict.fromkeys(("truecaser", "class-names", "attribute-names"), _FILE),
    **dict.fromkeys(("recipe", "language", "extractor", "worker-machine"), _WORD),
    "weights": rf"(default|random:[0-9]+|https?://\S+|{_FILE})",
    "device": r"(auto|cpu|cuda|cuda:[0-9]+)",
    "precision": r"(fp32|tf32|bf16|fp16)",
    "gpu": r"[a-z0-9-]+",
    "delimiter": r'(tab|[^\s"])',
    "shards": r"([0-9]+|auto|like:\S.*)",
}
"""What the values of options may be whose annotation does not say it."""

_BEAM = {
    "sdk_container_image": (r"[a-z0-9][a-zA-Z0-9._:/@-]*", "Image of the workers, which holds the version that launches them."),
    "disk_size_gb": (r"[0-9]+", "Disk of a worker in GB; 100 with GPUs."),
}
"""Flags of Beam's that gcloud has no option for: patterns and descriptions."""


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the template.

    Attributes:
        key: name of the option or argument, with hyphens.
        commands: the commands that have it, each with whether it is an argument.
        pattern: what its value is.
        help: what it is for.
        is_flag: whether it is an option without a value.
        choices: the values of an option that has few.
    """

    key: str
    commands: Mapping[str, bool]
    pattern: str
    help: str
    is_flag: bool
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name, with underscores."""
        return self.key.replace("-", "_")

    def metadata(self) -> dict[str, Any]:
        """Return its part of the metadata: what only some commands have is shown with them."""
        described = _metadata(self.name, self.pattern, self.help, choices=self.choices)
        if [command for command, is_argument in self.commands.items() if is_argument] == list(COMMANDS):
            return {**described, "isOptional": False}
        return {**described, "parentName": _COMMAND, "parentTriggerValues": list(self.commands)}


def metadata() -> dict[str, Any]:
    """Return the metadata of the template, as ``gcloud dataflow flex-template build --metadata-file`` takes it."""
    command = _metadata(_COMMAND, f"({'|'.join(COMMANDS)})", "What to do.", choices=COMMANDS)
    return {
        "name": "imagepivot",
        "description": "Prepares data for multilingual image-sentence retrieval: captions and images in, Parquet shards out.",
        "parameters": [
            {**command, "isOptional": False},
            *(parameter.metadata() for parameter in _parameters().values()),
            *(_metadata(name, *described) for name, described in _BEAM.items()),
        ],
    }


def _metadata(name: str, pattern: str, help: str, *, choices: Sequence[str] = ()) -> dict[str, Any]:  # noqa: A002
    kind: dict[str, Any] = {"paramType": "TEXT"}
    if choices:
        kind = {"paramType": "ENUM", "enumOptions": [{"value": choice, "label": choice} for choice in choices]}
    return {
        "name": name,
        "label": name.replace("_", " "),
        "helpText": help,
        "isOptional": True,
        "regexes": [f"^{pattern}$"],
        **kind,
    }


@cache
def _parameters() -> Mapping[str, _Parameter]:
    """Return the parameters besides the command, by name."""
    found: dict[str, _Parameter] = {}
    for command in COMMANDS:
        for parameter in _parameters_of(command):
            earlier = found.get(parameter.name)
            commands = {**(earlier.commands if earlier else {}), **parameter.commands}
            text = parameter.help if earlier is None or earlier.help == parameter.help else f"{earlier.help} {parameter.help}"
            found[parameter.name] = _Parameter(
                parameter.key, commands, parameter.pattern, text, parameter.is_flag, parameter.choices
            )
    return found


def _parameters_of(name: str) -> list[_Parameter]:
    """Return the parameters of a command."""
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    hints = get_type_hints(command.callback, include_extras=True)
    options = {parameter.name: parameter for parameter in command.params}
    found = []
    for key, (internal, _) in keys_of(command).items():
        if key in LEFT_OUT:
            continue
        hint, marks = plain_hint(hints[internal])
        option = options[internal]
        choices = tuple(get_args(hint)) if get_origin(hint) is Literal else ()
        found.append(
            _Parameter(
                key,
                {name: not option.opts[0].startswith("-")},
                _pattern(key, hint, marks, choices),
                Text.from_markup(option.help or "").plain,
                hint is bool,
                choices,
            )
        )
    return found


def _pattern(key: str, hint: Any, marks: Sequence[Any], choices: Sequence[str]) -> str:
    """Return the pattern of an option's values.

    Raises:
        KeyError: its annotation does not say what they are, and nothing else does.
    """
    if choices:
        return f"({'|'.join(choices)})"
    if COMMAS in marks:
        return rf"{_WORD}(,{_WORD})*"
    if PAIRS in marks:
        return r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*"
    if NUMBERS not in marks and hint in (bool, int, float):
        return {bool: "(true|false)", int: "[0-9]+", float: r"[0-9]+(\.[0-9]+)?"}[hint]
    return _PATTERNS[key]


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the words of the command that a launch means.

    Args:
        arguments: what the launcher was started with, ``--NAME=VALUE`` each.

    Raises:
        UsageError: there is no command, or it has no such parameter; an argument stands alone; a value is not what it may be.
    """
    values, flags = _sorted(arguments)
    command = values.pop(_COMMAND, "")
    if command not in COMMANDS:
        raise UsageError(f"the parameter 'command' is {command!r}, expected one of {', '.join(map(repr, COMMANDS))}")
    words, options = [], []
    own = [parameter.name for parameter in _parameters_of(command)]
    for name in own:
        parameter = _parameters()[name]
        is_argument = parameter.commands[command]
        if name not in values:
            if is_argument:
                raise UsageError(f"the parameter {name!r} is missing, and {command} needs it: expected {parameter.pattern!r}")
            continue
        value = values.pop(name)
        if not re.fullmatch(parameter.pattern, value):
            raise UsageError(f"the parameter {name!r} is {value!r}, expected {parameter.pattern!r}")
        if is_argument:
            words.append(value)
        elif not parameter.is_flag:
            options.append(f"--{parameter.key}={value}")
        elif value == "true":
            options.append(f"--{parameter.key}")
    if values:
        raise UsageError(f"{command} has no parameter {next(iter(values))!r}: it has {', '.join(map(repr, own))}")
    return [command, *words, *options, "--", *flags]


def _sorted(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of our parameters, and the flags for Beam."""
    values: dict[str, str] = {}
    flags = []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise UsageError(f"the launch has an argument {argument!r}, expected parameters alone: --NAME=VALUE")
        if name != _COMMAND and name not in _parameters():
            flags.append(argument)
        elif not equals:
            raise UsageError(f"the launch has {argument!r} without a value, expected {argument}=VALUE")
        elif name in values:
            raise UsageError(f"the parameter {name!r} is given twice, as {values[name]!r} and as {value!r}: keep one")
        else:
            values[name] = value
    return values, flags


def main() -> None:
    """Run the command that this process's arguments mean."""
    try:
        sys.argv = ["imagepivot", *command_line(sys.argv[1:])]
    except ImagepivotError as error:
        sys.exit(f"Error: {error}")
    run_command()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(metadata(), indent=2) + "\n")

"""Values of a command from a TOML file or the environment, for what its command line leaves out.

The command line comes before the environment, the environment before the file, the file before the defaults. A file has the
keys of one command, or one section per command. It is read strictly: whatever is not understood is an error that names the file
and the key.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from pipelines.commands import parsing
from pipelines.commands.option import Option
from schemas.conversion import convert, did_you_mean, parse_toml
from schemas.errors import UsageError

__all__ = ["BEAM_FLAGS", "COMMAS", "NUMBERS", "PAIRS", "Command", "Config", "convert_options", "keys_of", "plain_hint"]

COMMAS = "values separated by commas"
"""Marks the annotation of an option whose text is a list; a file may give it a list."""

PAIRS = "pairs OURS=THEIRS separated by commas"
"""Marks the annotation of an option whose text is a list of pairs; a file may give it a list or a table."""

NUMBERS = "a number, or text"
"""Marks the annotation of an option whose text may be a number; a file may give it a whole number."""

BEAM_FLAGS = "beam_flags"
"""Key of the flags for Beam, which a command line has behind ``--``."""

_PREFIX = "IMAGEPIVOT"
_TAKES: dict[Any, Any] = {COMMAS: str | list[str], PAIRS: str | list[str] | dict[str, str], NUMBERS: str | int}


class Command(parsing.Command):
    """A command whose options and arguments may also stand in the environment, as ``IMAGEPIVOT_COMMAND_OPTION``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            # Named one by one: a common prefix would leave arguments out, and IMAGEPIVOT_VERSION would be --version.
            parameter.envvar = "_".join((_PREFIX, self.name or "", _key(parameter))).upper().replace("-", "_")
            parameter.show_envvar = False  # type: ignore[attr-defined]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the command line. What stands behind ``--`` is for Beam, never an argument of the command."""
        end = args.index("--") if ctx.allow_extra_args and "--" in args else len(args)
        try:
            super().parse_args(ctx, args[:end])
        except typer.BadParameter as error:
            error.message += _origin(ctx, error.param)
            raise
        ctx.args = [*ctx.args, *args[end + 1 :]]
        return ctx.args


def _load(context: typer.Context, location: str) -> str:
    """Make the values of a file the defaults of a command."""
    if location:
        context.default_map = _values(location, context)
    return location


Config = Annotated[
    str,
    typer.Option(
        "--config", is_eager=True, callback=_load, show_default=False, help="TOML file with values for what is not given here."
    ),
]
"""The option that names a file; it is read before the other options get their values."""


def _values(location: str, context: typer.Context) -> dict[str, Any]:
    """Read and check a file; return the values of a command by the names of its parameters.

    Raises:
        UsageError: the file cannot be read, or something in it is not understood.
    """
    name = context.info_name or ""
    commands = getattr(context.parent and context.parent.command, "commands", {name: context.command})
    configurable = {key: command for key, command in commands.items() if _has_config(command)}
    table = _read(location)
    keys = keys_of(context.command)
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    # No option that takes a table has the name of a command.
    sections = {key: value for key, value in tables.items() if key in configurable or key not in keys}
    for key in sections:
        if key not in configurable:
            raise UsageError(f"{location!r} has a section [{key}], which is no command{did_you_mean(key, configurable)}")
    if not sections:
        return convert_options(table, context.command, f"{location!r}", name)
    for key in table:
        if key not in sections:
            raise UsageError(f"{location!r} has the key {key!r} beside sections: move it into the section of its command")
    converted = {
        key: convert_options(section, configurable[key], f"{location!r}, section [{key}]", key)
        for key, section in sections.items()
    }
    if name not in converted:
        raise UsageError(f"{location!r} has no section [{name}]: its sections are {', '.join(f'[{key}]' for key in sections)}")
    return converted[name]


def _read(location: str) -> dict[str, Any]:
    from schemas.storage.folder import Folder
    from schemas.storage.locations import check_location, is_remote
    from schemas.storage.storage_errors import storage_errors

    check_location(location)
    try:
        with storage_errors(location):
            if is_remote(location):
                parent, _, name = location.rpartition("/")
                data = Folder(parent).read(name)
            else:
                data = Path(os.path.expanduser(location)).read_bytes()  # noqa: PTH111 -- any name after ~
    except FileNotFoundError:
        raise UsageError(f"there is no file {location!r}, which --config names: check the path") from None
    try:
        # Editors of other systems begin a file with a byte order mark and end its lines with CR LF.
        return parse_toml(data.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{location!r} is not TOML: {error}") from error
    except UsageError as error:
        raise UsageError(f"{location!r} is {error}") from error


def convert_options(table: Mapping[str, Any], command: Any, place: str, name: str) -> dict[str, Any]:
    """Check a table of values, and return them as the parameters of a command take them.

    Args:
        table: values of TOML by the keys of the command.
        command: the command.
        place: the file and the section, for messages.
        name: name of the command, for messages.

    Raises:
        UsageError: a key is unknown or given twice, or a value has another type.
    """
    if not hasattr(command.callback, "options"):
        return _convert_unbound(table, command, place, name)
    options = options_by_key(command)
    found: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key, value in table.items():
        plain = key.replace("_", "-")
        if plain not in options:
            raise UsageError(f"{place}: {name} has no option or argument {key!r}{did_you_mean(plain, options)}")
        if plain in found:
            raise UsageError(f"{place}: {found[plain]!r} and {key!r} are the same: keep one")
        found[plain] = key
        try:
            values[options[plain].key] = options[plain].file_value(value)
        except UsageError as error:
            raise UsageError(f"{error} (in {place})") from None
    return values


def options_by_key(command: Any) -> dict[str, Option]:
    """Return the options of a command by their keys in files."""
    return {option.name: option for option in command.callback.options.values()}


def _convert_unbound(table: Mapping[str, Any], command: Any, place: str, name: str) -> dict[str, Any]:
    keys = keys_of(command)
    found: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key, value in table.items():
        plain = key.replace("_", "-")
        if plain not in keys:
            raise UsageError(f"{place}: {name} has no option or argument {key!r}{did_you_mean(plain, keys)}")
        if plain in found:
            raise UsageError(f"{place}: {found[plain]!r} and {key!r} are the same: keep one")
        found[plain] = key
        parameter, hint = keys[plain]
        values[parameter] = _convert(value, hint, f"{place}: {key}")
    return values


def keys_of(command: Any) -> dict[str, tuple[str, Any]]:
    """Return the keys of a command: the name of the parameter and its annotation, without ``None``, of each."""
    if hasattr(command.callback, "options"):
        return {key: (option.key, option.hint) for key, option in options_by_key(command).items()}
    hints = get_type_hints(command.callback, include_extras=True)
    return {
        _key(parameter): (parameter.name, hints[parameter.name])
        for parameter in command.params
        if parameter.name in hints and "--config" not in parameter.opts
    }


def _key(parameter: Any) -> str:
    """Return the name of an option without its dashes, or that of an argument."""
    long = [option for option in parameter.opts if option.startswith("--")]
    return (long[0].removeprefix("--") if long else parameter.name).replace("_", "-")


def _has_config(command: Any) -> bool:
    return any(parameter.name == "config" and "--config" in parameter.opts for parameter in command.params)


def plain_hint(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation without ``None`` and marks, and the marks."""
    marks: tuple[Any, ...] = ()
    while (origin := get_origin(hint)) in (Annotated, Union, types.UnionType):
        if origin is Annotated:
            marks += hint.__metadata__
        [hint, *_] = [part for part in get_args(hint) if part is not type(None)]
    return hint, marks


def _convert(value: Any, hint: Any, place: str) -> Any:
    """Return a value as an option of this annotation takes it."""
    hint, marks = plain_hint(hint)
    hint = next((_TAKES[mark] for mark in marks if mark in _TAKES), hint)
    value = convert(value, hint, place)
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if not isinstance(value, list) or get_origin(hint) is list:
        return value
    if split := [part for part in value if "," in part]:
        raise UsageError(f"{place} holds {split[0]!r}, but a comma separates values: make it several")
    return ",".join(value)


def _origin(context: typer.Context, parameter: Any) -> str:
    """Return the end of a message about a value that the command line does not show."""
    source = getattr(context.get_parameter_source(parameter.name), "name", "") if parameter is not None else ""
    if source == "ENVIRONMENT":
        return f" (in the environment: {parameter.envvar} is {os.environ.get(parameter.envvar, '')!r})"
    if source == "DEFAULT_MAP":
        return f" (in the file {context.params.get('config', '')!r})"
    return ""

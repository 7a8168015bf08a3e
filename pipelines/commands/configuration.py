"""Values of a command from a TOML file or the environment, for what its command line leaves out.

The command line comes before the environment, the environment before the file, the file before the defaults. A file has the
keys of one command, or one section per command. It is read strictly: whatever is not understood is an error that names the file
and the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from pipelines.commands.option import Option
from schemas.console import events
from schemas.conversion import did_you_mean, parse_toml
from schemas.errors import UsageError

BEAM_FLAGS = "beam_flags"
"""Key of the flags for Beam, which a command line has behind ``--``."""

_PREFIX = "IMAGEPIVOT"


class Command(TyperCommand):
    """A command whose options and arguments may also stand in the environment, as ``IMAGEPIVOT_COMMAND_OPTION``.

    None of them takes an empty value. This mostly comes from a shell variable that is not set, and would otherwise stand for the
    current folder, or for everything.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            # Named one by one: a common prefix would leave arguments out, and IMAGEPIVOT_VERSION would be --version.
            parameter.envvar = "_".join((_PREFIX, self.name or "", _key(parameter))).upper().replace("-", "_")
            parameter.show_envvar = False  # type: ignore[attr-defined]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. What stands behind ``--`` is for Beam, never an argument of the command.

        Raises:
            UsageError: a value that was given is empty.
        """
        end = args.index("--") if ctx.allow_extra_args and "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        if not ctx.resilient_parsing:
            output = ctx.params.get("output")
            events.record(command=self.name, output=None if output is None else str(output))
            for parameter in self.params:
                source = ctx.get_parameter_source(parameter.name)
                if source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP"):  # A file may hold an empty list.
                    _refuse_empty(parameter, ctx.params.get(parameter.name))
        ctx.args = [*ctx.args, *args[end + 1 :]]
        return ctx.args


def _refuse_empty(parameter: Any, value: object) -> None:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, str) and not item.strip(" \t\n,"):
            is_option = parameter.param_type_name == "option"
            name = parameter.opts[0] if is_option else parameter.metavar or parameter.name.upper()
            advice = ", or leave the option out for its default" if is_option else ""
            raise UsageError(f"{name} is {item!r}, expected a value: check the shell variable that it comes from{advice}")


def _load(context: typer.Context, location: str) -> str:
    """Make the values of a file the defaults of a command."""
    if location:
        context.default_map = _values(location, context)
    return location


Config = Annotated[
    str,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_load,
        show_default=False,
        help="TOML file with values for what is not given here.",
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
    keys = options_by_key(context.command)
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


def _key(parameter: Any) -> str:
    """Return the name of an option without its dashes, or that of an argument."""
    long = [option for option in parameter.opts if option.startswith("--")]
    return (long[0].removeprefix("--") if long else parameter.name).replace("_", "-")


def _has_config(command: Any) -> bool:
    return any(parameter.name == "config" and "--config" in parameter.opts for parameter in command.params)

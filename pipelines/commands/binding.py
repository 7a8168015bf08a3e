"""Commands whose options are fields of jobs, or parameters of their own, declared by `schemas.options.Opt`.

A command line and the environment give text, a file of options and a plan give values of TOML; `Option` converts both, with one
message. The command line comes before the environment, the environment before the file, the file before the defaults. A file has
the keys of one command, or one section per command. It is read strictly: whatever is not understood is an error that names the
file and the key.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from pipelines.commands.signals import spare_pandas
from schemas.console import events
from schemas.conversion import alternatives_of, convert, convert_text, default_of, did_you_mean, hints_of, parse_toml
from schemas.errors import UsageError
from schemas.options import Opt

_METAVARS = {str: "TEXT", int: "INT", float: "NUM", bool: ""}
_MOST = 8  # Longest list of choices in the column of types.


@dataclass(frozen=True)
class Option:
    """An option or argument of a command; its default is ``MISSING`` where the command needs it."""

    key: str
    hint: Any
    opt: Opt
    default: Any = MISSING

    @cached_property
    def types(self) -> list[Any]:
        """The types that the value may have."""
        return [hint for hint in alternatives_of(self.hint) if hint is not NoneType]

    @property
    def is_argument(self) -> bool:
        """Whether the value stands alone on a command line."""
        return self.opt.is_argument or (self.default is MISSING and not self.opt.is_option)

    @property
    def is_list(self) -> bool:
        """Whether the value is a tuple."""
        return get_origin(self.types[0]) is tuple

    @property
    def takes_several(self) -> bool:
        """Whether a command line gives the values one by one, not separated by commas."""
        return self.opt.is_repeated or (self.is_list and self.is_argument)

    @property
    def is_table(self) -> bool:
        """Whether the value is a mapping."""
        return get_origin(self.types[0]) is Mapping

    @property
    def is_flag(self) -> bool:
        """Whether the option has no value on a command line."""
        return self.types == [bool]

    @property
    def name(self) -> str:
        """Name of the option without dashes, or of the argument: its key in files."""
        return self.key.replace("_", "-")

    @property
    def label(self) -> str:
        """Name of the option or argument in messages."""
        return self.key.upper() if self.is_argument else f"--{self.name}"

    def value(self, raw: Any) -> Any:
        """Return the value that a command line or the environment gives as text; one of a file is converted already.

        Raises:
            UsageError: the text is not of the type, a number is too small, or a value that the command needs is missing.
        """
        if raw is MISSING or (raw is None and self.opt.is_required):
            raise UsageError(f"{self.label} is missing: {self.help}")
        if self.takes_several:
            return tuple(raw or ())
        value = convert_text(raw, self.hint, self.label) if isinstance(raw, str) else raw
        return self._check(value)

    def file_value(self, raw: Any) -> Any:
        """Return the value that a table of TOML gives.

        Raises:
            UsageError: it has another type, or a number is too small.
        """
        hint: Any = self.hint
        if self.is_table:
            hint = str | list[str] | dict[str, str]
        elif self.is_list:
            hint = list[str] if self.takes_several or self.opt.is_behind_dashes else str | list[str]
        elif self._is_parsed:
            hint = str
        value = convert(raw, hint, self.label)
        if self.is_list and isinstance(value, list):
            split = [part for part in value if "," in part] if hint != list[str] else []
            if split:
                raise UsageError(f"{self.label} holds {split[0]!r}, but a comma separates values: make it several")
            return tuple(value)
        if self.is_table and isinstance(value, list):
            value = ",".join(value)
        if isinstance(value, str) and (self.is_list or self.is_table or self._is_parsed):
            return convert_text(value, self.hint, self.label)
        return self._check(value)

    def text(self, value: Any) -> str:
        """Return a value as a command line takes it."""
        if isinstance(value, Mapping):
            return ",".join(f"{key}={item}" for key, item in value.items())
        return ",".join(value) if isinstance(value, tuple) else str(value)

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that give a value."""
        if self.opt.is_behind_dashes:
            return []  # `Command.words` puts them behind the dashes.
        if self.is_flag:
            return [f"--{self.name}"] if value else [f"--no-{self.name}"] * (self.default is True)
        texts = list(value) if isinstance(value, tuple) and self.takes_several else [self.text(value)]
        return texts if self.is_argument else [f"--{self.name}={text}" for text in texts]

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that typer reads."""
        hint: Any = list[str] if self.takes_several else bool if self.is_flag else str
        if self.is_argument:
            declared: Any = typer.Argument(
                help=self.help,
                metavar=self.key.upper() + "..." * self.takes_several,
                parser=_as_given,
                autocompletion=self._completion,
                show_default=bool(self.default is not MISSING and self.default),
            )
        else:
            negative = f"/--no-{self.name}" if self.default is True else ""
            declared = typer.Option(
                f"--{self.name}{negative}",
                *filter(None, [self.opt.short]),
                help=self.help,
                metavar=self.metavar,
                parser=_as_given,
                autocompletion=self._completion,
                rich_help_panel=self.opt.panel or None,
                show_default=self.default not in (MISSING, ()),
            )
        if self.default is MISSING or self.opt.is_required:
            default: Any = inspect.Parameter.empty
        elif self.default is None or self.takes_several:
            default = None
        else:
            default = self.default if self.is_flag else self.text(self.default)
        hint = hint | None if default is None else hint
        return inspect.Parameter(
            self.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, declared]
        )

    @property
    def _is_parsed(self) -> bool:
        return hasattr(self.types[0], "parse")

    @property
    def metavar(self) -> str:
        """Form of the value in help."""
        if self.opt.metavar:
            return self.opt.metavar
        if self._choices:
            choices = "|".join(self._choices)
            return choices if len(choices) <= _MOST else "NAME"
        if self.is_list and not self.opt.is_repeated:
            return "A,B"
        return "K=V" if self.is_table else _METAVARS.get(self.types[0], "TEXT")

    @property
    def help(self) -> str:
        """Its sentence of help, with the choices that the sentence does not name."""
        text = self.opt.help
        if self.metavar == "NAME" and not all(choice in text for choice in self._choices):
            text = f"{text.removesuffix('.')}: {', '.join(self._choices)}."
        return text

    @property
    def _choices(self) -> tuple[str, ...]:
        return get_args(self.types[0]) if get_origin(self.types[0]) is Literal else ()

    @property
    def _completion(self) -> Callable[[str], list[str]] | None:
        values = self.opt.completion or self._choices

        def complete(incomplete: str) -> list[str]:
            return [value for value in (values() if callable(values) else values) if value.startswith(incomplete)]

        return complete if values else None

    def _check(self, value: Any) -> Any:
        if self.opt.least is not None and value is not None and not value >= self.opt.least:
            raise UsageError(f"{self.label} is {value}, expected {self.opt.least:g} or more")
        return value


T = TypeVar("T")


def options_of(job: Any, default: Any = MISSING, *, is_optional: bool = False) -> Iterator[Option]:
    """Yield the options of a dataclass; those of the dataclasses in its fields are among them.

    Args:
        job: a dataclass whose fields are annotated with `Opt`, or are dataclasses; fields that are neither are no options.
        default: an instance whose values are the defaults, or ``MISSING`` for those of the fields.
        is_optional: whether the dataclass is built only if one of its options is given: their default is None then.
    """
    for field, hint, inner, opt in _fields(job):
        value = getattr(default, field.name) if is_dataclass(default) else default_of(field)
        if inner is not None:
            none = NoneType in get_args(hint)
            yield from options_of(inner, MISSING if value is None else value, is_optional=is_optional or none)
        elif opt is not None:
            if is_optional:
                value = False if _plain(hint) is bool else None
            yield option_of(field.name, hint, opt, value)


def job_from(job: type[T], values: Mapping[str, Any], default: Any = MISSING) -> T:
    """Return the job that the values of options ask for.

    Args:
        job: a dataclass, see `options_of`.
        values: the values by the keys of the options; others are ignored.
        default: an instance, whose values other fields have.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.
    """
    arguments = {}
    for field, hint, inner, opt in _fields(job):
        value = getattr(default, field.name) if is_dataclass(default) else default_of(field)
        if inner is not None:
            is_optional = NoneType in get_args(hint)
            arguments[field.name] = inner_job(inner, values) if is_optional else job_from(inner, values, value)
        elif opt is not None:
            arguments[field.name] = values[_key(field.name, opt)]
        elif is_dataclass(default):
            arguments[field.name] = value
    return job(**arguments)


def inner_job(job: type[T], values: Mapping[str, Any]) -> T | None:
    """Return a dataclass that may be None: it is, if none of its options is given."""
    declared = options_of(job, is_optional=True)
    given = {option.key: option for option in declared if values[option.key] is not None and values[option.key] is not False}
    if not given:
        return None
    arguments = {}
    for field, hint, _, opt in _fields(job):
        assert opt is not None
        key = _key(field.name, opt)
        if key in given:
            arguments[field.name] = values[key]
        elif default_of(field) is MISSING:
            first, needed = next(iter(given.values())).label, f"--{option_of(field.name, hint, opt, None).name}"
            raise UsageError(f"{first} needs {needed}: give {needed}, too")
    return job(**arguments)


def _fields(job: Any) -> Iterator[tuple[Any, Any, Any, Opt | None]]:
    """Yield each field with its type, the dataclass that is its type if it has no declaration, and its declaration."""
    for field in fields(job):
        hint = hints_of(job)[field.name]
        yield field, hint, dataclass_in(hint), opt_of(hint)


def dataclass_in(hint: Any) -> Any:
    """Return the dataclass that an annotation names; None for ``Annotated``."""
    if get_origin(hint) is Annotated:
        return None
    return next((kind for kind in alternatives_of(hint) if is_dataclass(kind)), None)


def option_of(name: str, hint: Any, opt: Opt, default: Any) -> Option:
    """Return the option of a field or parameter."""
    return Option(_key(name, opt), _plain(hint), opt, default)


def _key(name: str, opt: Opt) -> str:
    return (opt.name or name).replace("-", "_")


def opt_of(hint: Any) -> Opt | None:
    """Return the declaration in an annotation."""
    if get_origin(hint) is not Annotated:
        return None
    return next((mark for mark in hint.__metadata__ if isinstance(mark, Opt)), None)


def _plain(hint: Any) -> Any:
    """Return the type that a user gives, which is text where a caller from Python may also give an object."""
    if any(getattr(kind, "_is_protocol", False) for kind in alternatives_of(hint)):
        return str
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _as_given(value: Any) -> Any:
    """Leave the conversion of a value to `Option`, which gives the same message for all places."""
    return value


BEAM_FLAGS = "beam_flags"
"""Key of the flags for Beam, which a command line has behind ``--``."""


class Command(TyperCommand):
    """A function as a command; its options may also stand in the environment, as ``IMAGEPIVOT_COMMAND_OPTION``, and in a file.

    The program starts with all commands and runs one, so that only that one makes its options.

    No option takes an empty value. This mostly comes from a shell variable that is not set, and would otherwise stand for the
    current folder, or for everything.

    Args:
        function: takes dataclasses and parameters that are annotated with `Opt`, and at will typer's ``context``. The default of a
            dataclass gives those of its fields.
        example: words of the command, for the end of its help.
    """

    def __init__(self, function: Callable[..., Any], example: str) -> None:
        name, paragraphs = function.__name__.strip("_").replace("_", "-"), (inspect.getdoc(function) or "").split("\n\n")
        help_ = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)  # The terminal wraps lines.
        epilog = f"Example: imagepivot {example}"
        super().__init__(name, callback=function, help=help_, epilog=epilog, rich_markup_mode="rich")
        del self.params  # See below.

    @cached_property
    def _declared(self) -> tuple[dict[str, Option], dict[str, Callable[[Mapping[str, Any]], Any]]]:
        """The options by key, and by parameter of the function what makes its argument of their values."""
        function: Any = self.callback
        hints = get_type_hints(function, include_extras=True)
        declared: list[Option] = []
        builders: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
            if (job := dataclass_in(hints[name])) is not None:
                is_optional = NoneType in get_args(hints[name])
                builders[name] = partial(inner_job, job) if is_optional else partial(job_from, job, default=default)
                declared += options_of(job, MISSING if is_optional else default, is_optional=is_optional)
            elif (opt := opt_of(hints[name])) is not None:
                declared.append(option_of(name, hints[name], opt, default))
                builders[name] = itemgetter(declared[-1].key)
        return {option.key: option for option in declared}, builders

    @property
    def options(self) -> dict[str, Option]:
        """The options by key."""
        return self._declared[0]

    @cached_property
    def params(self) -> list[Any]:  # type: ignore[override]
        """The parameters that the parser reads."""

        def declared() -> None: ...

        parameters = [option.parameter() for option in self.options.values() if not option.opt.is_behind_dashes]
        if "config" not in self.options:
            parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default="", annotation=_Config))
        declared.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        declared.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        made = typer.Typer(add_completion=False)
        made.command()(declared)
        params = typer.main.get_command(made).params
        for parameter in params:
            # Named one by one: a common prefix would leave arguments out, and IMAGEPIVOT_VERSION would be --version.
            parameter.envvar = f"IMAGEPIVOT_{self.name}_{parameter.name}".upper().replace("-", "_")
            parameter.show_envvar = False  # type: ignore[attr-defined]
        return params

    @property
    def allow_extra_args(self) -> bool:  # type: ignore[override]
        """Whether words may follow ``--``: the flags for Beam."""
        return BEAM_FLAGS in self.options

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command, and leave those behind ``--`` to Beam.

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

    def invoke(self, ctx: Any) -> Any:
        """Run the function.

        Raises:
            UsageError: a value is not understood; it says where it stands if that is not the command line.
        """
        if ctx.params.get("log_json"):
            events.start()  # Where the environment or a file asks for events: words are looked at before they are parsed.
        function: Any = self.callback
        given = {"context": ctx} if "context" in inspect.signature(function).parameters else {}
        try:
            given |= self.arguments(ctx.params, flags_of(ctx))
            spare_pandas()
            return function(**given)
        except UsageError as error:
            if origins := _origins(ctx, self.options, str(error)):
                raise UsageError(f"{error}{origins}") from None
            raise

    def arguments(self, values: Mapping[str, Any], flags: tuple[str, ...]) -> dict[str, Any]:
        """Return what the function takes, from the values of options and the flags for Beam.

        Raises:
            UsageError: a value is not understood, or two contradict each other.
        """
        options, builders = self._declared
        converted = {
            key: flags if option.opt.is_behind_dashes else option.value(values.get(key, option.default))
            for key, option in options.items()
        }
        return {name: build(converted) for name, build in builders.items()}

    def convert(self, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Check a table of TOML, and return its values by the keys of their options; messages name its place.

        Raises:
            UsageError: a name is unknown or given twice, or a value has another type.
        """
        options = {option.name: option for option in self.options.values()}
        names: dict[str, str] = {}
        values: dict[str, Any] = {}
        for name, value in table.items():
            plain = name.replace("_", "-")
            if plain not in options:
                raise UsageError(f"{place}: {self.name} has no option or argument {name!r}{did_you_mean(plain, options)}")
            if plain in names:
                raise UsageError(f"{place}: {names[plain]!r} and {name!r} are the same: keep one")
            names[plain] = name
            try:
                values[options[plain].key] = options[plain].file_value(value)
            except UsageError as error:
                raise UsageError(f"{error} (in {place})") from None
        return values

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """Return the words of a command line that give values: options, then arguments in their order, then flags for Beam.

        Raises:
            UsageError: the command would refuse the values.
        """
        flags = tuple(values.get(BEAM_FLAGS) or ())
        self.arguments(values, flags)
        given = [option for key, option in self.options.items() if values.get(key) is not None]
        words = [
            word for option in sorted(given, key=lambda option: option.is_argument) for word in option.words(values[option.key])
        ]
        return [str(self.name), *words, *(("--", *flags) if flags else ())]


def command(example: str) -> Callable[[Callable[..., Any]], Command]:
    """Return a decorator that makes a function a command; see `Command`."""
    return partial(Command, example=example)


def _refuse_empty(parameter: Any, value: object) -> None:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, str) and not item.strip(" \t\n,"):
            is_option = parameter.param_type_name == "option"
            name = parameter.opts[0] if is_option else parameter.metavar or parameter.name.upper()
            advice = ", or leave the option out for its default" if is_option else ""
            raise UsageError(f"{name} is {item!r}, expected a value: check the shell variable that it comes from{advice}")


def flags_of(context: typer.Context) -> tuple[str, ...]:
    """Return the flags for Beam: those behind ``--`` or, without any, those of the file."""
    flags = context.args or (context.default_map or {}).get(BEAM_FLAGS, ())
    stray = [flag for flag in flags if not flag.startswith("--")]
    if stray:
        raise UsageError(f"unexpected argument {stray[0]!r}: flags for Beam stand behind -- and begin with --")
    return tuple(flags)


def _origins(context: typer.Context, options: Mapping[str, Option], message: str) -> str:
    """Return the end of a message about options whose values the command line does not show."""
    places: dict[str, None] = {}
    for key, option in options.items():
        value = context.params.get(key)
        values = value if isinstance(value, (list, tuple)) else (value,)
        is_named = re.search(rf"(?<![\w-]){re.escape(option.label)}(?![\w-])", message)
        if not is_named and not any(isinstance(item, str) and repr(item) in message for item in values):
            continue
        source = getattr(context.get_parameter_source(key), "name", "")
        if source == "ENVIRONMENT":
            name = next(parameter.envvar for parameter in context.command.params if parameter.name == key)
            places[f" (in the environment: {name} is {os.environ.get(str(name), '')!r})"] = None
        elif source == "DEFAULT_MAP":
            places[f" (in {context.params.get('config', '')!r})"] = None
    return "".join(places)


def _load(context: typer.Context, location: str) -> str:
    """Make the values of a file the defaults of a command."""
    if location:
        context.default_map = _values(location, context)
    return location


_Config = Annotated[
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
    command: Any = context.command
    commands = getattr(context.parent and context.parent.command, "commands", {command.name: command})
    configurable = [key for key, other in commands.items() if "config" not in other.options]
    table = _read(location)
    names = [option.name for option in command.options.values()]
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    # No option that takes a table has the name of a command.
    sections = {key: value for key, value in tables.items() if key in configurable or key not in names}
    for key in sections:
        if key not in configurable:
            raise UsageError(f"{location!r} has a section [{key}], which is no command{did_you_mean(key, configurable)}")
    if not sections:
        return command.convert(table, f"{location!r}")
    for key in table:
        if key not in sections:
            raise UsageError(f"{location!r} has the key {key!r} beside sections: move it into the section of its command")
    converted = {key: commands[key].convert(section, f"{location!r}, section [{key}]") for key, section in sections.items()}
    if command.name not in converted:
        listed = ", ".join(f"[{key}]" for key in sections)
        raise UsageError(f"{location!r} has no section [{command.name}]: its sections are {listed}")
    return converted[command.name]


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

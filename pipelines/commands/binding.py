"""Commands with options from the fields of jobs and from parameters.

A value comes from the first of: command line (text), environment (text), file of ``--config`` (TOML), default. `Option` converts
text and TOML, with the same messages. A file has the keys of one command, or a section per command; unknown keys are errors.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, partial
from keyword import iskeyword
from pathlib import Path
from types import MappingProxyType, NoneType, SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from pipelines.commands.results import set_console_of_typer
from schemas.console import events
from schemas.conversion import alternatives_of, convert, convert_text, default_of, did_you_mean, hints_of, parse_toml
from schemas.errors import UsageError
from schemas.options import Opt, opt_in
from schemas.process.startup import skip_pandas

_METAVARS = {str: "TEXT", int: "INT", float: "NUM", bool: ""}
_MAX_CHOICES = 8  # Characters of a list of choices that is shown in the column of types.

BEAM_FLAGS = "beam_flags"
"""Key of the flags for Beam, which a command line has after ``--``."""


@dataclass(frozen=True)
class Option:
    """An option or argument; a required one has the default ``MISSING``."""

    key: str
    hint: Any
    opt: Opt
    default: Any = MISSING

    @cached_property
    def types(self) -> list[Any]:
        """Types of the value, without None."""
        return [hint for hint in alternatives_of(self.hint) if hint is not NoneType]

    @property
    def is_argument(self) -> bool:
        """Whether a command line has the value without a name."""
        return self.opt.is_argument or (self.default is MISSING and not self.opt.is_option)

    @property
    def is_list(self) -> bool:
        """Whether the value is a tuple."""
        return get_origin(self.types[0]) is tuple

    @property
    def takes_several(self) -> bool:
        """Whether a command line has the values one by one, not separated by commas."""
        return self.opt.is_repeated or (self.is_list and self.is_argument)

    @property
    def is_table(self) -> bool:
        """Whether the value is a mapping."""
        return get_origin(self.types[0]) is Mapping

    @property
    def is_flag(self) -> bool:
        """Whether a command line has the option without a value."""
        return self.types == [bool]

    @property
    def name(self) -> str:
        """Name of the option without dashes, or of the argument: its key in files."""
        return self.key.rstrip("_").replace("_", "-")

    @property
    def label(self) -> str:
        """Name of the option or argument in messages."""
        return self.key.upper() if self.is_argument else f"--{self.name}"

    def value(self, raw: Any) -> Any:
        """Convert text; values of files are converted already.

        Raises:
            UsageError: the text is not of the type, a number is too small, or a required value is missing.
        """
        if raw is MISSING or (raw is None and self.opt.is_required):
            raise UsageError(f"{self.label} is missing: {self.help}")
        if self.takes_several:
            return tuple(raw or ())
        value = convert_text(raw, self.hint, self.label) if isinstance(raw, str) else raw
        self.opt.check(value, self.label)
        return value

    def file_value(self, raw: Any) -> Any:
        """Convert a value of TOML.

        Raises:
            UsageError: it has another type, or a number is too small.
        """
        hint: Any = self.hint
        if self.is_table:
            hint = str | list[str] | dict[str, str]
        elif self.is_list:
            hint = list[str] if self.takes_several or self.opt.is_behind_dashes else str | list[str]
        elif self._is_parsed:
            hint = str | int
        value = convert(raw, hint, self.label)
        if self.is_list and isinstance(value, list):
            split = [part for part in value if "," in part] if hint != list[str] else []
            if split:
                raise UsageError(f"{self.label} holds {split[0]!r}, but a comma separates values: make it several")
            return tuple(value)
        if self.is_table and isinstance(value, list):
            value = ",".join(value)
        if self._is_parsed or (isinstance(value, str) and (self.is_list or self.is_table)):
            return convert_text(str(value), self.hint, self.label)
        self.opt.check(value, self.label)
        return value

    def check_code(self, value: Any, place: str) -> None:
        """Refuse a value of a file that names code to run.

        Raises:
            UsageError: it does; the message names its place.
        """
        if value and self.opt.code_in is not None and (code := self.opt.code_in(value)):
            raise UsageError(
                f"{place} has {self.name} = {code[0]!r}, which runs code: nothing was done. Give --trust if "
                "you know the file, or give the value on the command line"
            )

    def text(self, value: Any) -> str:
        """Return the text of a value on a command line."""
        if isinstance(value, Mapping):
            return ",".join(f"{key}={item}" for key, item in value.items())
        return ",".join(value) if isinstance(value, tuple) else str(value)

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line for a value; none for flags of Beam."""
        if self.opt.is_behind_dashes:
            return []
        if self.is_flag:
            return [f"--{self.name}"] if value else [f"--no-{self.name}"] * (self.default is True)
        texts = list(value) if isinstance(value, tuple) and self.takes_several else [self.text(value)]
        return texts if self.is_argument else [f"--{self.name}={text}" for text in texts]

    def parameter(self) -> inspect.Parameter:
        """Return the parameter for typer; `value` converts its text."""
        if self.default is MISSING or self.opt.is_required:
            default: Any = inspect.Parameter.empty
        elif self.default is None or self.takes_several:
            default = None
        else:
            default = self.default if self.is_flag else self.text(self.default)
        shown = "on" if default is True else default
        help_ = f"{self.help} Default: {shown}." if isinstance(shown, str) and shown else self.help
        shared: dict[str, Any] = {"autocompletion": self._completion, "show_default": False}
        if self.is_argument:
            metavar = self.key.upper() + "..." * self.takes_several
            declared: Any = typer.Argument(help=help_, metavar=metavar, **shared)
        else:
            negative = f"/--no-{self.name}" if self.default is True else ""
            names = filter(None, (f"--{self.name}{negative}", self.opt.short))
            declared = typer.Option(*names, help=help_, metavar=self.metavar, rich_help_panel=self.opt.panel or None, **shared)
        hint: Any = list[str] if self.takes_several else bool if self.is_flag else str
        annotation: Any = Annotated[hint | None if default is None else hint, declared]
        return inspect.Parameter(self.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    @property
    def metavar(self) -> str:
        """Form of the value in help."""
        if self.opt.metavar:
            return self.opt.metavar
        if self._choices:
            choices = "|".join(self._choices)
            return choices if len(choices) <= _MAX_CHOICES else "NAME"
        if self.is_list and not self.opt.is_repeated:
            return "A,B"
        return "K=V" if self.is_table else _METAVARS.get(self.types[0], "TEXT")

    @property
    def help(self) -> str:
        """Help text, with the choices that it does not name."""
        text = self.opt.help
        if self.metavar == "NAME" and not all(choice in text for choice in self._choices):
            text = f"{text.removesuffix('.')}: {', '.join(self._choices)}."
        return text

    @property
    def _is_parsed(self) -> bool:
        return hasattr(self.types[0], "parse")

    @property
    def _choices(self) -> tuple[str, ...]:
        return get_args(self.types[0]) if get_origin(self.types[0]) is Literal else ()

    @property
    def _completion(self) -> Callable[[str], list[str]] | None:
        values = self.opt.completion or self._choices

        def complete(incomplete: str) -> list[str]:
            return [value for value in (values() if callable(values) else values) if value.startswith(incomplete)]

        return complete if values else None


def options_of(job: Any, default: Any = MISSING, *, is_optional: bool = False) -> Iterator[Option]:
    """Yield the options of a job and of the dataclasses in its fields.

    Args:
        job: a dataclass, or a function, whose parameters count as fields; fields without an `Opt` that are no
            dataclasses are skipped.
        default: an instance with the default values; ``MISSING`` for the defaults of the fields.
        is_optional: whether the dataclass is built only if one of its options is set. These then have no defaults.
    """
    for name, hint, opt, value in _fields(job, default):
        if (inner := _dataclass_in(hint)) is not None:
            inner_is_optional = is_optional or NoneType in get_args(hint)
            yield from options_of(inner, MISSING if value is None else value, is_optional=inner_is_optional)
        elif opt is not None and is_optional:
            yield _option(name, hint, opt, False if _text_type(hint) is bool else None)
        elif opt is not None:
            yield _option(name, hint, opt, value)


def job_from(
    job: Any, values: Mapping[str, Any], default: Any = MISSING, *, is_optional: bool = False, build: Any = None
) -> Any:
    """Build a dataclass from option values; None if it is optional and none is set.

    The other parameters are those of `options_of`. The default also has the values of fields that are no options. Values of other
    keys are ignored. ``build`` takes the arguments instead of the job, e.g. ``dict`` for those of a function.

    Raises:
        UsageError: a value is out of range, or options contradict each other.
    """
    labels = (
        [option.label for option in options_of(job, is_optional=True) if _is_set(values[option.key])] if is_optional else []
    )
    if is_optional and not labels:
        return None
    arguments = {}
    for name, hint, opt, value in _fields(job, default):
        if (inner := _dataclass_in(hint)) is not None:
            arguments[name] = job_from(inner, values, value, is_optional=NoneType in get_args(hint))
        elif opt is None:
            arguments |= {name: value} if is_dataclass(default) else {}
        elif not is_optional or _is_set(values[_key(name, opt)]):
            arguments[name] = values[_key(name, opt)]
        elif value is MISSING:
            needed = _option(name, hint, opt, None).label
            raise UsageError(f"{labels[0]} needs {needed}: give {needed}, too")
    return (build or job)(**arguments)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _fields(job: Any, default: Any) -> Iterator[tuple[str, Any, Opt | None, Any]]:
    """Yield name, annotation, declaration and default of each field or parameter."""
    if is_dataclass(default):
        defaults = {field.name: getattr(default, field.name) for field in fields(job)}
    elif is_dataclass(job):
        defaults = {field.name: default_of(field) for field in fields(job)}
    else:
        parameters = inspect.signature(job).parameters
        defaults = {name: MISSING if each.default is each.empty else each.default for name, each in parameters.items()}
    for name, value in defaults.items():
        hint = hints_of(job)[name]
        yield name, hint, opt_in(hint), value


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass that an annotation names; None for ``Annotated``."""
    if get_origin(hint) is Annotated:
        return None
    return next((kind for kind in alternatives_of(hint) if is_dataclass(kind)), None)


def _option(name: str, hint: Any, opt: Opt, default: Any) -> Option:
    return Option(_key(name, opt), _text_type(hint), opt, default)


def _key(name: str, opt: Opt) -> str:
    key = (opt.name or name).replace("-", "_")
    return f"{key}_" if iskeyword(key) else key  # A parameter of Python has no keyword as its name.


def _text_type(hint: Any) -> Any:
    """Return the type without ``Annotated`` and protocols, which only Python passes."""
    kinds = alternatives_of(hint)
    protocols = [kind for kind in kinds if any(getattr(part, "_is_protocol", False) for part in (kind, *get_args(kind)))]
    return Union[tuple(kind for kind in kinds if kind not in protocols)]  # noqa: UP007 -- of any number


class TextParameters:
    """A command of typer that takes texts as they are: `Option.value` converts them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the parser, with that of help."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in params:  # What typer converts texts by imports pydantic, which is a quarter of a command's start.
            parameter.get_runtime_param = lambda: SimpleNamespace(coerce=_take)
        return params


class Command(TextParameters, TyperCommand):
    """A function as a command, with options from command line, environment or file.

    The program creates all commands but runs one; the options are therefore created when they are first used.
    Environment variables have names such as ``IMAGEPIVOT_FEATURES_DEVICE``.

    Empty values are refused. They mostly come from an unset shell variable, and could mean the current folder.

    Args:
        function: takes dataclasses, parameters annotated with `Opt`, and optionally typer's ``context``. The
            default of a dataclass holds the defaults of its fields.
        example: words of the command, for the end of its help.
    """

    def __init__(self, function: Callable[..., Any], example: str) -> None:
        name, paragraphs = function.__name__.strip("_").replace("_", "-"), (inspect.getdoc(function) or "").split("\n\n")
        help_ = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)  # The terminal wraps lines.
        epilog = f"Example: imagepivot {example}"
        super().__init__(name, callback=function, help=help_, epilog=epilog, rich_markup_mode="rich")
        del self.params  # The cached property below takes its place.

    @cached_property
    def options(self) -> dict[str, Option]:
        """The options by key."""
        return {option.key: option for option in options_of(self.callback)}

    @cached_property
    def params(self) -> list[Any]:  # type: ignore[override]
        """The parameters of the parser."""

        def declared() -> None: ...

        parameters = [option.parameter() for option in self.options.values() if not option.opt.is_behind_dashes]
        if "config" not in self.options:
            parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default="", annotation=_Config))
        if any(option.opt.code_in for option in self.options.values()) and not {"config", "trust"} & self.options.keys():
            parameters.append(Option("trust", bool, Opt("Allow FILE of --config to name code to run."), False).parameter())
        declared.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        declared.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app = typer.Typer(add_completion=False)
        app.command()(declared)
        params = typer.main.get_command(app).params
        for parameter in params:
            # Not by a common prefix, which would leave arguments out and take IMAGEPIVOT_VERSION for --version.
            parameter.envvar = f"IMAGEPIVOT_{self.name}_{parameter.name}".upper().rstrip("_").replace("-", "_")
            parameter.show_envvar = False  # type: ignore[attr-defined]
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help on our console."""
        set_console_of_typer()
        super().format_help(ctx, formatter)

    @property
    def allow_extra_args(self) -> bool:  # type: ignore[override]
        """Whether flags for Beam may follow ``--``."""
        return BEAM_FLAGS in self.options

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command; those after ``--`` are flags for Beam.

        Raises:
            UsageError: a value is empty, or one of the file names code and is not replaced.
        """
        end = args.index("--") if ctx.allow_extra_args and "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        if not ctx.resilient_parsing:
            output = ctx.params.get("output")
            events.record(command=self.name, output=None if output is None else str(output))
            for key, value in ctx.params.items():
                if ctx.get_parameter_source(key).name not in ("DEFAULT", "DEFAULT_MAP"):  # A file may hold an empty list.
                    _refuse_empty(self.options.get(key), value)
        ctx.args = [*ctx.args, *args[end + 1 :]]
        if not (ctx.resilient_parsing or ctx.params.get("trust")):
            self._check_file(ctx)
        return ctx.args

    def _check_file(self, ctx: Any) -> None:
        """Refuse values of the file that name code, unless the command line replaces them."""
        for key, value in (ctx.default_map or {}).items():
            is_replaced = ctx.args if key == BEAM_FLAGS else ctx.get_parameter_source(key).name != "DEFAULT_MAP"
            if not is_replaced:
                self.options[key].check_code(value, repr(ctx.params["config"]))

    def invoke(self, ctx: Any) -> Any:
        """Run the function.

        Raises:
            UsageError: a value is invalid; the message names the variable or file that it comes from.
        """
        if ctx.params.get("log_json"):
            events.start()  # Set by the environment or a file; `app.main` handles the flag before words are parsed.
        function: Any = self.callback
        context = {"context": ctx} if "context" in inspect.signature(function).parameters else {}
        origins = {key: origin for key in self.options if (origin := _origin(ctx, key))}
        arguments = self.arguments(ctx.params, flags_of(ctx), origins)
        skip_pandas()
        try:
            return function(**context, **arguments)
        except UsageError as error:
            raise _with_origins(error, origins) from None

    def arguments(
        self, values: Mapping[str, Any], flags: tuple[str, ...], origins: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the arguments of the function for values of options and flags for Beam.

        ``origins`` are the places of values that are not on the command line, for messages.

        Raises:
            UsageError: a value is invalid, or options contradict each other.
        """
        converted = {}
        for key, option in self.options.items():
            try:
                converted[key] = flags if option.opt.is_behind_dashes else option.value(values.get(key, option.default))
            except UsageError as error:
                raise _with_origins(error, {key: origins[key]} if key in origins else {}) from None
        try:
            return job_from(self.callback, converted, build=dict)
        except UsageError as error:
            raise _with_origins(error, origins) from None

    def convert(self, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Convert a table of TOML to values by option key; messages name its place.

        Raises:
            UsageError: a name is unknown or given twice, or a value has another type.
        """
        options = {option.name: option for option in self.options.values() if option.key != "trust"}  # No file trusts itself.
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
        """Return the words of a command line: options, arguments, flags for Beam.

        Raises:
            UsageError: the command would refuse the values.
        """
        flags = tuple(values.get(BEAM_FLAGS) or ())
        self.arguments(values, flags)
        words = {key: option.words(values[key]) for key, option in self.options.items() if values.get(key) is not None}
        arguments = [word for key in words if self.options[key].is_argument for word in words[key]]
        options = [word for key in words if not self.options[key].is_argument for word in words[key]]
        dashes = ["--"] if any(word.startswith("-") for word in arguments) else []  # An argument of a file is no option.
        return [str(self.name), *options, *dashes, *arguments, *(("--", *flags) if flags else ())]


def command(example: str) -> Callable[[Callable[..., Any]], Command]:
    """Return a decorator that turns a function into a `Command`."""
    return partial(Command, example=example)


def _take(value: Any, param: Any, ctx: typer.Context) -> Any:
    """Return a value as it is, but the text of a flag as a boolean."""
    if not (isinstance(value, str) and getattr(param, "is_flag", False)):
        return value
    try:
        return convert_text(value, bool, f"--{param.name.replace('_', '-')}")
    except UsageError as error:
        raise _with_origins(error, {param.name: _origin(ctx, param.name)}) from None


def _refuse_empty(option: Option | None, value: object) -> None:
    label, has_commas = ("--config", False) if option is None else (option.label, option.is_list or option.is_table)
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, str) and not item.strip(" \t\n," if has_commas else " \n"):  # A tab delimits, too.
            advice = ", or leave the option out for its default" if label.startswith("-") else ""
            raise UsageError(f"{label} is {item!r}, expected a value: check the shell variable that it comes from{advice}")


def flags_of(context: typer.Context) -> tuple[str, ...]:
    """Return the flags for Beam: those after ``--``, or else those of the file."""
    flags = context.args or (context.default_map or {}).get(BEAM_FLAGS, ())
    stray = [flag for flag in flags if not flag.startswith("--")]
    if stray:
        raise UsageError(f"unexpected argument {stray[0]!r}: flags for Beam follow -- and begin with --")
    return tuple(flags)


def _with_origins(error: UsageError, origins: Mapping[str, str]) -> UsageError:
    """Return the error with the places of options, by key, at its end."""
    keys: dict[str, list[str]] = {}
    for key, origin in origins.items():
        keys.setdefault(origin, []).append(key.rstrip("_").replace("_", "-"))
    ends = [origin if len(origins) == 1 else f"{', '.join(names)} {origin}" for origin, names in keys.items()]
    return UsageError(f"{error} ({'; '.join(ends)})") if ends else error


def _origin(context: typer.Context, key: str) -> str:
    """Return the place of a value that is not on the command line, for a message."""
    source = getattr(context.get_parameter_source(key), "name", "")
    if source == "ENVIRONMENT":
        name = next(parameter.envvar for parameter in context.command.params if parameter.name == key)
        return f"in the environment: {name} is {os.environ.get(str(name), '')!r}"
    return f"in {context.params.get('config', '')!r}" if source == "DEFAULT_MAP" else ""


def _load(context: typer.Context, location: str) -> str:
    """Set the defaults of a command to the values of a file."""
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
        help="Read other options from a TOML file.",
    ),
]
"""The option for a file; eager, because the file has the defaults of the other options."""


def _values(location: str, context: typer.Context) -> dict[str, Any]:
    """Read a file, and return the values of a command by option key.

    Raises:
        UsageError: the file cannot be read, or a key or value is invalid.
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
    from schemas.storage.folder import file_at
    from schemas.storage.locations import check_location, is_remote
    from schemas.storage.storage_errors import storage_errors

    check_location(location)
    try:
        with storage_errors(location):
            if is_remote(location):
                folder, name = file_at(location)
                data = folder.read(name)
            else:
                data = Path(os.path.expanduser(location)).read_bytes()  # noqa: PTH111 -- any name after ~
    except FileNotFoundError:
        raise UsageError(f"--config is {location!r}, which does not exist: check the path") from None
    try:
        return parse_toml(data.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{location!r} is not TOML: {error}") from error
    except UsageError as error:
        raise UsageError(f"{location!r} is {error}") from error

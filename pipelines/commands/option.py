"""Options of commands: fields of jobs, declared by `schemas.options.Opt`, and the conversion of their values.

A command line and the environment give text, a file of options and a plan give values of TOML; `Option` converts both, with one
message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from schemas.conversion import alternatives_of, convert, convert_text, default_of, hints_of
from schemas.errors import UsageError
from schemas.options import Opt

T = TypeVar("T")

_METAVARS = {str: "TEXT", int: "INT", float: "NUM", bool: ""}
_MOST = 8  # Longest list of choices in the column of types.


@dataclass(frozen=True)
class Option:
    """An option or argument of a command.

    Attributes:
        key: name of the parameter.
        hint: type of the value.
        opt: its declaration.
        default: its default; ``MISSING`` where the command needs it.
    """

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
            return []  # `Commands` puts them behind the dashes.
        several = list(value) if isinstance(value, tuple) and self.takes_several else None
        if self.is_argument:
            return [self.text(value)] if several is None else several
        if self.is_flag:
            return [f"--{self.name}"] if value else [f"--no-{self.name}"] * (self.default is True)
        return [f"--{self.name}={item}" for item in ([self.text(value)] if several is None else several)]

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that typer reads."""
        hint: Any = list[str] if self.takes_several else bool if self.is_flag else str
        declared: Any
        if self.is_argument:
            declared = typer.Argument(
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
        if not values:
            return None
        return lambda incomplete: [
            value for value in (values() if callable(values) else values) if value.startswith(incomplete)
        ]

    def _check(self, value: Any) -> Any:
        if self.opt.least is not None and value is not None and not value >= self.opt.least:
            raise UsageError(f"{self.label} is {value}, expected {self.opt.least:g} or more")
        return value


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
    given = {option.key: option for option in options_of(job, is_optional=True) if not _is_unset(values[option.key])}
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


def _is_unset(value: Any) -> bool:
    return value is None or value is False


def _fields(job: Any) -> Iterator[tuple[Any, Any, Any, Opt | None]]:
    """Yield each field with its type, the dataclass that is its type if it has no declaration, and its declaration."""
    hints = hints_of(job)
    for field in fields(job):
        hint = hints[field.name]
        opt = opt_of(hint)
        yield field, hint, dataclass_in(hint), opt


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
    types = alternatives_of(hint)
    if any(getattr(kind, "_is_protocol", False) for kind in types):
        return str
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _as_given(value: Any) -> Any:
    """Leave the conversion of a value to `Option`, which gives the same message for all places."""
    return value

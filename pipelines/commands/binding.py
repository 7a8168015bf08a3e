"""Commands whose options are the fields of jobs, as `schemas.options.Opt` declares them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from pipelines.commands.completion import starting
from pipelines.commands.configuration import COMMAS
from pipelines.commands.options import several
from schemas.options import Opt

__all__ = ["bound", "job_from"]

T = TypeVar("T")


def bound(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a parameter for each field of the dataclasses that a command takes, for typer to read.

    Args:
        command: takes dataclasses whose fields are annotated with `Opt`, and parameters of typer's.
    """
    hints = get_type_hints(command, include_extras=True)
    jobs = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in jobs:
            parameters += _parameters_of(jobs[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @wraps(command)
    def call(**values: Any) -> Any:
        built = {name: job_from(job, values) for name, job in jobs.items()}
        taken = {field.name for job in jobs.values() for field in fields(job)}
        return command(**built, **{name: value for name, value in values.items() if name not in taken})

    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    del call.__wrapped__
    return call


def job_from(job: type[T], values: Mapping[str, Any]) -> T:
    """Return the job that the values of a command line ask for.

    Args:
        job: a dataclass whose fields are annotated with `Opt`.
        values: the values by the names of the fields; others are ignored.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.
    """
    hints = _hints(job)
    return job(**{name: _value(values[name], hint) for name, (hint, _) in hints.items()})


def _value(value: Any, hint: Any) -> Any:
    """Return the value of a field; the values of an argument that takes several come as a list, and may hold commas."""
    if get_origin(hint) is not tuple:
        return value
    return several(value) if isinstance(value, str) else tuple(value)


def _hints(job: type[Any]) -> dict[str, tuple[Any, Opt]]:
    """Return the type and the declaration of each field."""
    hints = get_type_hints(job, include_extras=True)
    found = {}
    for field in fields(job):
        hint, option = get_args(hints[field.name])
        found[field.name] = hint, option
    return found


def _parameters_of(job: type[Any]) -> list[inspect.Parameter]:
    defaults = {field.name: field.default for field in fields(job)}
    parameters = []
    for name, (hint, option) in _hints(job).items():
        default, is_list = defaults[name], get_origin(hint) is tuple
        is_argument = default is MISSING and not option.is_option
        if is_argument:
            declared = typer.Argument(help=option.help, show_default=False)
            hint = list[str] if is_list else hint
        else:
            hint = str if is_list else hint
            declared = typer.Option(
                f"--{(option.name or name).replace('_', '-')}",
                help=option.help,
                rich_help_panel=option.panel or None,
                autocompletion=_completion(option),
                min=option.least,
                show_default=default is not MISSING,
            )
        annotation = Annotated[hint, declared, COMMAS] if is_list and not is_argument else Annotated[hint, declared]
        value = inspect.Parameter.empty if default is MISSING else ",".join(default) if is_list else default
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation))
    return parameters


def _completion(option: Opt) -> Callable[[str], list[str]] | None:
    if not option.completion:
        return None
    return lambda incomplete: starting(incomplete, option.completion)

"""Commands whose options are fields of jobs, or parameters of their own, declared by `schemas.options.Opt`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import partial
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

from pipelines.commands.configuration import BEAM_FLAGS, Config
from pipelines.commands.option import Option, dataclass_in, inner_job, job_from, opt_of, option_of, options_of
from schemas.console import events
from schemas.errors import UsageError

BEAM = {"allow_extra_args": True}
"""Context settings of a command whose flags behind ``--`` go to Beam."""

_CONTEXT = "context"


def bound(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a parameter for each option of a command, for typer to read.

    Its attribute ``options`` has the options by key, and ``arguments`` makes of their values and of the flags for Beam what the
    command takes.

    Args:
        command: takes dataclasses and parameters that are annotated with `Opt`, and at will typer's
            ``context``. The default of a dataclass gives those of its fields.
    """
    hints = get_type_hints(command, include_extras=True)
    declared: dict[str, Option] = {}
    jobs: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
    own: dict[str, str] = {}  # Parameters of the command that are no jobs, and the keys of their options.
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        job = dataclass_in(hints[name])
        if job is not None:
            is_optional = NoneType in get_args(hints[name])
            jobs[name] = partial(inner_job, job) if is_optional else partial(job_from, job, default=default)
            options = list(options_of(job, MISSING if is_optional else default, is_optional=is_optional))
        elif (opt := opt_of(hints[name])) is not None:
            options = [option_of(name, hints[name], opt, default)]
            own[name] = options[0].key
        elif name == _CONTEXT:
            continue
        else:
            raise TypeError(f"the parameter {name!r} of {command.__name__} declares no option")
        declared |= {option.key: option for option in options}
        parameters += [option.parameter() for option in options if not option.opt.is_behind_dashes]

    def arguments(values: Mapping[str, Any], flags: tuple[str, ...]) -> dict[str, Any]:
        converted = {
            key: flags if option.opt.is_behind_dashes else option.value(values.get(key, option.default))
            for key, option in declared.items()
        }
        built = {name: build(converted) for name, build in jobs.items()}
        return built | {name: converted[key] for name, key in own.items()}

    def call(**values: Any) -> Any:
        context = values.pop(_CONTEXT)
        if values.get("log_json"):
            events.start()  # Where the environment or a file asks for events: words are looked at before they are parsed.
        try:
            given = {_CONTEXT: context} if _CONTEXT in hints else {}
            return command(**given, **arguments(values, flags_of(context)))
        except UsageError as error:
            origins = _origins(context, declared, str(error))
            if not origins:
                raise
            raise UsageError(f"{error}{origins}") from None

    if "config" not in declared:
        parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default="", annotation=Config))
    context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.Signature([context, *parameters])
    call.__name__, call.__doc__, call.__module__ = command.__name__, command.__doc__, command.__module__
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    call.options = declared  # type: ignore[attr-defined]
    call.arguments = arguments  # type: ignore[attr-defined]
    return call


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
        source = getattr(context.get_parameter_source(key), "name", "")
        if not re.search(rf"(?<![\w-]){re.escape(option.label)}(?![\w-])", message):
            continue
        if source == "ENVIRONMENT":
            name = next(parameter.envvar for parameter in context.command.params if parameter.name == key)
            places[f" (in the environment: {name} is {os.environ.get(str(name), '')!r})"] = None
        elif source == "DEFAULT_MAP":
            places[f" (in {context.params.get('config', '')!r})"] = None
    return "".join(places)

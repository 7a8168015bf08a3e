"""Declaration of command line options as annotations of dataclass fields."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, get_origin, overload

from schemas.conversion import alternatives_of, check_number, convert, default_of, hints_of
from schemas.errors import UsageError

_Job = TypeVar("_Job", contravariant=True)
_More = ParamSpec("_More")
_Result = TypeVar("_Result", covariant=True)
SEVERAL_MACHINES = "Array jobs, and workers on other machines (--runner after --)"
"""Panel of the options of array jobs and of remote runners."""


@dataclass(frozen=True)
class Opt:
    """Annotation of a field as option or argument: ``Annotated[int, Opt("Size.")]``.

    A field without a default is an argument, any other an option. Tuples are comma-separated values, mappings comma-separated
    ``KEY=VALUE`` pairs; a class with a method ``parse`` parses its text. The fields of a nested dataclass are options, too; a
    nested dataclass that may be None is built if one of its options is set.

    Attributes:
        help: help text, a sentence.
        name: name of the option without dashes; empty for the name of the field.
        short: short name with its dash, e.g. ``-o``.
        panel: heading in ``--help``; empty for the general one.
        metavar: placeholder of the value in ``--help``; empty for the type's.
        completion: values for shell completion, or a function that returns them.
        min_: minimum of a number; None for any.
        is_option: whether a field without a default is an option.
        is_argument: whether a field with a default is an argument.
        is_required: whether a field with a default is required.
        is_repeated: whether the option is repeated for several values, which may contain commas.
        is_behind_dashes: whether the values are the words after ``--``.
        code_in: returns the part of a value that names code to run; such a value in a file needs the user's consent.
    """

    help: str
    name: str = ""
    short: str = ""
    panel: str = ""
    metavar: str = ""
    completion: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    min_: float | None = None
    is_option: bool = False
    is_argument: bool = False
    is_required: bool = False
    is_repeated: bool = False
    is_behind_dashes: bool = False
    code_in: Callable[[Any], Sequence[str]] | None = None

    def check(self, value: Any, label: str) -> None:
        """Raise a `UsageError` for a number not finite, beyond 64 bits or too small."""
        check_number(value, label)
        if self.min_ is not None and value is not None and not value >= self.min_:
            raise UsageError(f"{label} is {value}, expected {self.min_:g} or more")


def opt_in(hint: Any) -> Opt | None:
    """Return the declaration in an annotation."""
    return next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Opt)), None)


class Options:
    """Base of dataclasses with ``repr=False``: shows only values beside defaults.

    Raises:
        UsageError: a number is below its minimum, a value is none of its choices, or a text is given for a list.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in hints_of(kind).items():
            label, value, kinds = f"--{name.replace('_', '-')}", getattr(self, name), alternatives_of(hint)
            if isinstance(value, str) and str not in kinds and any(get_origin(each) in (tuple, Sequence) for each in kinds):
                raise UsageError(f"{label} is the text {value!r}, expected a list: give ({value!r},)")
            if any(get_origin(each) is Literal for each in kinds):
                convert(value, hint, label)
            if (opt := opt_in(hint)) is not None:
                opt.check(value, label)
                if opt.is_required and not value:
                    raise UsageError(f"{label} is missing: {opt.help}")
        self._check()

    def _check(self) -> None:
        """Raise a `UsageError` if options contradict each other."""

    def __repr__(self) -> str:
        values = {item.name: (getattr(self, item.name), default_of(item)) for item in fields(self)}  # type: ignore[arg-type]
        shown = (f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
        return f"{type(self).__name__}({', '.join(shown)})"


class JobFunction(Protocol[_Job, _More, _Result]):
    """Function that runs a job."""

    @overload
    def __call__(self, job: _Job, /, *args: _More.args, **kwargs: _More.kwargs) -> _Result: ...

    @overload
    def __call__(self, *fields: Any, **named: Any) -> _Result: ...


def takes_fields(
    job_class: Callable[..., _Job],
) -> Callable[[Callable[Concatenate[_Job, _More], _Result]], JobFunction[_Job, _More, _Result]]:
    """Return a decorator that lets a job's function also take the job's fields.

    Fields precede the keyword arguments of the function itself. Lists become tuples. A text for a nested
    dataclass is parsed, or is its first field: ``extractor="resnet50-pool"``.
    """

    def decorate(function: Callable[Concatenate[_Job, _More], _Result]) -> JobFunction[_Job, _More, _Result]:
        [_, *own_names] = inspect.signature(function).parameters

        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            if "job" in named or (args and isinstance(args[0], cast("type", job_class))):
                return cast("Any", function)(*args, **named)
            own = {name: named.pop(name) for name in own_names if name in named}
            values = inspect.signature(job_class).bind(*args, **named).arguments
            hints = hints_of(job_class)
            job = job_class(**{name: _field_value(value, hints[name]) for name, value in values.items()})
            return cast("Any", function)(job, **own)

        return cast("JobFunction[_Job, _More, _Result]", run)

    return decorate


def _field_value(value: Any, hint: Any) -> Any:
    """Convert a list to a tuple, and a text to a nested dataclass."""
    kinds = [kind for kind in alternatives_of(hint) if is_dataclass(kind)]
    if isinstance(value, str) and str not in alternatives_of(hint) and kinds:
        kind: Any = kinds[0]
        return kind.parse(value) if hasattr(kind, "parse") else kind(value)
    return tuple(value) if isinstance(value, list) else value


Device: TypeAlias = Annotated[
    str, Opt("Compute on cpu, cuda, cuda:N, or auto (a GPU if available).", completion=("auto", "cpu", "cuda", "cuda:0"))
]

"""Declaration of an option: what a command line, files and the documentation say of a field of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias


@dataclass(frozen=True)
class Opt:
    """The annotation of a field whose value users give, e.g. ``Annotated[int, Opt("Most tokens to keep.")]``.

    A field without a default is an argument; any other is an option. A tuple is written as values separated by commas, a mapping
    as pairs ``KEY=VALUE`` separated by commas, and a class with a method ``parse`` as the text which that takes. The options of a
    dataclass in a field are options of the whole; where it may be None, it is built if one of its options is given.

    Attributes:
        help: what the value means, in a sentence.
        name: name of the option without dashes; that of the field if empty.
        short: short name of the option with its dash, e.g. ``-o``.
        panel: heading in ``--help`` under which the option is listed; empty for the general one.
        metavar: form of the value in ``--help``; empty for that of the type.
        completion: values that a shell completes, or a function that returns them.
        least: least value of a number; None for any.
        is_option: whether a field without a default is an option.
        is_argument: whether a field with a default is an argument.
        is_required: whether the command needs the value; always true of a field without a default.
        is_repeated: whether several values are written by repeating the option, since they may hold commas.
        is_behind_dashes: whether the values are the words behind ``--``.
    """

    help: str
    name: str = ""
    short: str = ""
    panel: str = ""
    metavar: str = ""
    completion: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    least: float | None = None
    is_option: bool = False
    is_argument: bool = False
    is_required: bool = False
    is_repeated: bool = False
    is_behind_dashes: bool = False


Device: TypeAlias = Annotated[
    str, Opt("cpu, cuda, cuda:N, or auto: a GPU if there is one.", completion=("auto", "cpu", "cuda", "cuda:0"))
]

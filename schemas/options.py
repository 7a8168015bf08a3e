"""Declaration of an option: what a command line, files and the documentation say of a field of a job."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Opt"]


@dataclass(frozen=True)
class Opt:
    """The annotation of a field whose value users give, e.g. ``Annotated[int, Opt("Most tokens to keep.")]``.

    A field without a default is an argument; any other is an option, and a tuple is written as values separated by commas.

    Attributes:
        help: what the value means, in a sentence.
        name: name of the option without dashes; that of the field if empty.
        panel: heading in ``--help`` under which the option is listed; empty for the general one.
        completion: values that a shell completes.
        least: least value of a number; None for any.
        is_option: whether a field without a default is an option that must be given.
    """

    help: str
    name: str = ""
    panel: str = ""
    completion: tuple[str, ...] = ()
    least: int | None = None
    is_option: bool = False

"""What the commands share: options with one meaning everywhere, and how their text becomes values."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from pipelines.running.runner import Execution

__all__ = [
    "BEAM",
    "IdRule",
    "Ids",
    "LogJson",
    "MaxFailures",
    "Output",
    "Overwrite",
    "Shards",
    "Workers",
    "console",
    "execution_of",
    "notes",
    "several",
]

console = Console()
"""Prints results."""

notes = Console(stderr=True)
"""Prints progress, remarks and errors."""

BEAM = {"allow_extra_args": True}
"""Context settings of a command whose flags behind ``--`` go to Beam."""


class IdRule(str, Enum):
    """How an image id is made of a path."""

    name = "name"
    path = "path"


Output = Annotated[str, typer.Argument(help="Folder of the dataset that is written.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace another dataset that lies in OUTPUT.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Local worker processes; 0: one a core.")]
MaxFailures = Annotated[int, typer.Option("--max-failures", min=0, help="Inputs that may fail before the exit code is 3.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Progress as lines of JSON on stderr, for programs.")]
Shards = Annotated[int, typer.Option("--shards", help="Number of shards; the same number joins captions and features.")]
Ids = Annotated[
    IdRule, typer.Option("--ids", help="Image id: the file [i]name[/i] without extension, or the whole [i]path[/i].")
]


def several(text: str) -> tuple[str, ...]:
    """The values of an option that takes some, with a comma between them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def execution_of(context: typer.Context, workers: int) -> Execution:
    """How to run a pipeline, from ``--workers`` and the flags behind ``--``.

    Raises:
        UsageError: what stands behind ``--`` is no flag.
    """
    from pipelines.running.runner import Execution
    from schemas.errors import UsageError

    stray = [flag for flag in context.args if not flag.startswith("--")]
    if stray:
        raise UsageError(f"unexpected argument {stray[0]!r}: flags for Beam stand behind -- and begin with --")
    return Execution(workers=workers, beam_flags=tuple(context.args))

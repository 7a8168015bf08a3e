"""Consoles and options that several commands share, and how the text of an option becomes values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from schemas.errors import UsageError

__all__ = [
    "AllowMissingFeatures",
    "AsJson",
    "Captions",
    "Device",
    "Features",
    "MemoryMap",
    "Precision",
    "Settings",
    "Vocabulary",
    "console",
    "key_value_pairs",
    "notes",
    "overrides_of",
    "remark",
    "several",
]

console = Console()
"""For results."""

notes = Console(stderr=True)
"""For progress and remarks."""

Captions = Annotated[str, typer.Option("--captions", help="Folder of encoded captions.", show_default=False)]
Features = Annotated[str, typer.Option("--features", help="Folder of image features.", show_default=False)]
Vocabulary = Annotated[str, typer.Option("--vocabulary", help="Folder of the vocabulary of the captions.", show_default=False)]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.")]
Precision = Annotated[str, typer.Option("--precision", help="fp32 or bf16; on a GPU also tf32.")]
MemoryMap = Annotated[str, typer.Option("--memory-map", help="Folder for a copy of features that do not fit into memory.")]
AllowMissingFeatures = Annotated[
    bool, typer.Option("--allow-missing-features", help="Leave out captions whose images lack features, and say how many.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A value of the configuration, e.g. [i]model.embedding=256[/i]; may be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def remark(text: str) -> None:
    """Print a remark about the data."""
    notes.print(f"[yellow]{escape(text)}[/yellow]", highlight=False, soft_wrap=True)


def several(text: str) -> tuple[str, ...]:
    """Split the text of an option that takes several values, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def key_value_pairs(settings: Sequence[str]) -> dict[str, str]:
    """Split settings of the form ``KEY=VALUE``.

    Raises:
        UsageError: a setting has another form.
    """
    pairs = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {setting!r} is not KEY=VALUE, e.g. --set optimizer.learning_rate=1e-3")
        pairs[key.strip()] = value.strip()
    return pairs


def overrides_of(settings: Sequence[str] | None, max_steps: int | None) -> dict[str, str]:
    """Return the values that ``--set`` and ``--max-steps`` put into a configuration.

    Raises:
        UsageError: a setting is not of the form ``KEY=VALUE``.
    """
    overrides = key_value_pairs(settings or [])
    if max_steps is not None:
        overrides["schedule.max_steps"] = str(max_steps)
    return overrides

"""What the commands print: consoles, options of printing, remarks, and what was written."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from schemas.console import events
from schemas.console.tables import render_tables
from schemas.escapes import escape_text
from schemas.options import Opt

if TYPE_CHECKING:
    from schemas.manifest import Manifest


console = Console()
"""For results, on standard output."""

notes = Console(stderr=True)
"""For progress and remarks, on standard error."""

MaxFailures: TypeAlias = Annotated[int, Opt("Exit with code 3 if more inputs fail than this.", least=0)]
LogJson: TypeAlias = Annotated[bool, Opt("Write stderr as lines of JSON, for programs.")]
AsJson: TypeAlias = Annotated[bool, Opt("Print JSON.", name="json")]


def remark(text: str, style: str = "yellow") -> None:
    """Say something on standard error, in a style of rich's, or as an event."""
    if not events.emit("remark", message=text):
        notes.print(Text(escape_text(text, lines=True), style=style), soft_wrap=True)


def print_line(text: str) -> None:
    """Print a line of a result, in rich's markup."""
    console.print(text, highlight=False, soft_wrap=True)


def print_dataset(manifest: Manifest, output: str) -> None:
    """Print the kind of a dataset, its rows and shards, its place and its fingerprint."""
    size, place = f"{manifest.rows:,} rows in {len(manifest.shards)} shards", escape(output)
    print_line(f"[bold]{manifest.kind}[/bold]: {size} in {place} (fingerprint {manifest.fingerprint[:12]})")


def finish(manifest: Manifest, output: str, max_failures: int = 0) -> None:
    """Print what was written and what failed; exit with code 3 where more inputs failed than are allowed."""
    from pipelines.datasets.inspection import statistics_table

    failed = dict(sorted(manifest.failure_reasons.items()))
    events.record(counts={"rows": manifest.rows, "shards": len(manifest.shards), "failed": failed})
    print_dataset(manifest, output)
    render_tables(console, [statistics_table(manifest)])
    if manifest.failed:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in failed.items())
        listed = f"They are listed by: imagepivot inspect {shlex.quote(output)} --failures"
        remark(f"{manifest.failed:,} inputs failed: {counts}. {listed}", style="red")
    if manifest.failed > max_failures:
        raise typer.Exit(3)

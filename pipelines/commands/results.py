"""What the commands print about the dataset that they wrote."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from pipelines.commands.options import console, notes

if TYPE_CHECKING:
    from schemas.manifest import Manifest

__all__ = ["finish"]


def finish(manifest: Manifest, output: str, max_failures: int = 0) -> None:
    """Print what was written and what failed; exit with code 3 where more inputs failed than are allowed."""
    from pipelines.datasets.inspection import statistics_table

    console.print(
        f"[bold]{manifest.kind}[/bold]: {manifest.rows:,} rows in {len(manifest.shards)} shards in {escape(output)} "
        f"(fingerprint {manifest.fingerprint[:12]})",
        highlight=False,
        soft_wrap=True,
    )
    if (table := statistics_table(manifest)) is not None:
        console.print(table)
    if manifest.failed:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(manifest.failure_reasons.items()))
        notes.print(
            f"[red]{manifest.failed:,} inputs failed[/red]: {reasons}. They are listed by: imagepivot inspect "
            f"{escape(shlex.quote(output))} --failures",
            soft_wrap=True,
        )
        if manifest.failed > max_failures:
            raise typer.Exit(3)

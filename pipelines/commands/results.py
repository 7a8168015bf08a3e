"""What the commands print about the dataset that they wrote."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from pipelines.commands.options import console, remark
from schemas.console import events
from schemas.console.tables import Table, render_tables
from schemas.escapes import to_json

if TYPE_CHECKING:
    from schemas.manifest import Manifest


def finish(manifest: Manifest, output: str, max_failures: int = 0) -> None:
    """Print what was written and what failed; exit with code 3 where more inputs failed than are allowed."""
    from pipelines.datasets.inspection import statistics_table

    failed = dict(sorted(manifest.failure_reasons.items()))
    events.record(counts={"rows": manifest.rows, "shards": len(manifest.shards), "failed": failed})
    console.print(
        f"[bold]{manifest.kind}[/bold]: {manifest.rows:,} rows in {len(manifest.shards)} shards in {escape(output)} "
        f"(fingerprint {manifest.fingerprint[:12]})",
        highlight=False,
        soft_wrap=True,
    )
    render_tables(console, [statistics_table(manifest)])
    if manifest.failed:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in failed.items())
        listed = f"They are listed by: imagepivot inspect {shlex.quote(output)} --failures"
        remark(f"{manifest.failed:,} inputs failed: {counts}. {listed}", style="red")
    if manifest.failed > max_failures:
        raise typer.Exit(3)


def print_extractors(*, as_json: bool) -> None:
    """Print the catalogue of extractors, as tables or as JSON."""
    from extractors import entries
    from pipelines.datasets.inspection import value_rows

    catalogue = [entry.to_json() for entry in entries()]
    if as_json:
        typer.echo(to_json(catalogue, indent=2))
        return
    tables = []
    for entry in catalogue:
        shape = entry.pop("shape")
        entry["makes"] = f"{entry.pop('kind')}, {'shape depends on the model' if shape is None else '×'.join(map(str, shape))}"
        entry["makes"] += f", {entry.pop('dtype')}"
        values = {name: entry[name] for name in ("makes", "source", "weights", "preprocessing") if entry[name]}
        tables.append(Table(("", ""), list(value_rows(values)), entry["name"], has_borders=True))
    render_tables(console, tables)

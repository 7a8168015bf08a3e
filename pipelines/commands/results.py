"""What the commands print about the dataset that they wrote."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.text import Text

from pipelines.commands.options import console, remark
from schemas import events
from schemas.escapes import to_json

if TYPE_CHECKING:
    from schemas.manifest import Manifest
    from schemas.writing.tasks import TaskSummary

__all__ = ["finish", "finish_task", "print_extractors"]


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
    if (table := statistics_table(manifest)) is not None:
        console.print(table)
    if manifest.failed:
        listed = f"are listed by: imagepivot inspect {shlex.quote(output)} --failures"
        _judge_failures(failed, listed, max_failures)


def finish_task(summary: TaskSummary, output: str, max_failures: int = 0) -> None:
    """Print what a task has made and what failed; exit with code 3 where more of its inputs failed than are allowed."""
    shards = len(summary.shards)
    events.record(counts={"rows": summary.rows, "shards": shards, "failed": dict(summary.failure_reasons)})
    console.print(
        f"[bold]task {summary.task}[/bold]: {summary.rows:,} rows in {shards} shards in {escape(output)}, "
        f"{summary.made} of them made now; when all {summary.task.count} tasks have ended: imagepivot commit "
        f"{escape(shlex.quote(output))}",
        highlight=False,
        soft_wrap=True,
    )
    if summary.failed:
        _judge_failures(summary.failure_reasons, f"lie in {output}/_failures, with those of other tasks", max_failures)


def _judge_failures(reasons: Mapping[str, int], listed: str, max_failures: int) -> None:
    failed = sum(reasons.values())
    counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    remark(f"{failed:,} inputs failed: {counts}. They {listed}", style="red")
    if failed > max_failures:
        raise typer.Exit(3)


def print_extractors(*, as_json: bool) -> None:
    """Print the catalogue of extractors, as tables or as JSON."""
    from extractors import entries
    from pipelines.datasets.value_tables import add_values, named_table

    catalogue = [entry.to_json() for entry in entries()]
    if as_json:
        typer.echo(to_json(catalogue, indent=2))
        return
    for entry in catalogue:
        table = named_table(entry.pop("name"))
        shape = entry.pop("shape")
        entry["makes"] = f"{entry.pop('kind')}, {'shape depends on the model' if shape is None else '×'.join(map(str, shape))}"
        entry["makes"] += f", {entry.pop('dtype')}"
        add_values(table, {name: entry[name] for name in ("makes", "source", "weights", "preprocessing") if entry[name]})
        console.print(table, Text(""))

"""The commands ``inspect`` and ``validate``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape

from pipelines.commands.options import AsJson, console, notes
from schemas.errors import DatasetError

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot inspect build/features --rows 3")
def inspect(
    dataset: Annotated[str, typer.Argument(help="Folder of a dataset.", show_default=False)],
    rows: Annotated[int, typer.Option("--rows", min=0, help="Sample rows to show.")] = 5,
    failures: Annotated[
        bool, typer.Option("--failures", help="List all inputs that failed; with --json one per line.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a dataset: parameters, statistics, failures and sample rows."""
    from pipelines.datasets.inspection import describe, failures_table
    from pipelines.datasets.inspection_json import describe_json
    from schemas.dataset import open_dataset

    opened = open_dataset(dataset)
    if failures and as_json:
        for row in opened.failures().to_pylist():
            typer.echo(json.dumps(row, ensure_ascii=False))
    elif failures and opened.manifest.failed:
        console.print(failures_table(opened))
    elif failures:
        console.print(f"{escape(dataset)}: nothing failed", highlight=False, soft_wrap=True)
    elif as_json:
        typer.echo(json.dumps(describe_json(opened, rows=rows), ensure_ascii=False, indent=2))
    else:
        console.print(describe(opened, rows=rows))


@app.command(epilog="Example: imagepivot validate build/features")
def validate(
    dataset: Annotated[str, typer.Argument(help="Folder of a dataset.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Check every promise of the format on the stored bytes."""
    from schemas.validation import validate as problems_of

    problems = problems_of(dataset)
    if as_json:
        typer.echo(json.dumps({"dataset": dataset, "holds": not problems, "problems": problems}, ensure_ascii=False, indent=2))
        raise typer.Exit(1 if problems else 0)
    for problem in problems:
        notes.print(f"[red]{escape(problem)}[/red]", highlight=False, soft_wrap=True)
    if problems:
        raise DatasetError(f"{dataset!r} breaks {len(problems)} promises of the format: make it again, or copy it again")
    console.print(f"{escape(dataset)}: everything holds", highlight=False)

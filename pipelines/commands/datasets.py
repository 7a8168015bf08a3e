"""The commands ``inspect`` and ``validate``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from pipelines.commands.configuration import Config
from pipelines.commands.options import console, notes
from schemas.errors import DatasetError

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot inspect features --rows 3")
def inspect(
    dataset: Annotated[str, typer.Argument(help="Folder of a dataset.", show_default=False)],
    rows: Annotated[int, typer.Option("--rows", min=0, help="Sample rows to show.")] = 5,
    config: Config = "",
) -> None:
    """Show a dataset: parameters, statistics, failures and sample rows."""
    from pipelines.datasets.inspection import describe
    from schemas.dataset import open_dataset

    console.print(describe(open_dataset(dataset), rows=rows))


@app.command(epilog="Example: imagepivot validate features")
def validate(
    dataset: Annotated[str, typer.Argument(help="Folder of a dataset.", show_default=False)],
    config: Config = "",
) -> None:
    """Check every promise of the format on the stored bytes."""
    from schemas.validation import validate as problems_of

    problems = problems_of(dataset)
    for problem in problems:
        notes.print(f"[red]{escape(problem)}[/red]", highlight=False, soft_wrap=True)
    if problems:
        raise DatasetError(f"{dataset!r} breaks {len(problems)} promises of the format: make it again, or copy it again")
    console.print(f"{escape(dataset)}: everything holds", highlight=False)

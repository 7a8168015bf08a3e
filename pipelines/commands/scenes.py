"""The command ``scenes``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from pipelines.commands.configuration import Config
from pipelines.commands.options import LogJson, console, notes

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot scenes scenes --count 300")
def scenes(
    output: Annotated[str, typer.Argument(help="Local folder for the scenes.", show_default=False)],
    count: Annotated[int, typer.Option("--count", help="Number of scenes to draw.")] = 300,
    seed: Annotated[int, typer.Option("--seed", help="Another seed gives other scenes.")] = 0,
    log_json: LogJson = False,
    config: Config = "",
) -> None:
    """Draw scenes with captions in four languages, to try everything without data of one's own.

    Writes the pictures to OUTPUT/images, and the table OUTPUT/captions.tsv.
    """
    from pipelines.demo.writing import write_scenes
    from schemas.filesystems import storage_errors
    from schemas.locations import target_path

    folder = target_path(output)
    with storage_errors(output), notes.status(f"drawing {count} scenes"):
        write_scenes(folder, count=count, seed=seed)
    console.print(f"[bold]scenes[/bold]: {count:,} in {escape(output)}", highlight=False, soft_wrap=True)

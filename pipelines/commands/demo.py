"""The command ``demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.commands.options import console, notes

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot demo build/demo --scenes 300")
def demo(
    context: typer.Context,
    output: Annotated[str, typer.Argument(help="Local folder for the scenes and the datasets.")] = "build/demo",
    scenes: Annotated[int, typer.Option("--scenes", help="Number of scenes to draw.")] = 300,
) -> None:
    """Run everything on drawn scenes: captions in four languages, vocabulary, encoding, features, regions, training.

    A small model is trained for a few seconds, measured on held-out scenes, and asked one query in each language.
    """
    from pipelines.demo.run import run_demo
    from schemas.filesystems import storage_errors
    from schemas.locations import target_path
    from train.demo import train_demo

    folder = target_path(output)
    with storage_errors(output):
        folder.mkdir(parents=True, exist_ok=True)
    run_demo(folder, scenes=scenes, console=console, notes=notes)
    train_demo(folder, console=console, notes=notes, tokenize=context.obj)

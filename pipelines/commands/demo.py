"""The command ``demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.commands.options import console, remark

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot demo build/demo --scenes 300")
def demo(
    context: typer.Context,
    output: Annotated[str, typer.Argument(help="Local folder for the scenes and the datasets.")] = "build/demo",
    scenes: Annotated[int, typer.Option("--scenes", help="Number of scenes to draw.")] = 300,
) -> None:
    """Run everything on drawn scenes: captions in four languages, vocabulary, encoding, features, regions, training.

    A small model is trained for a few seconds, measured on held-out scenes, and asked one query in each language. It is the plan
    demo of imagepivot build, with the results shown.
    """
    from pipelines.commands.build import build_plan
    from pipelines.demo.run import show_datasets
    from schemas.filesystems import storage_errors
    from schemas.locations import target_path
    from train.demo import LEAST_SCENES, show_run

    folder = target_path(output)
    with storage_errors(output):
        folder.mkdir(parents=True, exist_ok=True)
    is_trained = scenes >= LEAST_SCENES
    targets = () if is_trained else ("encoded", "features", "picture")
    build_plan("demo", targets, output=output, settings={"steps.scenes.count": str(scenes)})
    show_datasets(folder, console=console)
    if is_trained:
        show_run(folder, console=console, tokenize=context.obj)
    else:
        remark(f"nothing is trained: with so few scenes none is held out; draw at least {LEAST_SCENES} with --scenes")

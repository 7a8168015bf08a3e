"""The command ``features``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipelines.commands.configuration import Config
from pipelines.commands.options import (
    BEAM,
    Columns,
    Ids,
    LogJson,
    MaxFailures,
    Output,
    Overwrite,
    Shards,
    console,
    execution_of,
    notes,
)
from pipelines.commands.results import finish
from schemas.keys import DEFAULT_SHARDS

if TYPE_CHECKING:
    from extractors.settings import RegionOptions

__all__ = ["app"]

app = typer.Typer()

_REGIONS = "Regions"
Backend = Literal["torchvision", "detectron2"]


@app.command(
    context_settings=BEAM,
    epilog="Example: imagepivot features photos features --extractor resnet50-pool",
)
def features(
    context: typer.Context,
    images: Annotated[str, typer.Argument(help="Folder, pattern, or table with image_id and uri.", show_default=False)],
    output: Output,
    extractor: Annotated[str, typer.Option("--extractor", help="Name of the extractor.")] = "resnet50-pool",
    weights: Annotated[
        str, typer.Option("--weights", help="[i]default[/i] (downloaded once), a file, or [i]random:SEED[/i] (untrained).")
    ] = "default",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.")] = "auto",
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16; on a GPU also tf32 and fp16.")] = "fp32",
    compile: Annotated[  # noqa: A002
        bool, typer.Option("--compile", help="On a GPU: compile the model first, which takes a minute and speeds up the rest.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Images that the model takes at once; the extractor's own number by default."),
    ] = None,
    ids: Ids = "name",
    columns: Columns = "",
    min_regions: Annotated[
        int | None, typer.Option("--min-regions", help="Fewest regions of an image; 36 by default.", rich_help_panel=_REGIONS)
    ] = None,
    max_regions: Annotated[
        int | None, typer.Option("--max-regions", help="Most regions of an image; 36 by default.", rich_help_panel=_REGIONS)
    ] = None,
    score_threshold: Annotated[
        float | None,
        typer.Option(
            "--score-threshold",
            help="Between these two numbers, keep the regions whose score is at least this; 0.2 by default.",
            rich_help_panel=_REGIONS,
        ),
    ] = None,
    class_names: Annotated[
        str | None,
        typer.Option(
            "--class-names",
            help="Names of the classes, one per line, e.g. objects_vocab.txt; kept with the dataset.",
            rich_help_panel=_REGIONS,
        ),
    ] = None,
    attribute_names: Annotated[
        str | None,
        typer.Option("--attribute-names", help="Names of the attributes, e.g. attributes_vocab.txt.", rich_help_panel=_REGIONS),
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(
            "--backend", help="The library that computes the regions; torchvision by default.", rich_help_panel=_REGIONS
        ),
    ] = None,
    shards: Shards = DEFAULT_SHARDS,
    max_failures: MaxFailures = 0,
    overwrite: Overwrite = False,
    update: Annotated[
        bool, typer.Option("--update", help="Add images that are new in IMAGES to the dataset in OUTPUT.")
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try only the images again that failed before.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write nothing: list the shards to do, their size, and the time they will take."),
    ] = False,
    log_json: LogJson = False,
    workers: Annotated[
        int, typer.Option("--workers", min=0, help="Local worker processes; 0: one per GPU, or one that uses all cores.")
    ] = 0,
    config: Config = "",
) -> None:
    """Extract features of images into shards.

    An image that cannot be read or decoded becomes a failure row and stops nothing. A run that was stopped continues when the
    same command is given again. Flags behind -- go to Beam: -- --runner=DataflowRunner --project=...
    """
    from extractors import ExtractorRequest
    from pipelines.features.extract import extract_features, list_images
    from pipelines.features.job import FeaturesJob
    from pipelines.inputs.columns import parse_columns
    from pipelines.inputs.images import open_images
    from pipelines.running.progress import show_progress

    execution = execution_of(context, workers)
    job = FeaturesJob(
        images=open_images(images, ids=ids, columns=parse_columns(columns) if columns else None),
        output=output,
        extractor=ExtractorRequest(
            extractor,
            weights=weights,
            precision=precision,
            compile=compile,
            regions=_region_options(
                min_regions=min_regions,
                max_regions=max_regions,
                score_threshold=score_threshold,
                class_names=class_names,
                attribute_names=attribute_names,
                backend=backend,
            ),
        ),
        device=device,
        batch_size=batch_size,
        shards=shards,
        overwrite=overwrite,
        update=update,
        retry_failed=retry_failed,
    )
    listing = list_images(job)
    if dry_run:
        from pipelines.features.planning import plan_table, plan_work

        console.print(plan_table(plan_work(job, listing)))
        return
    if any(name.startswith("random:") for name in (weights, extractor.rpartition("+")[2])):
        notes.print("[yellow]untrained: the weights are random, the features mean nothing[/yellow]")
    with show_progress(notes, extractor, unit="images", total=listing.count, log_json=log_json) as meter:
        manifest = extract_features(job, execution, meter, listing=listing)
    finish(manifest, output, max_failures)


def _region_options(**given: str | int | float | None) -> RegionOptions | None:
    """Return the options of regions, with defaults for those that are None; None if all are."""
    from extractors.settings import RegionOptions

    chosen = {name: value for name, value in given.items() if value is not None}
    return RegionOptions(**chosen) if chosen else None  # type: ignore[arg-type]

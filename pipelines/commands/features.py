"""The command ``features``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipelines.commands import completion
from pipelines.commands.configuration import Config
from pipelines.commands.options import (
    BEAM,
    AllowPrivateAddresses,
    Check,
    Columns,
    Delimiter,
    Detach,
    Device,
    Gpu,
    GpusPerWorker,
    Ids,
    LogJson,
    MaxFailures,
    Overwrite,
    Precision,
    Quoting,
    Shards,
    SharedDisk,
    StartTimeout,
    StoredType,
    WorkerMachine,
    accelerator_of,
    console,
    execution_of,
    notes,
    remark,
    remark_on_precision,
)
from pipelines.commands.results import finish, print_extractors
from schemas.errors import UsageError
from schemas.keys import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extractors.settings import RegionOptions
    from pipelines.features.job import FeaturesJob
    from pipelines.inputs.images import ImageSource
    from schemas.writing.output import UpdatePolicy

__all__ = ["app", "job_of"]

app = typer.Typer()

_REGIONS = "Regions"
_CHANGES = "When images have changed"
Backend = Literal["torchvision", "detectron2"]


@app.command(
    context_settings=BEAM,
    epilog="Example: imagepivot features photos features --extractor resnet50-pool",
)
def features(
    context: typer.Context,
    images: Annotated[
        str,
        typer.Argument(
            help="Folder, pattern, table with image_id and uri, tar, or Parquet file with image bytes.", show_default=False
        ),
    ] = "",
    output: Annotated[str, typer.Argument(help="Folder of the dataset to write.", show_default=False)] = "",
    extractor: Annotated[
        str,
        typer.Option("--extractor", help="Name of the extractor, see above.", autocompletion=completion.extractor_names),
    ] = "resnet50-pool",
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            help="[i]default[/i] (downloaded once), a file, its gs://, s3:// or http address, or [i]random:SEED[/i] (untrained). "
            "[i]FILE#NAME[/i] takes one of several sets of weights in it.",
            autocompletion=completion.weights_requests,
        ),
    ] = "default",
    device: Device = "auto",
    precision: Precision = "fp32",
    compile: Annotated[  # noqa: A002
        bool, typer.Option("--compile", help="Compile the model first, which takes minutes; on a CPU it needs a C++ compiler.")
    ] = False,
    dtype: StoredType = "float32",
    grid: Annotated[
        bool,
        typer.Option(
            "--grid", help="Of timm:NAME: the map before the pooling, one vector for each cell, instead of one in all."
        ),
    ] = False,
    separate: Annotated[
        bool, typer.Option("--separate", help="Of the extractors of ten crops: a vector for each crop instead of their mean.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Images that the model takes at once; by default the extractor's own number, on a GPU what is fast.",
        ),
    ] = None,
    ids: Ids = "name",
    allow_private_addresses: AllowPrivateAddresses = False,
    columns: Columns = "",
    delimiter: Delimiter = "",
    quoting: Quoting = "auto",
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
    half_backbone: Annotated[
        bool,
        typer.Option(
            "--half-backbone",
            help="With --precision bf16 or fp16, compute the backbone in 16 bits, too: other proposals.",
            rich_help_panel=_REGIONS,
        ),
    ] = False,
    shards: Shards = AUTO,
    max_failures: MaxFailures = 0,
    overwrite: Overwrite = False,
    check: Check = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Bring the dataset in OUTPUT up to date with images that are new, changed or gone.",
            rich_help_panel=_CHANGES,
        ),
    ] = False,
    keep_removed: Annotated[
        bool,
        typer.Option("--keep-removed", help="With --update: keep the rows of images that are gone.", rich_help_panel=_CHANGES),
    ] = False,
    only_add: Annotated[
        bool,
        typer.Option(
            "--only-add", help="With --update: add images that are new, and keep everything else.", rich_help_panel=_CHANGES
        ),
    ] = False,
    check_content: Annotated[
        bool,
        typer.Option(
            "--check-content",
            help="With --update: read all images and compare digests instead of sizes and modification times.",
            rich_help_panel=_CHANGES,
        ),
    ] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try only the images again that failed before.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write nothing: list the shards to do, their images and bytes."),
    ] = False,
    list_extractors: Annotated[
        bool, typer.Option("--list-extractors", help="List the extractors: shapes, weights, preprocessing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list-extractors: print JSON.")] = False,
    log_json: LogJson = False,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="I/N: make the shards of task I of N of an array job, numbered from 0; the last task completes the dataset.",
        ),
    ] = "",
    workers: Annotated[
        int, typer.Option("--workers", min=0, help="Local worker processes; 0: one per GPU, or one that uses all cores.")
    ] = 0,
    gpu: Gpu = "",
    gpus_per_worker: GpusPerWorker = 1,
    worker_machine: WorkerMachine = "",
    shared_disk: SharedDisk = False,
    start_timeout: StartTimeout = None,
    detach: Detach = False,
    config: Config = "",
) -> None:
    """Extract features of images into shards.

    IMAGES is a folder, searched for images, or else for archives; a [b]pattern[/b] such as [i]'photos/**/*.jpg'[/i]; a
    [b]table[/b] (CSV, TSV, JSON lines or Parquet) with the columns image_id and uri; a [b].tar[/b]; a [b].parquet[/b] file with
    image bytes; or one image; local, gs:// or s3://.

    The extractors are resnet50-pool, vgg19-10crop, vgg19-10crop-caffe, vgg19-grid, resnet152-grid, faster-rcnn-36,
    timm:NAME and detectron2:CONFIG+WEIGHTS; --list-extractors says more.

    An image that cannot be read or decoded becomes a failure row and stops nothing. A run that was stopped continues when the
    same command is given again. Flags behind -- go to Beam: -- --runner=DataflowRunner --project=...
    """
    if list_extractors:
        print_extractors(as_json=as_json)
        return
    for name, value in (("IMAGES", images), ("OUTPUT", output)):
        if not value:
            raise UsageError(f"{name} is missing, expected two: imagepivot features IMAGES OUTPUT")
    if as_json:
        raise UsageError("--json is for --list-extractors: give --log-json for progress as JSON")
    from pipelines.features.extract import extract_features, list_images
    from pipelines.inputs.columns import parse_columns
    from pipelines.inputs.images import open_images
    from pipelines.running.meter import show_progress

    execution = execution_of(
        context,
        workers,
        shared_disk=shared_disk,
        start_timeout=start_timeout,
        accelerator=accelerator_of(gpu, gpus_per_worker, worker_machine),
        detach=detach,
    )
    source = open_images(
        images,
        ids=ids,
        columns=parse_columns(columns) if columns else None,
        delimiter=delimiter,
        quoting=quoting,
        allow_private_addresses=allow_private_addresses,
    )
    job = job_of(source, context.params)
    job.check_execution(execution)
    execution.check_locations(job.locations())
    listing = list_images(job, keep=not execution.is_local and not execution.template)
    _show_not_taken(job.images)
    if dry_run:
        from pipelines.features.planning import plan_table, plan_work

        plan_table(plan_work(job, listing, remark)).render(console)
        return
    if any(name.startswith("random:") for name in (weights, extractor.rpartition("+")[2])):
        remark("untrained: the weights are random, the features mean nothing")
    if execution.is_local:
        remark_on_precision(precision, device)
    total = listing.count
    if job.task is not None:
        total = sum(listing.counts[number] for number in job.task.shards(len(listing.shards)))
    with show_progress(notes, extractor, unit="images", total=total, log_json=log_json) as meter:
        manifest = extract_features(job, execution, meter, listing=listing, remark=remark)
        if job.task is None:
            meter.settle(images=manifest.rows + manifest.failed, failed=manifest.failed)
    finish(manifest, output, max_failures)


def job_of(images: ImageSource, values: Mapping[str, Any]) -> FeaturesJob:
    """Return the job that a command line asks for.

    Args:
        images: the images.
        values: values of the command's parameters, by their names.
    """
    from extractors import ExtractorRequest
    from pipelines.features.job import FeaturesJob
    from schemas.writing.output import ArrayTask

    regions = ("min_regions", "max_regions", "score_threshold", "class_names", "attribute_names", "backend")
    asked = ("weights", "precision", "compile", "dtype", "grid", "separate")
    kept = ("output", "device", "batch_size", "shards", "overwrite", "retry_failed")
    return FeaturesJob(
        images=images,
        extractor=ExtractorRequest(
            values["extractor"],
            regions=_region_options(**{name: values[name] for name in regions}, half_backbone=values["half_backbone"] or None),
            **{name: values[name] for name in asked},
        ),
        verify=values["check"],
        update=_update(values["update"], **{name: values[name] for name in ("keep_removed", "only_add", "check_content")}),
        task=ArrayTask.parse(values["task"]) if values["task"] else None,
        **{name: values[name] for name in kept},
    )


def _update(update: bool, **settings: bool) -> UpdatePolicy | None:
    from schemas.writing.output import UpdatePolicy

    given = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value]
    if given and not update:
        raise UsageError(f"{' and '.join(given)} says how to update a dataset: give --update, too")
    return UpdatePolicy(**settings) if update else None


def _region_options(**given: str | int | float | None) -> RegionOptions | None:
    """Return the options of regions, with defaults for those that are None; None if all are."""
    from extractors.settings import RegionOptions

    chosen = {name: value for name, value in given.items() if value is not None}
    return RegionOptions(**chosen) if chosen else None  # type: ignore[arg-type]


def _show_not_taken(images: ImageSource) -> None:
    """Say what the listing of a source left out: in yellow what may be images, calmly what lies beside them on purpose."""
    if images.not_taken is not None:
        for text, style in ((images.not_taken.warning, "yellow"), (images.not_taken.remark, "dim")):
            if text:
                remark(text, style=style)

"""The commands ``features`` and ``extractors``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pipelines.commands.binding import command
from pipelines.commands.results import (
    AsJson,
    LogJson,
    MaxFailures,
    console,
    finish,
    notes,
    print_extractors,
    remark,
    remark_on_precision,
)
from pipelines.jobs import FeaturesJob
from pipelines.running.accelerators import Accelerator
from pipelines.running.execution import Execution
from schemas.options import Opt

if TYPE_CHECKING:
    from pipelines.inputs.images import ImageSource


@command("features photos features --extractor resnet50-pool")
def features(
    job: FeaturesJob,
    max_failures: MaxFailures = 0,
    dry_run: Annotated[bool, Opt("Write nothing: list the shards to do, their images and bytes.")] = False,
    log_json: LogJson = False,
    execution: Execution = Execution(),
    accelerator: Accelerator | None = None,
) -> None:
    """Extract features of images into shards.

    IMAGES is a folder, searched for images, or else for archives; a [b]pattern[/b] such as [i]'photos/**/*.jpg'[/i]; a
    [b]table[/b] (CSV, TSV, JSON lines or Parquet) with the columns image_id and uri; a [b].tar[/b]; a [b].parquet[/b] file with
    image bytes; or one image; local, gs:// or s3://.

    The extractors are resnet50-pool, vgg19-10crop, vgg19-10crop-caffe, vgg19-grid, resnet152-grid, faster-rcnn-36,
    timm:NAME and detectron2:CONFIG+WEIGHTS; imagepivot extractors says more.

    An image that cannot be read or decoded becomes a failure row and stops nothing. A run that was stopped continues when the
    same command is given again. Flags behind -- go to Beam: -- --runner=DataflowRunner --project=...
    """
    from pipelines.features.extraction import extract_features, list_images
    from pipelines.running.meter import show_progress

    execution = replace(execution, accelerator=accelerator)
    job = job.opened()
    job.check_execution(execution)
    execution.check_locations(job.locations())
    listing = list_images(job, keep=not execution.is_local and not execution.template)
    _show_skipped(job.open_images())
    if dry_run:
        from pipelines.features.dry_run import plan_dry_run, plan_table

        plan_table(plan_dry_run(job, listing, remark)).render(console)
        return
    request = job.extractor
    if any(name.startswith("random:") for name in (request.weights, request.name.rpartition("+")[2])):
        remark("untrained: the weights are random, the features mean nothing")
    if execution.is_local:
        remark_on_precision(request.precision, job.device)
    total = listing.count
    if job.task is not None:
        total = sum(listing.counts[number] for number in job.task.shards(len(listing.shards)))
    with show_progress(notes, request.name, unit="images", total=total, log_json=log_json) as meter:
        manifest = extract_features(job, execution, meter, listing=listing, remark=remark)
        if job.task is None:
            meter.settle(images=manifest.rows + manifest.failed, failed=manifest.failed)
    finish(manifest, job.output, max_failures)


@command("extractors --json")
def extractors(as_json: AsJson = False) -> None:
    """List the extractors: shapes, weights, preprocessing."""
    print_extractors(as_json=as_json)


def _show_skipped(images: ImageSource) -> None:
    """Say what the listing of a source left out: in yellow what may be images, calmly what lies beside them on purpose."""
    if images.skipped is not None:
        for text, style in ((images.skipped.warning, "yellow"), (images.skipped.remark, "dim")):
            if text:
                remark(text, style=style)

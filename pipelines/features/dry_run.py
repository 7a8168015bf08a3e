"""Dry run of ``imagepivot features``: shards, images and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from extractors.base import warn_once
from pipelines.features.extraction import Remark, plan_features
from pipelines.features.feature_shards import reusable_rows
from pipelines.features.ref_chunks import listed_refs
from pipelines.inputs.images import ImageRef, Listing
from pipelines.jobs import FeaturesJob
from schemas.console.tables import Row, Table, number_columns
from schemas.keys import shard_of
from schemas.kinds import vector_bytes
from schemas.writing.dataset_writer import read_compatible


@dataclass(frozen=True)
class ShardPlan:
    """The work that is left of one shard.

    Attributes:
        images: images to extract.
        kept: stored rows that stay.
        dropped: stored rows and failures that do not, because their images are gone or have changed.
    """

    number: int
    images: int
    kept: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class DryRunReport:
    """The work of a run.

    Attributes:
        todo: the shards that are not finished.
        finished: number of finished shards; of a task's own if the job is one.
        row_bytes: stored size of the feature of one image.
    """

    todo: tuple[ShardPlan, ...]
    finished: int
    row_bytes: int

    @property
    def images(self) -> int:
        """Number of images to extract."""
        return sum(shard.images for shard in self.todo)

    @property
    def bytes(self) -> int:
        """Bytes to write, counting whole shards where rows are added."""
        return sum((shard.images + shard.kept) * self.row_bytes for shard in self.todo)


def plan_dry_run(job: FeaturesJob, listing: Listing, remark: Remark = warn_once) -> DryRunReport:
    """Count the images and bytes that a run would write; nothing is written. ``remark`` is that of `plan_features`.

    Raises:
        ImagepivotError: the images, weights or device are missing, or the run would refuse the folder.
    """
    job = job.opened()
    output = plan_features(job, listing, remark)
    job.check_device()
    output.folder.check_writable()
    state = read_compatible(output, job.policy, job.task)
    finished = state.finished_shards()
    stored = state.intact_shards() - finished
    wanted = range(output.shards) if job.task is None else job.task.shards(output.shards)
    refs: dict[int, list[ImageRef]] = {number: [] for number in stored}
    images = job.open_images()
    for ref in listed_refs(images, listing) if stored else ():
        if (number := shard_of(ref.image_id, output.shards)) in refs:
            refs[number].append(ref)
    todo = []
    for number in wanted:
        if number in stored:
            now = images.with_versions(sorted(refs[number]))
            reuse = reusable_rows(output, number, now, job.policy, read=images.read)
            todo.append(ShardPlan(number, len(reuse.todo), len(reuse.rows), reuse.dropped))
        elif number not in finished:
            todo.append(ShardPlan(number, listing.counts[number]))
    todo = [shard for shard in todo if shard.images or shard.dropped or shard.number not in stored]
    return DryRunReport(tuple(todo), len(wanted) - len(todo), vector_bytes(output.schema))


def plan_table(plan: DryRunReport) -> Table:
    """Return the plan as a table: the first shards to do, and the sum."""
    rows: list[Row] = []
    for shard in plan.todo[:20]:
        size = (shard.images + shard.kept) * plan.row_bytes / 2**20
        rows.append((shard.number, shard.images, shard.kept, shard.dropped, f"{size:,.1f}"))
    if len(plan.todo) > 20:
        rows.append(("...",))
    kept, dropped = (sum(getattr(shard, name) for shard in plan.todo) for name in ("kept", "dropped"))
    rows += [(), ("all", plan.images, kept, dropped, f"{plan.bytes / 2**20:,.1f}")]
    columns = number_columns("shard", "images to extract", "rows kept", "rows dropped", "MiB written", spec=",")
    return Table(columns, rows, f"{len(plan.todo)} shards to do, {plan.finished} finished", has_borders=True)

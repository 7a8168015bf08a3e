"""Dry run of ``imagepivot features``: shards, images and bytes."""

from dataclasses import dataclass

from extractors.base import warn_once
from pipelines.features.feature_shards import reusable_rows
from pipelines.features.planning import plan_features
from pipelines.features.ref_chunks import listed_refs
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.listing import Listing
from pipelines.jobs import FeaturesJob
from schemas.console.events import Remark
from schemas.console.tables import Row, Table, number_columns
from schemas.keys import shard_of
from schemas.kinds import vector_bytes
from schemas.writing.dataset_writer import read_compatible


@dataclass(frozen=True)
class ShardPlan:
    """Work for one shard.

    Attributes:
        images: number of images to extract.
        kept: number of reusable stored rows.
        dropped: number of stored rows and failures of removed or changed images.
    """

    shard: int
    images: int
    kept: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class DryRunReport:
    """Work of a run.

    Attributes:
        finished: number of finished shards, for an array task of its own shards.
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
        """Bytes to write; shards are rewritten whole."""
        return sum((shard.images + shard.kept) * self.row_bytes for shard in self.todo)


def plan_dry_run(job: FeaturesJob, listing: Listing, on_warning: Remark = warn_once) -> DryRunReport:
    """Count images and bytes to write, without writing.

    Raises:
        ImagepivotError: the images, weights or device are missing, or the run would refuse the folder.
    """
    job = job.opened()
    output = plan_features(job, listing, on_warning)
    job.extractor.check_device(job.device)
    output.folder.check_writable()
    state = read_compatible(output, job.policy, job.task)
    finished = state.finished_shards()
    stored = state.intact_shards() - finished
    wanted = range(output.shards) if job.task is None else job.task.shards(output.shards)
    refs: dict[int, list[ImageRef]] = {shard: [] for shard in stored}
    images = job.open_images()
    for ref in listed_refs(job, listing) if stored else ():
        if (shard := shard_of(ref.image_id, output.shards)) in refs:
            refs[shard].append(ref)
    todo = []
    for shard in wanted:
        if shard in stored:
            now = images.with_versions(sorted(refs[shard]))
            reuse = reusable_rows(output, shard, now, job.policy, read=images.read)
            todo.append(ShardPlan(shard, len(reuse.todo), len(reuse.rows), reuse.dropped))
        elif shard not in finished:
            todo.append(ShardPlan(shard, listing.counts[shard]))
    todo = [plan for plan in todo if plan.images or plan.dropped or plan.shard not in stored]
    return DryRunReport(tuple(todo), len(wanted) - len(todo), vector_bytes(output.schema))


def plan_table(plan: DryRunReport) -> Table:
    """Return a table of the first unfinished shards and the sum."""
    rows: list[Row] = []
    for shard in plan.todo[:20]:
        size = (shard.images + shard.kept) * plan.row_bytes / 2**20
        rows.append((shard.shard, shard.images, shard.kept, shard.dropped, f"{size:,.1f}"))
    if len(plan.todo) > 20:
        rows.append(("...",))
    kept, dropped = (sum(getattr(shard, name) for shard in plan.todo) for name in ("kept", "dropped"))
    rows += [(), ("all", plan.images, kept, dropped, f"{plan.bytes / 2**20:,.1f}")]
    columns = number_columns("shard", "images to extract", "rows kept", "rows dropped", "MiB written", spec=",")
    title = f"{len(plan.todo)} shards to do, {plan.finished} finished"
    if plan.todo:
        title += f"; {(plan.images + kept) / len(plan.todo):,.0f} images a shard"
    return Table(columns, rows, title, has_borders=True)

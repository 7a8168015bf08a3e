"""Plan a run of ``imagepivot features``: its shards, their size, and the time that a short measurement predicts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from rich.table import Table

from extractors.remarks import tell
from pipelines.features.extract import Remark, plan_features
from pipelines.features.forward import Tally, extract_shard
from pipelines.features.job import FeaturesJob
from pipelines.features.reuse import plan_reuse
from pipelines.features.workers import count_gpus, decoding_threads
from pipelines.inputs.images import ImageRef, Listing, kept_refs
from pipelines.running.progress import bound_by
from schemas.keys import shard_of
from schemas.kinds import schema_of, vector_bytes
from schemas.limits import usable_cores
from schemas.output import Output
from schemas.progress import duration, pace
from schemas.survey import Survey
from schemas.tasks import survey_task

__all__ = ["ShardPlan", "WorkPlan", "plan_table", "plan_work"]

_MEASURED_BATCHES = 3


@dataclass(frozen=True)
class ShardPlan:
    """The work that is left of one shard.

    Attributes:
        number: number of the shard.
        images: images to extract.
        kept: stored rows that stay.
        dropped: stored rows and failures that do not, because their images are gone or have changed.
    """

    number: int
    images: int
    kept: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class WorkPlan:
    """The work of a run.

    Attributes:
        todo: the shards that are not finished.
        finished: number of finished shards; of a task's own if the job is one.
        row_bytes: stored size of the feature of one image.
        images_per_second: measured on a few images of this source; None if there is nothing to do or to measure.
        bottleneck: ``model`` or ``decoding``, likewise.
    """

    todo: tuple[ShardPlan, ...]
    finished: int
    row_bytes: int
    images_per_second: float | None
    bottleneck: str | None

    @property
    def images(self) -> int:
        """Number of images to extract."""
        return sum(shard.images for shard in self.todo)

    @property
    def bytes(self) -> int:
        """Bytes to write, counting whole shards where rows are added."""
        return sum((shard.images + shard.kept) * self.row_bytes for shard in self.todo)

    @property
    def seconds(self) -> float | None:
        """Seconds that the run will take, start-up not counted."""
        return self.images / self.images_per_second if self.images_per_second else None


def plan_work(job: FeaturesJob, listing: Listing, remark: Remark = tell) -> WorkPlan:
    """Look at the folder and measure the extractor on a few of the images; nothing is written.

    Args:
        job: what to make.
        listing: its images.
        remark: receives a sentence about a file of weights that holds several sets of them.

    Raises:
        ImagepivotError: the images, weights or device are missing, or the run would refuse the folder.
    """
    output = plan_features(job, listing, remark)
    job.check_device()
    output.folder.check_writable()
    survey = _survey(job, output)
    finished = frozenset() if job.overwrite else survey.finished()
    stored = frozenset() if job.overwrite else survey.usable() - finished
    wanted = range(output.shards) if job.task is None else job.task.shards(output.shards)
    refs: dict[int, list[ImageRef]] = {number: [] for number in stored}
    for ref in _refs(job, listing) if stored else ():
        if (number := shard_of(ref.image_id, output.shards)) in refs:
            refs[number].append(ref)
    todo = []
    for number in wanted:
        if number in stored:
            reuse = plan_reuse(
                output,
                number,
                job.images.with_versions(sorted(refs[number])),
                read=job.images.read,
                update=job.update,
                retry_failed=job.retry_failed,
            )
            todo.append(ShardPlan(number, len(reuse.todo), len(reuse.rows), reuse.dropped))
        elif number not in finished:
            todo.append(ShardPlan(number, listing.counts[number]))
    todo = [shard for shard in todo if shard.images or shard.dropped or shard.number not in stored]
    rate, bottleneck = (
        _measure(job, listing, output, frozenset(shard.number for shard in todo))
        if any(s.images for s in todo)
        else (None, None)
    )
    return WorkPlan(tuple(todo), len(wanted) - len(todo), vector_bytes(output.schema), rate, bottleneck)


def _survey(job: FeaturesJob, output: Output) -> Survey:
    """Look at the folder, and refuse it as the run would."""
    if job.task is not None:
        return survey_task(
            output,
            job.task,
            libraries=job.libraries(),
            verify=job.verify,
            update=job.update,
            retry_failed=job.retry_failed,
        )
    survey = Survey(output, verify=job.verify, update=job.update, retry_failed=job.retry_failed)
    survey.refuse(overwrite=job.overwrite)
    return survey


def _refs(job: FeaturesJob, listing: Listing) -> Iterator[ImageRef]:
    return job.images.refs() if listing.kept is None else kept_refs(listing.kept.path)


def _measure(job: FeaturesJob, listing: Listing, output: Output, shards: frozenset[int]) -> tuple[float | None, str | None]:
    """Measure images per second, of all GPUs together, and what bounds them. The first batch warms up and is not counted."""
    from extractors.batch_sizes import find_batch_size

    extractor, workers = job.extractor.load(job.device), max(1, count_gpus(job))
    batch_size = job.batch_size or find_batch_size(extractor)

    def sample() -> Iterator[ImageRef]:
        chosen = (ref for ref in _refs(job, listing) if shard_of(ref.image_id, output.shards) in shards)
        return islice(chosen, _MEASURED_BATCHES * batch_size)

    tally, times = Tally(), []
    rows = extract_shard(
        list(sample()),
        extractor=extractor,
        read=job.images.read,
        schema=schema_of(extractor.description.kind, extractor.spec),
        batch_size=batch_size,
        threads=decoding_threads(job, max(1, usable_cores() // workers)),
        tally=tally,
        reads=job.images.parallel_reads,
        on_batch=lambda batch: times.append((time.perf_counter(), batch)),
    )
    started = time.perf_counter()
    for _ in rows:
        pass
    if len(times) > 2:
        started, times = times[0][0], times[1:]
    images = sum(batch.images + len(batch.failures) for _, batch in times)
    seconds = times[-1][0] - started
    waited, worked = (sum(getattr(batch, name) for _, batch in times) for name in ("wait_seconds", "forward_seconds"))
    if not images or seconds <= 0:
        return None, None
    return workers * images / seconds, bound_by(waited, worked)


def plan_table(plan: WorkPlan) -> Table:
    """Return the plan as a table for a terminal: the first shards to do, and the sum."""
    table = Table(title=f"{len(plan.todo)} shards to do, {plan.finished} finished", title_justify="left", title_style="bold")
    for heading in ("shard", "images to extract", "rows kept", "rows dropped", "MiB written"):
        table.add_column(heading, justify="right")
    for shard in plan.todo[:20]:
        size = (shard.images + shard.kept) * plan.row_bytes / 2**20
        table.add_row(str(shard.number), f"{shard.images:,}", f"{shard.kept:,}", f"{shard.dropped:,}", f"{size:,.1f}")
    if len(plan.todo) > 20:
        table.add_row("...", "", "", "", "")
    table.add_section()
    kept, dropped = (sum(getattr(shard, name) for shard in plan.todo) for name in ("kept", "dropped"))
    table.add_row("all", f"{plan.images:,}", f"{kept:,}", f"{dropped:,}", f"{plan.bytes / 2**20:,.1f}")
    if plan.seconds is not None:
        table.caption = (
            f"about {duration(plan.seconds)}, {pace(plan.images_per_second or 0)}, bound by {plan.bottleneck}; "
            "measured on a few images, the start not counted"
        )
        table.caption_justify = "left"
    return table

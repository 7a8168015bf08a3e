"""``imagepivot features``: extract the shards of a plan.

Up-to-date datasets need neither Beam nor torch; local workers need no Beam.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from extractors.base import warn_once
from pipelines.features.planning import list_images, plan_features, shards_remark
from pipelines.features.ref_chunks import Kept, chunk_refs, listed_refs
from pipelines.features.shard_worker import ShardExtractor, check_worker, count_gpus, planned_fingerprint
from pipelines.features.stage_images import stage_images, staging_area
from pipelines.inputs.images.listing import Listing
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from pipelines.running.job import DatasetJob, run_job
from pipelines.running.meter import Meter
from pipelines.running.process_pool import Map, by_key
from schemas.console import events
from schemas.console.events import Remark
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.process.resources import usable_cores


@takes_fields(FeaturesJob)
def extract_features(
    job: FeaturesJob, execution: Execution = Execution(), meter: Meter = Meter(), *, on_warning: Remark = warn_once
) -> Manifest:
    """Write a dataset of kind ``features`` or ``regions``.

    The default number of workers is one per GPU, or a single one on all cores. ``on_warning`` is that of
    `pipelines.features.planning.plan_features`.

    Raises:
        UsageError: the job is a task of an array job, and the execution has another runner.
        DetachedError: a job continues without this process, or shards of other tasks are missing.
        ImagepivotError: the images, weights or device are missing, or the folder cannot be written.
    """
    return FeaturesPlan.open(job, execution).run(meter, on_warning)


@dataclass(frozen=True)
class FeaturesPlan:
    """A job whose images are listed.

    Attributes:
        job: the job with its images opened.
        execution: runner and workers.
        listing: the images by shard.
    """

    job: FeaturesJob
    execution: Execution
    listing: Listing

    @classmethod
    def open(cls, job: FeaturesJob, execution: Execution = Execution()) -> Self:
        """Check a job, and list its images, which takes long for large sources.

        Raises:
            UsageError: the job is a task of an array job, and the execution has another runner.
            ImagepivotError: the images are missing.
        """
        job = job.opened()
        job.check_execution(execution)
        execution.check_locations(job.locations())
        return cls(job, execution, list_images(job, keep=not execution.is_local and not execution.template))

    @property
    def images(self) -> int:
        """Number of images in the dataset, or in the shards of a task."""
        if self.job.task is None:
            return self.listing.count
        return sum(self.listing.counts[shard] for shard in self.job.task.shards(len(self.listing.shards)))

    def remark_on_shards(self) -> None:
        """Remark on too few shards for several machines."""
        if text := shards_remark(self.job, self.listing, self.execution):
            events.remark(text)

    def run(self, meter: Meter = Meter(), on_warning: Remark = warn_once) -> Manifest:
        """Write the dataset, see `extract_features`."""
        execution, listing = self.execution, self.listing
        job = self.job.for_workers(execution)
        gpus = execution.accelerator.count if execution.accelerator is not None else 0
        output = replace(plan_features(job, listing, on_warning), max_failures=execution.commit_limit)
        if not execution.is_local:  # Only the workers need the device and the network.
            output = replace(output, sample_outputs=None)
        execution = replace(execution, default_workers=lambda: max(1, count_gpus(job)))

        def build(pipeline: Any, finished: frozenset[int], check: Any) -> Any:
            from pipelines.features.transforms import ExtractFeatures

            self.remark_on_shards()
            kept: Kept = ()
            if listing.cached is not None and not execution.template:  # A template lists images itself.
                kept = listing.cached.share(output.folder)
            return pipeline | "ExtractFeatures" >> ExtractFeatures(
                job,
                output,
                finished=finished,
                meter=meter,
                check=check,
                accelerator=execution.accelerator,
                copies=temporary.enter_context(staging_area(job, execution, output.folder)),
                kept=kept,
            )

        def run_here(finished: frozenset[int], run: Map) -> None:
            self.remark_on_shards()
            workers = execution.local_workers
            threads = max(1, usable_cores() // workers) if workers > 1 else 0
            refs = listed_refs(job, listing)
            with (
                tempfile.TemporaryDirectory(prefix="imagepivot-references-", ignore_cleanup_errors=True) as folder,
                staging_area(job, execution, output.folder) as copies,
            ):
                if copies is None:
                    chunks = by_key(chunk_refs(refs, output.shards, skip_shards=finished, folder=folder))
                else:
                    chunks = stage_images(job, output, refs, copies, skip_shards=finished, folder=folder, run=run)
                extractor = ShardExtractor(job, output, meter, threads, copies=copies)
                for _ in run(extractor, ((shard, chunks.pop(shard, [])) for shard in output.missing(finished))):
                    pass

        with ExitStack() as temporary:
            return run_job(
                DatasetJob(
                    output,
                    job.policy,
                    execution,
                    build,
                    run_here,
                    extras=job.extras(),
                    check_launcher=partial(job.extractor.check_device, job.device) if execution.is_local else None,
                    check_worker=partial(check_worker, job, planned_fingerprint(output), gpus, listing.samples),
                    task=job.task,
                    libraries=job.libraries(),
                    meter=meter,
                )
            )

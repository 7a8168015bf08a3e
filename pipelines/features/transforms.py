"""Transforms of ``imagepivot features``, whose unit of work is a shard.

    list images -> chunks of references by shard [-> stage row groups] -> group by shard -> extract shard

Beam moves references only. One call reads, decodes, runs the model and writes a shard: features are never shuffled, a retry
rewrites one shard, and a killed run resumes with the missing shards. ``RunInference`` decodes and runs the model alternately in one
thread, fails whole batches, and would shuffle its results to the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import apache_beam as beam

from pipelines.features.ref_chunks import Kept, chunk_refs, listed_refs
from pipelines.features.shard_worker import ShardExtractor
from pipelines.features.stage_images import copy_images, row_group_batches, select_refs
from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.staged_images import StagingArea
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Accelerator
from pipelines.running.meter import Meter
from pipelines.running.preflight import PreflightCheck
from pipelines.running.transforms import CreateAfterPreflight, WriteShardFn, check_root
from schemas.writing.output import OutputDataset


def _list_images(
    kept: Kept, job: FeaturesJob, to_chunks: Callable[[Iterable[ImageRef]], Iterator[Any]]
) -> Iterator[tuple[int, Any]]:
    return to_chunks(listed_refs(job, kept))


@dataclass(eq=False)
class ExtractFeatures(beam.PTransform):
    """Root of a pipeline, which writes shards of features and yields their indices.

    Attributes:
        check: preflight check of remote workers; None for local ones.
        accelerator: GPUs of remote workers, each of which is one process; None without GPUs.
        copies: staging area of images in row groups; None to read images from the source.

    Examples:
        >>> request = imagepivot.ExtractorRequest("resnet50-pool", weights="random:0")
        >>> job = imagepivot.FeaturesJob("photos", "build/pooled", request, device="cpu")
        >>> parameters = {"feature": request.spec().to_json(), "extractor_fingerprint": request.describe().fingerprint}
        >>> output = imagepivot.OutputDataset(imagepivot.Folder(job.output), "features", parameters, shards=2)
        >>> with beam.Pipeline() as pipeline:
        ...     _ = pipeline | imagepivot.ExtractFeatures(job, output) | imagepivot.CommitDataset(output, libraries=("torch",))
    """

    job: FeaturesJob
    output: OutputDataset
    finished: frozenset[int] = frozenset()
    meter: Meter = Meter()
    check: PreflightCheck | None = None
    accelerator: Accelerator | None = None
    copies: StagingArea | None = None
    kept: Kept = ()

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """List images, group references by shard, and write each shard in one call."""
        check_root(begin, self, "it lists the job's images itself; imagepivot.Extract takes a PCollection of (id, bytes)")
        gpus, hints = (self.accelerator.count, self.accelerator.hints()) if self.accelerator is not None else (0, {})
        # Only the launcher compares digests of versions; without them the graph is small.
        output = replace(self.output, version_digests=None)
        extract = beam.ParDo(WriteShardFn(ShardExtractor(self.job, output, self.meter, gpus=gpus, copies=self.copies)))
        # With an empty chunk per shard, shards without images are written, too.
        todo = [(shard, b"") for shard in self.output.missing(self.finished)]
        # Row groups cross the parts of a listing, and each is copied once: one worker lists them all.
        is_split = len(self.kept) > 1 and self.copies is None
        parts = [(part,) for part in self.kept] if is_split else [self.kept]
        start = begin | "Start" >> CreateAfterPreflight(parts, self.check, hints)
        if is_split:
            start |= "SpreadParts" >> beam.Reshuffle()
        images = self.job.open_images()
        options: dict[str, Any] = {"shards": output.shards, "skip_shards": self.finished}
        if self.copies is not None and isinstance(images, ImagesInParquet):
            to_batches = partial(row_group_batches, images, **options)
            portions = start | "ListPortions" >> beam.FlatMap(_list_images, self.job, to_batches)
            refs = [portions | "Refs" >> beam.MapTuple(lambda shard, batch: (shard, batch[1])), self._copy(portions, output)]
        else:
            refs = [start | "ListImages" >> beam.FlatMap(_list_images, self.job, partial(chunk_refs, **options))]
        return (
            (*refs, begin | "EveryShard" >> beam.Create(todo))
            | "RefsAndShards" >> beam.Flatten()
            | "GroupByShard" >> beam.GroupByKey()  # Also the fusion break before the model.
            | "ExtractShard" >> extract.with_resource_hints(**hints)
        )

    def _copy(self, portions: beam.PCollection, output: OutputDataset) -> beam.PCollection:
        """Copy images to the staging area by batch; an update first selects them by shard."""
        if not self.job.policy.update and not self.job.policy.retry_failed:
            wanted = portions | "AllImages" >> beam.Values()
        else:
            choose = beam.FlatMap(select_refs, self.job, output, None)
            wanted = portions | "GroupPortions" >> beam.GroupByKey() | "WantedImages" >> choose
        copy = beam.FlatMap(copy_images, self.job.open_images(), self.copies, output.shards, None)
        return wanted | "GroupByPortion" >> beam.GroupByKey() | "CopyPortion" >> copy

"""The transforms of ``imagepivot features``. The unit of work is a shard, not an image.

Beam moves references only. One call of one function reads, decodes, runs the model and writes a shard: features never pass
through a shuffle, a retry makes one shard again, and a run that was killed continues with the missing shards. ``RunInference`` is
not used: its dead letter holds whole batches, it decodes and runs the model by turns in one thread, and its results would be
shuffled to the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

from pipelines.features.ref_chunks import Kept, RefChunk, chunk_refs, listed_refs
from pipelines.features.shard_worker import COUNTERS, ShardExtractor
from pipelines.features.stage_images import CopyImages, RowGroupBatch, row_group_batches
from pipelines.inputs.images import ImageSource, StagingArea
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Accelerator
from pipelines.running.meter import Meter
from pipelines.running.preflight import FirstWorker
from pipelines.running.transforms import Begin
from schemas.writing.output import OutputDataset


class _ExtractShardFn(beam.DoFn):
    def __init__(self, extractor: ShardExtractor) -> None:
        self._extractor = extractor
        self._shared = Shared()
        self._counters = {name: Metrics.counter("ExtractFeatures", name) for name in COUNTERS}

    def setup(self) -> None:
        self._extractor.set_up(self._shared.acquire)

    def process(self, element: tuple[int, Iterable[RefChunk]]) -> Iterator[int]:
        shard, pieces = element
        for name, count in self._extractor.extract(shard, pieces).items():
            self._counters[name].inc(count)
        yield shard


def _list_images(
    _start: bytes, images: ImageSource, kept: Kept, shards: int, finished: frozenset[int], folder: str | None
) -> Iterator[tuple[int, RefChunk]]:
    return chunk_refs(listed_refs(images, kept), shards, skip_shards=finished, folder=folder)


def _list_portions(
    _start: bytes, images: ImageSource, kept: Kept, shards: int, finished: frozenset[int], folder: str | None
) -> Iterator[tuple[int, RowGroupBatch]]:
    return row_group_batches(images, listed_refs(images, kept), shards, skip_shards=finished, folder=folder)


def _refs_of_portion(shard: int, portion: RowGroupBatch) -> tuple[int, RefChunk]:
    return shard, portion[1]


@dataclass(eq=False)
class ExtractFeatures(beam.PTransform):
    """Writes shards of features, from the start of a pipeline; its output holds the numbers of the shards that it wrote.

    Attributes:
        job: images, extractor and how to run it.
        finished: numbers of the shards that an earlier run finished.
        meter: counts images.
        threads: torch's threads in each worker; 0 for torch's own number.
        check: what the first worker on another machine checks; None on this one.
        accelerator: the GPUs of workers on other machines, each a single process; None for workers without, or of other kinds.
        folder: where all workers see the same local disk, a folder on it for references to images.
        copies: where images are copied to that cost a whole group; None to read each of them where it is.
        kept: the listing that need not be made again.
    """

    job: FeaturesJob
    output: OutputDataset
    finished: frozenset[int] = frozenset()
    meter: Meter = Meter()
    threads: int = 0
    check: FirstWorker | None = None
    accelerator: Accelerator | None = None
    folder: str | None = None
    copies: StagingArea | None = None
    kept: Kept = ""

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """List the images on a worker, unless the listing was kept, group the references by shard, and write each in one call."""
        shards = self.output.shards
        gpus, hints = (self.accelerator.count, self.accelerator.hints()) if self.accelerator is not None else (0, {})
        # Only the launcher compares states: the graph, which holds the output, grows with the shards as little as it can.
        output = replace(self.output, states=None)
        extract = beam.ParDo(_ExtractShardFn(ShardExtractor(self.job, output, self.meter, self.threads, gpus, self.copies)))
        # An empty piece stands for the shard itself, so that shards without images are written, too.
        todo = [(shard, b"") for shard in self.output.missing(self.finished)]
        start = begin | "Start" >> Begin([b""], self.check, hints)
        listing = self.job.open_images(), self.kept, shards, self.finished, self.folder
        if self.copies is None:
            refs = [start | "ListImages" >> beam.FlatMap(_list_images, *listing)]
        else:
            portions = start | "ListPortions" >> beam.FlatMap(_list_portions, *listing)
            copy = CopyImages(self.job, output, self.copies, self.folder)
            refs = [portions | "Refs" >> beam.MapTuple(_refs_of_portion), portions | "CopyImages" >> copy]
        return (
            (*refs, begin | "EveryShard" >> beam.Create(todo))
            | "RefsAndShards" >> beam.Flatten()
            | "GroupByShard" >> beam.GroupByKey()  # Also the fusion break before the model.
            | "ExtractShard" >> extract.with_resource_hints(**hints)
        )

"""The transforms of ``imagepivot features``. The unit of work is a shard, not an image.

Beam moves references only. One call of one function reads, decodes, runs the model and writes a shard: features never pass
through a shuffle, a retry makes one shard again, and a run that was killed continues with the missing shards. ``RunInference`` is
not used: its dead letter holds whole batches, it decodes and runs the model by turns in one thread, and its results would be
shuffled to the writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TypeAlias

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

import extractors
from pipelines.features.copying import CopyImages, Portion, portions_of
from pipelines.features.forward import Tally
from pipelines.features.job import FeaturesJob
from pipelines.features.references import Piece, pieces_of, unpacked
from pipelines.features.shards import make_shard
from pipelines.features.workers import (
    check_fingerprint,
    decoding_processes,
    decoding_threads,
    devices_of_worker,
    planned_fingerprint,
)
from pipelines.inputs.images import CopiedImages, Copies, ImageRef, ImageSource, SharedRefs, kept_refs
from pipelines.running.accelerators import Accelerator
from pipelines.running.first_worker import Begin, FirstWorker
from pipelines.running.progress import Meter
from schemas.limits import usable_cores
from schemas.output import Output

__all__ = ["ExtractFeatures"]


Kept: TypeAlias = str | SharedRefs
"""A listing: the path of a file that all workers see, or its place beside the output; empty if there is none."""


class _Loaded:
    """The extractors of a process, one on each of its devices; each of them makes one shard at a time, in whatever thread.

    Beam's ``Shared`` keeps weak references, which need a class that allows them.
    """

    def __init__(self, loaded: Sequence[extractors.Extractor], batch_size: int | None = None, threads: int = 1) -> None:
        from extractors.batch_sizes import find_batch_size

        self.fingerprints = [extractor.fingerprint for extractor in loaded]
        self.batch_sizes = {id(extractor): batch_size or find_batch_size(extractor) for extractor in loaded}
        self.processes = {id(extractor): decoding_processes(extractor, threads) for extractor in loaded}
        self._free: SimpleQueue[extractors.Extractor] = SimpleQueue()
        for extractor in loaded:
            self._free.put(extractor)

    @contextmanager
    def extractor(self) -> Iterator[extractors.Extractor]:
        """Wait for an extractor that is free."""
        extractor = self._free.get()
        try:
            yield extractor
        finally:
            self._free.put(extractor)


class _ExtractShardFn(beam.DoFn):
    def __init__(self, job: FeaturesJob, output: Output, meter: Meter, threads: int, gpus: int, copies: Copies | None) -> None:
        self._job = job
        self._copies = copies
        self._output = output
        self._meter = meter
        self._threads = threads
        self._gpus = gpus
        self._shared = Shared()
        self._counters = {name: Metrics.counter("ExtractFeatures", name) for name in (*_counts(Tally()), "bytes_written")}

    def setup(self) -> None:
        import torch

        if self._threads:
            torch.set_num_threads(self._threads)
        devices = devices_of_worker(self._job, os.environ.get("WORKER_ID", ""), self._gpus)
        load, size = self._job.extractor.load, self._job.batch_size
        cores = max(1, usable_cores() // self._gpus) if self._gpus > 1 else self._threads
        self._decoding_threads = decoding_threads(self._job, cores)
        self._loaded = self._shared.acquire(lambda: _Loaded([load(device) for device in devices], size, self._decoding_threads))
        for fingerprint in self._loaded.fingerprints:
            check_fingerprint(self._job, planned_fingerprint(self._output), fingerprint)

    def process(self, element: tuple[int, Iterable[Piece]]) -> Iterator[int]:
        shard, pieces = element
        refs, copied = unpacked(piece for piece in pieces if piece)
        copies = {copy.uri: copy for copy in copied}
        images = self._job.images if self._copies is None else CopiedImages(self._job.images, self._copies.folder, copies)
        with self._loaded.extractor() as extractor:
            tally = make_shard(
                self._output,
                shard,
                refs,
                images=images,
                extractor=extractor,
                batch_size=self._loaded.batch_sizes[id(extractor)],
                threads=self._decoding_threads,
                processes=self._loaded.processes[id(extractor)],
                update=self._job.update,
                retry_failed=self._job.retry_failed,
                on_batch=self._show,
            )
        size = self._output.folder.size(self._output.name(shard)) or 0
        for name, count in {**_counts(tally), "bytes_written": size}.items():
            self._counters[name].inc(count)
        self._meter.flush()
        yield shard

    def _show(self, batch: Tally) -> None:
        counts = _counts(batch)
        self._meter.add(
            images=batch.images + len(batch.failures),
            failed=len(batch.failures),
            forward_msec=counts["forward_msec"],
            wait_msec=counts["wait_msec"],
        )


def _counts(tally: Tally) -> dict[str, int]:
    return {
        "images_read": tally.images,
        "images_failed": len(tally.failures),
        "decode_msec": round(tally.decode_seconds * 1000),
        "forward_msec": round(tally.forward_seconds * 1000),
        "wait_msec": round(tally.wait_seconds * 1000),
    }


def _list_images(
    _start: bytes, images: ImageSource, kept: Kept, shards: int, finished: frozenset[int], folder: str | None
) -> Iterator[tuple[int, Piece]]:
    return pieces_of(_refs(images, kept), shards, left_out=finished, folder=folder)


def _list_portions(
    _start: bytes, images: ImageSource, kept: Kept, shards: int, finished: frozenset[int], folder: str | None
) -> Iterator[tuple[int, Portion]]:
    return portions_of(images, _refs(images, kept), shards, left_out=finished, folder=folder)


def _refs_of_portion(shard: int, portion: Portion) -> tuple[int, Piece]:
    return shard, portion[1]


def _refs(images: ImageSource, kept: Kept) -> Iterator[ImageRef]:
    if isinstance(kept, SharedRefs):
        return kept.refs(images)
    return kept_refs(kept) if kept else images.refs()


@dataclass(eq=False)
class ExtractFeatures(beam.PTransform):
    """Writes shards of features, from the start of a pipeline; its output holds the numbers of the shards that it wrote.

    Attributes:
        job: images, extractor and how to run it.
        output: the dataset.
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
    output: Output
    finished: frozenset[int] = frozenset()
    meter: Meter = Meter()
    threads: int = 0
    check: FirstWorker | None = None
    accelerator: Accelerator | None = None
    folder: str | None = None
    copies: Copies | None = None
    kept: Kept = ""

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """List the images on a worker, unless the listing was kept, group the references by shard, and write each in one call."""
        shards = self.output.identity.shards
        gpus, hints = (self.accelerator.count, self.accelerator.hints()) if self.accelerator is not None else (0, {})
        # Only the launcher compares states: the graph, which holds the output, grows with the shards as little as it can.
        output = replace(self.output, states=None)
        extract = beam.ParDo(_ExtractShardFn(self.job, output, self.meter, self.threads, gpus, self.copies))
        # An empty piece stands for the shard itself, so that shards without images are written, too.
        todo = [(shard, b"") for shard in range(shards) if shard not in self.finished]
        start = begin | "Start" >> Begin([b""], self.check, hints)
        listing = self.job.images, self.kept, shards, self.finished, self.folder
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

"""``imagepivot features``: images in, features in shards out. The unit of work is a shard, not an image.

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
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

import extractors
from pipelines.datasets.region_names import NAMES_FILES, names_files, stored_names
from pipelines.features.copying import CopyImages, Portion, place_of_copies, portions_of
from pipelines.features.forward import Tally
from pipelines.features.job import FeaturesJob
from pipelines.features.listing import list_images
from pipelines.features.references import Piece, folder_of_references, pieces_of, unpacked
from pipelines.features.shards import make_shard
from pipelines.features.workers import count_gpus, decoding_threads, devices_of_worker
from pipelines.inputs.images import CopiedImages, Copies, ImageRef, ImageSource, Listing, SharedRefs, kept_refs
from pipelines.running.accelerators import Accelerator
from pipelines.running.first_worker import Begin, FirstWorker
from pipelines.running.jobs import CommitDataset, run_job
from pipelines.running.progress import Meter
from pipelines.running.runner import Execution, run_pipeline
from schemas.errors import InputError, UsageError
from schemas.fingerprints import Identity
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.parameters import FeaturesParameters
from schemas.storage import Folder
from schemas.tasks import TaskSummary, complete_task

__all__ = ["ExtractFeatures", "extract_features", "extract_task", "list_images", "plan_features"]


Kept: TypeAlias = str | SharedRefs
"""A listing: the path of a file that all workers see, or its place beside the output; empty if there is none."""


class _Loaded:
    """The extractors of a process, one on each of its devices; each of them makes one shard at a time, in whatever thread.

    Beam's ``Shared`` keeps weak references, which need a class that allows them.
    """

    def __init__(self, loaded: Sequence[extractors.Extractor]) -> None:
        self.fingerprints = [extractor.fingerprint for extractor in loaded]
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
        self._loaded = self._shared.acquire(lambda: _Loaded([self._job.extractor.load(device) for device in devices]))
        for fingerprint in self._loaded.fingerprints:
            _check_fingerprint(self._job, _fingerprint_of(self._output), fingerprint)

    def process(self, element: tuple[int, Iterable[Piece]]) -> Iterator[int]:
        shard, pieces = element
        refs, copied = unpacked(piece for piece in pieces if piece)
        copies = {copy.uri: copy for copy in copied}
        images = self._job.images if self._copies is None else CopiedImages(self._job.images, self._copies.folder, copies)
        cores = (os.cpu_count() or 1) // self._gpus if self._gpus > 1 else self._threads
        with self._loaded.extractor() as extractor:
            tally = make_shard(
                self._output,
                shard,
                refs,
                images=images,
                extractor=extractor,
                batch_size=self._job.batch_size or extractor.description.batch_size,
                threads=decoding_threads(self._job, cores),
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


def _fingerprint_of(output: Output) -> str | None:
    return FeaturesParameters.from_json(output.identity.parameters).extractor_fingerprint


def _check_fingerprint(job: FeaturesJob, planned: str | None, fingerprint: str) -> None:
    if fingerprint != planned:
        raise InputError(
            f"a worker loads other weights from {job.extractor.weights!r}, or has other files or versions, than the machine that "
            "planned the run: give all of them the same"
        )


def _check_worker(job: FeaturesJob, planned: str | None, gpus: int) -> None:
    """Check, without building the network, that this process has the devices, the precision and the weights of a job."""
    for device in devices_of_worker(job, "", gpus):
        replace(job, device=device).check_device()
    _check_fingerprint(job, planned, job.extractor.describe().fingerprint)


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


def plan_features(job: FeaturesJob, listing: Listing) -> Output:
    """Return where a job writes, and the identity of what it makes.

    The identity of features is that of the feature space (extractor, weights, transform, precision) and the number of shards. The
    images are not part of it: a dataset grows, and models that were trained on it meet features of other images. The footer of a
    shard says which images are in it, by the digest of their list. Names of classes and attributes are not part of the identity
    either; those of an earlier run stay unless this job gives others.
    """
    description = job.extractor.describe()
    identity = Identity(
        kind=description.kind,
        parameters=FeaturesParameters(
            feature=description.spec,
            extractor=description.parameters,
            extractor_fingerprint=description.fingerprint,
        ).to_json(),
        shards=len(listing.shards),
    )
    folder = Folder(job.output)
    names = names_files(job.extractor.regions, description)
    if description.kind == "regions" and not job.overwrite:
        names = {**stored_names(folder, description), **names}
    return Output(
        folder=folder,
        identity=identity,
        listings=listing.shards,
        # Where versions cost a request each, an update asks for them; to go on with a run, the addresses are enough.
        states=listing.states if job.images.tells_versions else None,
        files=names,
        other_files=NAMES_FILES,
    )


def extract_features(
    job: FeaturesJob,
    execution: Execution = Execution(),
    meter: Meter = Meter(),
    *,
    listing: Listing | None = None,
) -> Manifest:
    """Write a dataset of kind ``features``, or ``regions`` if the extractor makes those.

    Args:
        job: what to make.
        execution: where and how to run. Without a number of workers, one per GPU, or one whose model uses all cores.
        meter: counts images, to show progress.
        listing: the result of `list_images`, if the caller has it: listing a large source takes long.

    Returns:
        The manifest of the committed dataset.

    Raises:
        ImagepivotError: the images, weights or device are missing, or the folder cannot be written.
    """
    if job.task is not None:
        raise UsageError(f"the job is task {job.task} of an array job: extract_task makes its shards, commit_tasks the dataset")
    job.check_execution(execution)
    execution.check_locations(job.locations())
    if not execution.runs_here:
        job = replace(job, extractor=job.extractor.located())
    gpus = 0
    if execution.accelerator is not None:  # Without a GPU there, no worker may fall back to its CPU.
        job, gpus = replace(job, device="cuda"), execution.accelerator.count
    listing = listing or list_images(job, keep=not execution.is_local and not execution.template)
    output, execution, extraction = _prepare(job, execution, meter, listing)

    def build(pipeline: beam.Pipeline, finished: frozenset[int], check: FirstWorker | None) -> None:
        commit = CommitDataset(output, libraries=job.libraries())
        extract = replace(extraction, finished=finished, check=check, folder=folder, copies=copies)
        if listing.kept is not None and not execution.is_local and not execution.template:  # What a template lists is its own.
            extract = replace(extract, kept=listing.kept.share(output.folder))
        _ = pipeline | "ExtractFeatures" >> extract | "CommitDataset" >> commit

    with folder_of_references(execution.is_local) as folder, place_of_copies(job, execution, output.folder) as copies:
        return run_job(
            output,
            build,
            execution=execution,
            extras=job.extras(),
            check=partial(_check_worker, job, _fingerprint_of(output), gpus),
            overwrite=job.overwrite,
            verify=job.verify,
            update=job.update,
            retry_failed=job.retry_failed,
            meter=meter,
        )


def extract_task(
    job: FeaturesJob,
    execution: Execution = Execution(),
    meter: Meter = Meter(),
    *,
    listing: Listing | None = None,
) -> TaskSummary:
    """Write the shards of one task of an array job; `schemas.tasks.commit_tasks` makes the dataset of all of them.

    Args:
        job: what to make, with its task.
        execution: how to run, on this machine. Without a number of workers as in `extract_features`.
        meter: counts images, to show progress.
        listing: the result of `list_images`, if the caller has it.

    Raises:
        UsageError: the job has no task, or the execution names another runner: the tasks take its place.
        ImagepivotError: the images, weights or device are missing, or the folder cannot be written.
    """
    if job.task is None:
        raise UsageError("the job has no task, e.g. Task(0, 64): extract_features makes the whole dataset")
    job.check_execution(execution)
    listing = listing or list_images(job)
    output, execution, extraction = _prepare(job, execution, meter, listing)

    def run(finished: frozenset[int]) -> None:
        with folder_of_references(execution.is_local) as folder, place_of_copies(job, execution, output.folder) as copies:
            extract = replace(extraction, finished=finished, folder=folder, copies=copies)
            run_pipeline(lambda pipeline: pipeline | "ExtractFeatures" >> extract, execution)

    return complete_task(
        output,
        job.task,
        run,
        libraries=job.libraries(),
        verify=job.verify,
        update=job.update,
        retry_failed=job.retry_failed,
    )


def _prepare(
    job: FeaturesJob, execution: Execution, meter: Meter, listing: Listing
) -> tuple[Output, Execution, ExtractFeatures]:
    """Return what a job writes, how it runs, and the transform for all of its shards."""
    output = plan_features(job, listing)
    if execution.is_local:
        job.check_device()  # Before anything in the folder is replaced.
    if execution.is_local and not execution.workers:
        execution = replace(execution, workers=max(1, count_gpus(job)))
    workers = execution.local_workers if execution.is_local else 1
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else 0
    kept = listing.kept.path if listing.kept is not None and execution.is_local else ""
    extraction = ExtractFeatures(job, output, meter=meter, threads=threads, accelerator=execution.accelerator, kept=kept)
    return output, execution, extraction

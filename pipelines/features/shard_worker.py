"""Extract shards in one worker process: its devices, threads and loaded extractors, and the check that these are as planned."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

from extractors import Extractor
from pipelines.features.decoding_processes import DecodingProcesses
from pipelines.features.feature_shards import write_feature_shard
from pipelines.features.inference import LoadedExtractor, Tally
from pipelines.features.ref_chunks import RefChunk, from_chunks
from pipelines.inputs.images import StagedImages, StagingArea
from pipelines.jobs import FeaturesJob
from pipelines.running.meter import Meter
from schemas.errors import InputError
from schemas.parameters import FeaturesParameters
from schemas.process.resources import CORES_TO_A_DECODER, usable_cores
from schemas.writing.output import OutputDataset

PROCESSES_FROM = 12
"""Cores of a worker with a GPU from which processes decode. Threads, by the time that they hold Python's lock, do the work of four
to six cores at most (``docs/internals/performance.md``); with a dozen cores half of them would be idle, and not before is that
worth the memory that the processes take."""


def count_gpus(job: FeaturesJob) -> int:
    """Return the number of GPUs of this machine that a job may use: all, unless it names a device."""
    import torch

    return torch.cuda.device_count() if job.device in ("auto", "cuda") and torch.cuda.is_available() else 0


def devices_of_worker(job: FeaturesJob, worker_id: str, gpus: int = 0) -> tuple[str, ...]:
    """Return the devices of a worker process: of several GPUs the numbered workers take theirs in turn.

    Args:
        job: the job.
        worker_id: the name that Beam gives a local worker, e.g. ``worker_3``.
        gpus: number of GPUs of the machine if this process is the only one on it; 0 if there may be others.

    Returns:
        All of them for the only process; ``cuda:N``, or the job's own device if there are not several, for another.
    """
    if gpus:
        return tuple(f"cuda:{index}" for index in range(gpus))
    number = re.search(r"(\d+)$", worker_id)
    several = count_gpus(job)
    return (f"cuda:{int(number[1]) % several}" if several > 1 and number else job.device,)


def decoding_threads(job: FeaturesJob, cores: int = 0) -> int:
    """Return the number of threads that decode in a worker; others read, as many as the source of the images says.

    On a CPU the model needs most of the cores. They are all that this process may use where 0 are named.
    """
    import torch

    cores = cores or usable_cores()
    return cores if torch.cuda.is_available() and job.device != "cpu" else max(1, cores // CORES_TO_A_DECODER)


def decoding_processes(extractor: Extractor, threads: int) -> DecodingProcesses | None:
    """Return processes that decode for an extractor; None where threads of the worker do. See `decoding_threads`."""
    if not extractor.on_gpu or threads < PROCESSES_FROM or extractor.preprocessor is None:
        return None
    return DecodingProcesses(extractor.preprocessor, threads)


def planned_fingerprint(output: OutputDataset) -> str | None:
    """Return the fingerprint of the extractor that a dataset was planned with."""
    return FeaturesParameters.from_json(output.parameters).extractor_fingerprint


def check_worker(job: FeaturesJob, planned: str | None, gpus: int) -> None:
    """Check, without building the network, that this process has the devices, the precision and the weights of a job.

    ``planned`` is from `planned_fingerprint`, and not the dataset itself, since this travels in the graph.

    Raises:
        ImagepivotError: it has not.
    """
    for device in devices_of_worker(job, "", gpus):
        replace(job, device=device).check_device()
    check_fingerprint(job, planned, job.extractor.describe().fingerprint)


def check_fingerprint(job: FeaturesJob, planned: str | None, fingerprint: str) -> None:
    """Check that an extractor is the one that was planned.

    Raises:
        InputError: it is not.
    """
    if fingerprint != planned:
        raise InputError(
            f"a worker loads other weights from {job.extractor.weights!r}, or has other files or versions, than the machine that "
            "planned the run: give all of them the same"
        )


class ExtractorPool:
    """The extractors of a process, one on each of its devices; each extracts one shard at a time, in any thread.

    Beam's ``Shared`` keeps weak references, which need a class that allows them. Threads are those of `decoding_threads`.
    """

    def __init__(self, networks: Sequence[Extractor], batch_size: int | None = None, threads: int = 1) -> None:
        from extractors.batch_sizes import find_batch_size

        self.fingerprints = [extractor.fingerprint for extractor in networks]
        self._free: SimpleQueue[LoadedExtractor] = SimpleQueue()
        for extractor in networks:
            processes = decoding_processes(extractor, threads)
            self._free.put(LoadedExtractor(extractor, batch_size or find_batch_size(extractor), threads, processes))

    @contextmanager
    def extractor(self) -> Iterator[LoadedExtractor]:
        """Wait for an extractor that is free."""
        loaded = self._free.get()
        try:
            yield loaded
        finally:
            self._free.put(loaded)


class ShardExtractor:
    """Extracts shards in one worker process. Can be pickled until it is set up.

    Args:
        job: images, extractor and how to run it.
        output: the dataset.
        meter: counts images.
        threads: torch's threads; 0 for torch's own number.
        gpus: as `devices_of_worker` takes it.
        copies: where images have been copied to; None where each is read where it is.
    """

    def __init__(
        self,
        job: FeaturesJob,
        output: OutputDataset,
        meter: Meter,
        threads: int = 0,
        gpus: int = 0,
        copies: StagingArea | None = None,
    ) -> None:
        self._job = job
        self._output = output
        self._meter = meter
        self._threads = threads
        self._gpus = gpus
        self._copies = copies

    def set_up(self, share: Callable[[Callable[[], ExtractorPool]], ExtractorPool] = lambda load: load()) -> None:
        """Load the extractors, or take those that another `ShardExtractor` of this process has loaded, as ``share`` says.

        Raises:
            ImagepivotError: the weights or the device are missing, or are not those that were planned.
        """
        import torch

        if self._threads:
            torch.set_num_threads(self._threads)
        devices = devices_of_worker(self._job, os.environ.get("WORKER_ID", ""), self._gpus)
        load, size = self._job.extractor.load, self._job.batch_size
        cores = max(1, usable_cores() // self._gpus) if self._gpus > 1 else self._threads
        threads = decoding_threads(self._job, cores)
        self._pool = share(lambda: ExtractorPool([load(device) for device in devices], size, threads))
        for fingerprint in self._pool.fingerprints:
            check_fingerprint(self._job, planned_fingerprint(self._output), fingerprint)

    def extract(self, shard: int, pieces: Iterable[RefChunk]) -> dict[str, int]:
        """Write one shard, and return the counts of `COUNTERS`.

        Pieces hold references to its images, and the places of their copies; those that are empty count for nothing.

        Raises:
            InputError: see `pipelines.features.feature_shards.write_feature_shard`.
        """
        refs, copied = from_chunks(piece for piece in pieces if piece)
        images = self._job.open_images()
        if self._copies is not None:
            images = StagedImages(images, self._copies.folder, {copy.uri: copy for copy in copied})
        with self._pool.extractor() as loaded:
            tally = write_feature_shard(self._output, shard, refs, self._job.policy, images, loaded, on_batch=self._show)
        size = self._output.folder.size(self._output.name(shard)) or 0
        self._meter.flush()
        return {**_counts(tally), "bytes_written": size}

    def _show(self, batch: Tally) -> None:
        counts = _counts(batch)
        self._meter.add(
            images=batch.images + len(batch.failures),
            failed=len(batch.failures),
            **{name: counts[name] for name in ("forward_msec", "wait_msec")},
        )


def _counts(tally: Tally) -> dict[str, int]:
    return {
        "images_read": tally.images,
        "images_failed": len(tally.failures),
        "decode_msec": round(tally.decode_seconds * 1000),
        "forward_msec": round(tally.forward_seconds * 1000),
        "wait_msec": round(tally.wait_seconds * 1000),
    }


COUNTERS = (*_counts(Tally()), "bytes_written")
"""Names of the counts that `ShardExtractor.extract` returns."""

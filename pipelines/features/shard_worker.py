"""State of a worker process: devices, loaded extractors, decoders and progress.

A `ShardExtractor` is pickled to the workers; there `set_up` loads or shares the extractors, and `write` writes each shard.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from extractors import Extractor
from extractors.sample_outputs import sample_outputs
from pipelines.features.decoding_processes import DecodingProcesses
from pipelines.features.feature_shards import write_feature_shard
from pipelines.features.inference import FirstImages, LoadedExtractor, Tally, read_image
from pipelines.features.ref_chunks import RefChunk, from_chunks
from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.staged_images import StagedImages, StagingArea
from pipelines.jobs import FeaturesJob
from pipelines.running.meter import Meter, failure_counts
from pipelines.running.process_pool import WORKER_INDEX, ShardWorker, Share
from schemas.errors import InputError
from schemas.escapes import counted, redact_address
from schemas.parameters import FeaturesParameters
from schemas.process.resources import CORES_TO_A_DECODER, usable_cores
from schemas.writing.output import OutputDataset

MIN_CORES_FOR_PROCESSES = 12
"""Minimum cores per GPU worker for decoding processes, see ``docs/internals/optimizations.md``."""


def count_gpus(job: FeaturesJob) -> int:
    """Return the number of local GPUs for a job: all, unless it names a device."""
    import torch

    return torch.cuda.device_count() if job.device in ("auto", "cuda") and torch.cuda.is_available() else 0


def devices_of_worker(job: FeaturesJob, worker_index: str, gpus: int = 0) -> tuple[str, ...]:
    """Return the devices of a worker process.

    With ``gpus``, it is the only process of its machine, and has that many GPUs. Else (0) it has ``cuda:N``,
    round-robin by the index of the worker, or without several GPUs the job's device.
    """
    if gpus:
        return tuple(f"cuda:{index}" for index in range(gpus))
    num_gpus = count_gpus(job)
    return (f"cuda:{int(worker_index) % num_gpus}" if num_gpus > 1 and worker_index else job.device,)


def decoding_threads(job: FeaturesJob, cores: int = 0) -> int:
    """Return the number of decoding threads of a worker with some cores (0: all)."""
    import torch

    cores = cores or usable_cores()
    return cores if torch.cuda.is_available() and job.device != "cpu" else max(1, cores // CORES_TO_A_DECODER)


def decoding_processes(extractor: Extractor, threads: int) -> DecodingProcesses | None:
    """Create decoding processes for an extractor; None to decode in threads."""
    if not extractor.on_gpu or threads < MIN_CORES_FOR_PROCESSES or extractor.preprocessor is None:
        return None
    return DecodingProcesses(extractor.preprocessor, threads)


def planned_fingerprint(output: OutputDataset) -> str | None:
    """Return the extractor fingerprint of a planned dataset."""
    return FeaturesParameters.from_json(output.parameters).extractor_fingerprint


def check_worker(job: FeaturesJob, planned: str | None, gpus: int, samples: Sequence[ImageRef] = ()) -> None:
    """Check devices, precision, weights and access to images, without the network.

    ``planned`` is the result of `planned_fingerprint`: unlike the dataset it enlarges no graph. A missing
    image does not fail the check, unless all ``samples`` fail with one message.

    Raises:
        ImagepivotError: a device is missing, precision or weights differ from the plan, or no image can be read.
    """
    for device in devices_of_worker(job, "", gpus):
        job.extractor.check_device(device)
    check_fingerprint(job, planned, job.extractor.describe().fingerprint)
    images, messages = job.open_images(), set[str]()
    for ref in samples:
        image = read_image(ref, images.read)
        if image.failure is None:
            return
        messages.add(image.failure["message"])
    if len(messages) == 1:
        raise InputError(
            f"it cannot read the images of {images.location!r}: {counted(len(samples), 'image')} from all parts of the list failed "
            f"with one message, the last is {ref.image_id!r} at {redact_address(ref.uri)!r}: {image.error}. Check that the "
            "identity of the workers (service account, credentials) may read them, and that bucket and addresses exist"
        )


def check_fingerprint(job: FeaturesJob, planned: str | None, fingerprint: str) -> None:
    """Compare the fingerprint of an extractor with the planned one.

    Raises:
        InputError: they differ.
    """
    if fingerprint != planned:
        raise InputError(
            f"a worker's extractor differs from the launcher's (weights {job.extractor.weights!r}, files or "
            "library versions): use the same on all machines"
        )


class ExtractorPool:
    """Extractors of a process, one per device, for threads that write a shard each.

    Beam's ``Shared`` needs a class with weak references. ``threads`` are decoding threads per extractor.
    """

    def __init__(self, extractors: Sequence[Extractor], batch_size: int | None = None, threads: int = 1) -> None:
        from extractors.batch_sizes import find_batch_size

        self.fingerprints = [extractor.fingerprint for extractor in extractors]
        self._free: SimpleQueue[LoadedExtractor] = SimpleQueue()
        first_images = FirstImages()
        for extractor in extractors:
            processes = decoding_processes(extractor, threads)
            size = batch_size or find_batch_size(extractor)
            outputs = sample_outputs(extractor)
            self._free.put(LoadedExtractor(extractor, size, threads, processes, outputs, first_images))

    @contextmanager
    def extractor(self) -> Iterator[LoadedExtractor]:
        """Borrow an idle extractor; blocks until there is one."""
        loaded = self._free.get()
        try:
            yield loaded
        finally:
            self._free.put(loaded)


def load_pool(job: FeaturesJob, cores: int = 0, gpus: int = 0) -> ExtractorPool:
    """Load the extractors of a worker process, for some cores (0: all) or ``gpus``."""
    devices = devices_of_worker(job, os.environ.get(WORKER_INDEX, ""), gpus)
    cores = max(1, usable_cores() // gpus) if gpus > 1 else cores
    return ExtractorPool([job.extractor.load(device) for device in devices], job.batch_size, decoding_threads(job, cores))


@dataclass(eq=False)
class ShardExtractor(ShardWorker):
    """Extractor of shards in a worker process; picklable before `set_up`.

    Attributes:
        threads: number of torch threads, and of cores; 0 for torch's default and all cores.
        gpus: argument of `devices_of_worker`.
        copies: staging area of the images; None to read them from the source.
    """

    job: FeaturesJob
    output: OutputDataset
    meter: Meter
    threads: int = 0
    gpus: int = 0
    copies: StagingArea | None = None

    def set_up(self, share: Share) -> None:
        """Load the extractors once per process.

        Raises:
            ImagepivotError: weights or device are missing, or differ from the plan.
        """
        import torch

        if self.threads:
            torch.set_num_threads(self.threads)
        self._pool: ExtractorPool = share(lambda: load_pool(self.job, self.threads, self.gpus))
        for fingerprint in self._pool.fingerprints:
            check_fingerprint(self.job, planned_fingerprint(self.output), fingerprint)

    def write(self, shard: tuple[int, Iterable[RefChunk]]) -> int:
        """Write a shard from its chunks, and count images, failures, times and bytes.

        Chunks hold references or staged copies, or are empty.

        Raises:
            InputError: see `pipelines.features.feature_shards.write_feature_shard`.
        """
        index, chunks = shard
        self.meter.start_shard(index)
        refs, copied = from_chunks(chunk for chunk in chunks if chunk)
        images = self.job.open_images()
        if self.copies is not None and isinstance(images, ImagesInParquet):
            staged = {copy.uri: copy for copy in copied}
            images = StagedImages(images.folder, images.pattern, images.ids, staging=self.copies.folder, staged=staged)
        with self._pool.extractor() as loaded:
            tally = write_feature_shard(self.output, index, refs, self.job.policy, images, loaded, on_batch=self._show)
        if self.job.policy.update:
            self.meter.add(new=tally.new, changed=tally.changed, removed=tally.removed, rewritten=tally.rewritten)
        stored = self.output.folder.stat(self.output.name(index))
        self.meter.finish_shard(bytes_written=0 if stored is None else stored.size)
        return index

    def _show(self, batch: Tally) -> None:
        self.meter.add(
            images=batch.images + len(batch.failures),
            decode_msec=round(batch.decode_seconds * 1000),
            forward_msec=round(batch.forward_seconds * 1000),
            wait_msec=round(batch.wait_seconds * 1000),
            **failure_counts(Counter(failure["reason"] for failure in batch.failures)),
        )

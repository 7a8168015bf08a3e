"""Inference on the images of a shard, without Beam.

    read (I/O threads) -> decode (threads or processes) -> collate, forward (0 to 2 feeder threads) -> table

Reading and decoding run ahead of the model by a few batches. A feeder thread keeps a GPU busy: while a batch runs, the next is
collated and the previous one is written. On a CPU two feeder threads overlap batches if forward passes can share the cores.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

import extractors
from pipelines.features.decoding_processes import DecodingProcesses
from pipelines.inputs.images.base import ImageRef
from schemas.errors import DatasetError, InputError
from schemas.failures import failure_row
from schemas.kinds import count_nonfinite, table_of_arrays
from schemas.sample_outputs import SampleOutputs
from schemas.storage.storage_errors import StoreError

FIRST_IMAGES = 200
"""Number of a process's first images that stop it if all of them fail alike."""
_CAUSES = {
    "read": "this process has no access, no network, or wrong addresses",
    "decode": "the files are no images, or a decoder is missing",
    "extract": "the values of the model exceed its precision or the stored type",
}
"""Likely cause of equal failures by stage."""


@dataclass
class Tally:
    """Counts and times of a shard or batch.

    Attributes:
        images: number of images with rows.
        failures: rows of kind ``failures``.
        error: last error of reading or decoding; unlike a failure, it may name the location of the images.
        decode_seconds: time of reading and decoding, summed over threads.
        forward_seconds: time in the model; with feeder threads, time of waiting for its results.
        wait_seconds: time of waiting for decoded images.
        digests: SHA-256 of the bytes by image id; empty for unreadable images.
        new: number of images that an existing shard lacked.
        changed: number of its images that were extracted again.
        removed: number of its images that were dropped.
        rewritten: 1 if the shard existed and was written again.
    """

    images: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    error: str = ""
    decode_seconds: float = 0.0
    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)
    new: int = 0
    changed: int = 0
    removed: int = 0
    rewritten: int = 0

    def add(self, other: Tally) -> None:
        """Add the tally of a batch."""
        self.images += other.images
        self.failures += other.failures
        self.decode_seconds += other.decode_seconds
        self.forward_seconds += other.forward_seconds
        self.wait_seconds += other.wait_seconds
        self.digests.update(other.digests)


class FirstImages:
    """Check of the first images of a process, for all its shards and threads.

    A refused bucket or a missing decoder fails every image. The run should end, not write a dataset of failures.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._has_passed = False
        self._kinds: set[tuple[str, str]] = set()
        self._failed = 0

    def add(self, batch: Tally, known: Mapping[str, Mapping[str, str]]) -> None:
        """Count the images of a batch.

        ``known`` holds the shard's earlier failures by image id, which do not count again.

        Raises:
            InputError: all images have failed with one message, at least `FIRST_IMAGES`.
        """
        if self._has_passed:
            return
        failures = [row for row in batch.failures if row != known.get(row["key"])]
        with self._lock:
            self._kinds.update((row["reason"], row["message"]) for row in failures)
            self._failed += len(failures)
            self._has_passed |= batch.images > 0 or len(self._kinds) > 1
            if self._has_passed or not failures or self._failed < FIRST_IMAGES:
                return
        last = failures[-1]
        raise InputError(
            f"the first {self._failed} images of a process all failed as {last['reason']!r} with one message, the last of them "
            f"{last['key']!r} at {last['uri']!r}: {batch.error or last['message']}. Probably {_CAUSES[last['stage']]}: open this "
            "image on the machine of that process, and run the same command again; finished shards are kept. --skip leaves "
            "images out"
        )


@dataclass(frozen=True)
class LoadedExtractor:
    """An extractor on its device, with its batch size and decoders.

    Attributes:
        batch_size: images per batch; the last batch of a shard may be smaller.
        threads: number of decoding threads without ``processes``.
        processes: decoding processes, with a thread for each; None to decode in threads.
        sample_outputs: the extractor's sample outputs.
        first_images: check of the process's first images, which its extractors share.
    """

    extractor: extractors.Extractor
    batch_size: int
    threads: int = 1
    processes: DecodingProcesses | None = None
    sample_outputs: SampleOutputs = ()
    first_images: FirstImages = field(default_factory=FirstImages)


@dataclass
class _Image:
    """An image with its bytes, then pixels; None after a failure."""

    ref: ImageRef
    content: Any = None
    failure: dict[str, str] | None = None
    error: str = ""
    sha256: str = ""
    seconds: float = 0.0


@dataclass
class _Batch:
    """A batch of decoded images; ``columns`` waits for the model."""

    images: list[_Image] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    columns: Callable[[], Mapping[str, np.ndarray]] = dict

    def add(self, image: _Image) -> None:
        """Add an image, or its failure."""
        self.tally.decode_seconds += image.seconds
        self.tally.digests[image.ref.image_id] = image.sha256
        if image.failure is None:
            self.images.append(image)
        else:
            self.tally.failures.append(image.failure)
            self.tally.error = image.error

    def start(self, extractor: extractors.Extractor, model: ThreadPoolExecutor | None) -> None:
        """Start the model in a feeder thread; without one, `columns` runs it."""
        if not self.images:
            return
        pixels = [image.content for image in self.images]
        for image in self.images:
            image.content = None
        if model is None:
            self.columns = lambda: extractor.extract_async(extractor.collate(pixels))()
        else:
            started = model.submit(lambda: extractor.extract_async(extractor.collate(pixels)))
            self.columns = lambda: started.result()()


def extract_rows(
    refs: Sequence[ImageRef],
    loaded: LoadedExtractor,
    *,
    read: Callable[[ImageRef], bytes],
    schema: pa.Schema,
    tally: Tally,
    reads: int = 1,
    on_batch: Callable[[Tally], None] = lambda batch: None,
) -> Iterator[pa.Table]:
    """Extract features of images in order.

    An unreadable or undecodable image becomes a failure without a row.

    Args:
        refs: images of the shard, sorted by image id.
        loaded: the extractor.
        read: returns the bytes of an image, or raises OSError.
        schema: schema of the rows.
        tally: updated while the result is consumed.
        reads: minimum number of reading threads; there is at least one per decoding thread.
        on_batch: called with the tally of each batch.

    Yields:
        A table of rows per batch.
    """
    from extractors.computing.cpu_parallel import single_threaded_pool  # Loads torch, which the launcher does not need.

    extractor, batch_size, processes = loaded.extractor, loaded.batch_size, loaded.processes
    threads = processes.num_processes if processes is not None else loaded.threads
    pixels = processes.pixels if processes is not None else lambda data: extractor.preprocess(extractors.decode_image(data))
    todo = iter(refs)
    ahead: deque[Future[_Image]] = deque()
    reads = max(reads, threads)
    batch = _Batch()
    in_model: deque[_Batch] = deque()

    def finish() -> Iterator[pa.Table]:
        done = in_model.popleft()
        table = _table(done, extractor, schema) if done.images else None
        tally.add(done.tally)
        on_batch(done.tally)
        if table is not None:
            yield table

    with ExitStack() as pools:
        readers = pools.enter_context(ThreadPoolExecutor(reads, thread_name_prefix="read"))
        # A decoding thread uses one core, also for transforms in torch.
        decoders = pools.enter_context(single_threaded_pool(min(threads, max(1, len(refs))), "decode"))
        feeders = extractor.feeder_threads
        model = pools.enter_context(ThreadPoolExecutor(feeders, thread_name_prefix="model")) if feeders else None
        # After an early end, queued images are not decoded.
        for pool in (readers, decoders):
            pools.callback(pool.shutdown, wait=False, cancel_futures=True)
        while True:
            # Two batches ahead: one is ready when the model has finished the other.
            ahead.extend(
                decoders.submit(_decode, readers.submit(read_image, ref, read), pixels)
                for ref in islice(todo, 2 * batch_size + reads - len(ahead))
            )
            if not ahead:
                break
            started = time.perf_counter()
            image = ahead.popleft().result()
            batch.tally.wait_seconds += time.perf_counter() - started
            batch.add(image)
            if not batch.images:  # Reported immediately: the first failures may stop the run.
                tally.add(batch.tally)
                on_batch(batch.tally)
                batch = _Batch()
            elif len(batch.images) == batch_size:
                batch.start(extractor, model)
                in_model.append(batch)
                batch = _Batch()
                if model is None or len(in_model) > 1:
                    yield from finish()
        batch.start(extractor, model)
        in_model.append(batch)
        while in_model:
            yield from finish()


def merge_rows(old: Iterable[pa.RecordBatch], new: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Merge two sorted sources of rows with disjoint image ids.

    No table is empty. Memory holds one table of each source.
    """
    sides: list[Iterator[pa.Table]] = [(pa.Table.from_batches([batch]) for batch in old), iter(new)]
    heads: list[Any] = [next(side, None) for side in sides]
    while all(head is not None for head in heads):
        firsts = [head["image_id"][0].as_py() for head in heads]
        turn = firsts.index(min(firsts))
        head = heads[turn]
        end = bisect_left(head["image_id"].to_pylist(), firsts[1 - turn])
        yield head.slice(0, end)
        heads[turn] = head.slice(end) if end < head.num_rows else next(sides[turn], None)
    for head, side in zip(heads, sides, strict=True):
        if head is not None:
            yield head
            yield from side


def read_image(ref: ImageRef, read: Callable[[ImageRef], bytes]) -> _Image:
    """Read the bytes of an image, or the failure."""
    started, image = time.perf_counter(), _Image(ref)
    try:
        image.content = read(ref)
    except (OSError, DatasetError) as error:
        cause = error.__cause__ or error  # A storage error is caused by an OSError.
        # Without the file's name: datasets must not depend on the location of images.
        name = "OSError" if isinstance(cause, StoreError) else type(cause).__name__
        image.failure = failure_row(ref.image_id, "read", "unreadable", getattr(cause, "strerror", None) or name, ref.uri)
        image.error = str(error)
    image.seconds = time.perf_counter() - started
    return image


def _decode(reading: Future[_Image], pixels: Callable[[bytes], Any]) -> _Image:
    image = reading.result()
    started = time.perf_counter()
    if image.failure is None:
        image.sha256 = hashlib.sha256(image.content).hexdigest()
        try:
            image.content = pixels(image.content)
        except extractors.DecodeError as error:
            image.content = None
            image.failure = failure_row(image.ref.image_id, "decode", error.reason, str(error), image.ref.uri)
    image.seconds += time.perf_counter() - started
    return image


def _table(batch: _Batch, extractor: extractors.Extractor, schema: pa.Schema) -> pa.Table | None:
    """Wait for the columns of a batch, and build its rows; None if it has none."""
    tally, started = batch.tally, time.perf_counter()
    arrays = batch.columns()
    tally.forward_seconds += time.perf_counter() - started
    refs = [image.ref for image in batch.images]
    table = table_of_arrays([ref.image_id for ref in refs], arrays, schema)
    bad = count_nonfinite(table)
    tally.failures += [
        failure_row(ref.image_id, "extract", "not_finite", _not_finite_message(int(count), extractor), ref.uri)
        for ref, count in zip(refs, bad, strict=True)
        if count
    ]
    tally.images += len(refs) - int(np.count_nonzero(bad))
    table = table.filter(pa.array(bad == 0)) if bad.any() else table
    return table if table.num_rows else None


def _not_finite_message(count: int, extractor: extractors.Extractor) -> str:
    dtype, advice = extractor.spec.dtype, ""
    if extractor.parameters.get("precision") == "fp16":
        advice = ": the model computes in fp16, whose largest number is 65,504; --precision bf16 has the range of fp32"
    elif dtype == "float16":
        advice = ": its largest number is 65,504, float32 holds more"
    return f"{count:,} values of the feature are infinite or no numbers in {dtype}{advice}"

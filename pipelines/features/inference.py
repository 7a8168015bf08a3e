"""Decode the images of one shard and run the model over them: plain functions, without Beam.

Some threads read, as many as waiting for other machines takes, and others decode, as many as there are cores for it, or have it
done by processes (`pipelines.features.decoding_processes`). Both are ahead of the model, which takes batch after batch; memory
holds a few batches.

A GPU must not wait for the host. So a thread of its own gives it batch after batch: one is being computed and the next one is made
ready while rows of the one before become a table and are written. On a CPU two threads do, where passes over two batches can share
its cores; or else batches and rows take turns.
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
from typing import Any

import numpy as np
import pyarrow as pa

import extractors
from pipelines.features.decoding_processes import DecodingProcesses
from pipelines.inputs.images import ImageRef
from schemas.errors import DatasetError
from schemas.kinds import numpy_type
from schemas.storage.storage_errors import StoreError


@dataclass
class Tally:
    """Counts and times of the making of a shard.

    Attributes:
        images: images with features, which have rows.
        failures: rows of kind ``failures``.
        decode_seconds: time of reading and decoding in all threads, summed.
        forward_seconds: time in the model; where threads of their own give it batches, time that its results were waited for.
        wait_seconds: time that decoded images were waited for.
        digests: SHA-256 of the bytes of each image, by image id; empty for those that could not be read.
    """

    images: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    decode_seconds: float = 0.0
    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.images += other.images
        self.failures += other.failures
        self.decode_seconds += other.decode_seconds
        self.forward_seconds += other.forward_seconds
        self.wait_seconds += other.wait_seconds
        self.digests.update(other.digests)


@dataclass(frozen=True)
class LoadedExtractor:
    """An extractor on its device, and how images reach it.

    Attributes:
        batch_size: images that the model takes at once; the last batch of a shard may be smaller.
        threads: decoding threads; without ``processes``.
        processes: what decodes, in one thread for each of them; None for threads of this process alone.
    """

    extractor: extractors.Extractor
    batch_size: int
    threads: int = 1
    processes: DecodingProcesses | None = None


@dataclass
class _Image:
    """An image: its bytes, and in their place its pixels when it is decoded; None if it fails."""

    ref: ImageRef
    content: Any = None
    failure: dict[str, str] | None = None
    sha256: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Batch:
    """A batch in the model: its images, what returns their columns, and counts that are added up when they are there."""

    refs: Sequence[ImageRef]
    columns: Callable[[], Mapping[str, np.ndarray]]
    tally: Tally


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
    """Extract features of images, in their order; an image that cannot be read or decoded becomes a failure without a row.

    Args:
        refs: the images of the shard, sorted by image id.
        loaded: the extractor.
        read: returns the bytes of an image, or raises OSError.
        schema: schema of the rows.
        tally: is updated while the result is consumed.
        reads: images that are read at once, whatever the number of decoding threads; at least one for each of these.
        on_batch: is called after each batch with the tally of that batch.

    Yields:
        Rows, one table per batch.
    """
    from extractors.computing.cpu_parallel import single_threaded_pool  # Loads torch, which the launcher does without.

    extractor, batch_size, processes = loaded.extractor, loaded.batch_size, loaded.processes
    threads = processes.number if processes is not None else loaded.threads
    preprocess = extractor.preprocess_single_threaded if threads == 1 else extractor.preprocess
    pixels = processes.pixels if processes is not None else lambda data: preprocess(extractors.decode(data))
    rest = iter(refs)
    ahead: deque[Future[_Image]] = deque()
    reads = max(reads, threads)
    held: list[_Image] = []
    batch = Tally()
    in_model: deque[_Batch] = deque()

    def forward() -> None:
        nonlocal held, batch
        columns = _begin([image.content for image in held], extractor, model)
        in_model.append(_Batch([image.ref for image in held], columns, batch))
        held, batch = [], Tally()

    def finish() -> Iterator[pa.Table]:
        done = in_model.popleft()
        table = _table(done, extractor, schema) if done.refs else None
        tally.add(done.tally)
        on_batch(done.tally)
        if table is not None:
            yield table

    with ExitStack() as pools:
        readers = pools.enter_context(ThreadPoolExecutor(reads, thread_name_prefix="read"))
        # Each of them stands for a core, also where torch resizes.
        decoders = pools.enter_context(single_threaded_pool(min(threads, max(1, len(refs))), "decode"))
        feeding = extractor.feeder_threads
        model = pools.enter_context(ThreadPoolExecutor(feeding, thread_name_prefix="model")) if feeding else None
        # Where this ends early, nobody takes what is still to be decoded.
        for pool in (readers, decoders):
            pools.callback(pool.shutdown, wait=False, cancel_futures=True)
        while True:
            # Two batches ahead: one is ready when the model has finished the other.
            ahead.extend(
                decoders.submit(_decode, readers.submit(_read, ref, read), pixels)
                for ref in islice(rest, 2 * batch_size + reads - len(ahead))
            )
            if not ahead:
                break
            started = time.perf_counter()
            image = ahead.popleft().result()
            batch.wait_seconds += time.perf_counter() - started
            batch.decode_seconds += image.seconds
            batch.digests[image.ref.image_id] = image.sha256
            if image.failure is None:
                held.append(image)
            else:
                batch.failures.append(image.failure)
            if len(held) == batch_size:
                forward()
                if model is None or len(in_model) > 1:
                    yield from finish()
        forward()
        while in_model:
            yield from finish()


def merge_rows(old: Iterable[pa.RecordBatch], new: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Merge rows of two sources, each sorted by image id; no id is in both.

    Neither holds empty batches or tables, and memory holds one of each side.
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


def _read(ref: ImageRef, read: Callable[[ImageRef], bytes]) -> _Image:
    started, image = time.perf_counter(), _Image(ref)
    try:
        image.content = read(ref)
    except (OSError, DatasetError) as error:
        # A storage error is caused by one of the operating system, which says what happened.
        cause = error.__cause__ or error
        # Without the file's name: messages must not depend on where the images lie.
        name = "OSError" if isinstance(cause, StoreError) else type(cause).__name__  # Datasets keep it.
        image.failure = _failure(ref, "read", "unreadable", getattr(cause, "strerror", None) or name)
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
            image.content, image.failure = None, _failure(image.ref, "decode", error.reason, str(error))
    image.seconds += time.perf_counter() - started
    return image


def _failure(ref: ImageRef, stage: str, reason: str, message: str) -> dict[str, str]:
    return {"key": ref.image_id, "uri": ref.uri, "stage": stage, "reason": reason, "message": message}


def _begin(
    pixels: Sequence[Any], extractor: extractors.Extractor, model: ThreadPoolExecutor | None
) -> Callable[[], Mapping[str, np.ndarray]]:
    """Let a thread of the model start a batch; without one, return what computes it."""
    if not pixels:
        return dict  # Nothing but failures.
    if model is None:
        return lambda: extractor.extract_async(extractor.collate(pixels))()
    starting = model.submit(lambda: extractor.extract_async(extractor.collate(pixels)))
    return lambda: starting.result()()


def _table(batch: _Batch, extractor: extractors.Extractor, schema: pa.Schema) -> pa.Table | None:
    """Wait for the columns of a batch and make rows of them; None if no image has one."""
    tally, started = batch.tally, time.perf_counter()
    arrays = batch.columns()
    tally.forward_seconds += time.perf_counter() - started
    columns = [pa.array([ref.image_id for ref in batch.refs], pa.string())]
    columns += [_column(arrays[name], schema.field(name).type) for name in schema.names[1:]]
    table = pa.Table.from_arrays(columns, schema=schema)
    bad = np.sum([_not_finite(column) for column in columns], axis=0)
    tally.failures += [
        _failure(ref, "extract", "not_finite", _not_finite_message(int(count), extractor))
        for ref, count in zip(batch.refs, bad, strict=True)
        if count
    ]
    tally.images += len(batch.refs) - int(np.count_nonzero(bad))
    table = table.filter(pa.array(bad == 0)) if bad.any() else table
    return table if table.num_rows else None


def _column(array: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """Turn an array ``[B, ...]`` into a column: of vectors for fixed-size lists, else of single values."""
    if not pa.types.is_fixed_size_list(dtype):
        return pa.array(array, dtype)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, numpy_type(dtype)).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(values, dtype.value_type), type=dtype)


def _not_finite(column: pa.Array) -> np.ndarray:
    """Return the number of values of each row that are infinite or no numbers."""
    if not pa.types.is_fixed_size_list(column.type) or not pa.types.is_floating(column.type.value_type):
        return np.zeros(len(column), np.int64)
    values = column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), -1)
    return values.shape[1] - np.isfinite(values).sum(axis=1)


def _not_finite_message(count: int, extractor: extractors.Extractor) -> str:
    dtype, advice = extractor.spec.dtype, ""
    if extractor.parameters.get("precision") == "fp16":
        advice = ": the model computes in fp16, whose largest number is 65,504; --precision bf16 has the range of fp32"
    elif dtype == "float16":
        advice = ": its largest number is 65,504, float32 holds more"
    return f"{count:,} values of the feature are infinite or no numbers in {dtype}{advice}"

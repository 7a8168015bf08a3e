"""Chunks of image references: compressed tables of `ImageRef` per shard.

In a local run chunks are ranges of a spill file: the launcher, which gathers them, holds a few bytes per image.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import numpy as np
import pyarrow as pa

from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.listing import REFS_SCHEMA, Listing, ListingPart
from pipelines.inputs.images.staged_images import StagedImage
from pipelines.jobs import FeaturesJob
from pipelines.running.spill_files import FileRange, read_range, write_ranges
from schemas.keys import shard_of

RefChunk: TypeAlias = bytes | FileRange
"""References to images of a shard, or to their staged copies: bytes, or a range of a file."""

Kept: TypeAlias = tuple[ListingPart, ...]
"""Parts of a cached listing, in a local file or in the output; empty without one."""

_MIN_BATCH_REFS, _MAX_BATCH_REFS = 1 << 17, 1 << 20
"""References that a worker partitions in a batch: at most some 250 MB."""

_SHARD_REFS = 64
"""Mean references of a shard in a batch: each chunk has some 300 bytes besides its references, and costs some 30 µs."""

_ROWS = 1 << 13

_FIRST_BATCH_REFS = 1 << 13
"""References of the first batch, which is never spilled; most listings are shorter."""


def listed_refs(job: FeaturesJob, kept: Kept | Listing) -> Iterator[ImageRef]:
    """Yield the references of a cached listing or of the images, without skipped ones."""
    images, skip = job.open_images(), frozenset(job.skip)
    if isinstance(kept, Listing):
        kept = () if kept.cached is None else kept.cached.parts()
    refs = chain.from_iterable(part.refs(images) for part in kept) if kept else images.refs()
    return (ref for ref in refs if ref.image_id not in skip) if skip else refs


def chunk_refs(
    refs: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterator[tuple[int, RefChunk]]:
    """Yield shard index and chunk of references.

    References of ``skip_shards`` are dropped. Chunks of a long listing are spilled to the local folder; None
    keeps them as bytes. Batches grow with the number of shards, so that chunks do not shrink.

    Raises:
        DatasetError: the folder cannot be written.
    """
    refs = iter(refs)
    yield from partition_by_shard(islice(refs, _FIRST_BATCH_REFS), shards, skip_shards=skip_shards)
    size = min(max(_MIN_BATCH_REFS, _SHARD_REFS * shards), _MAX_BATCH_REFS)
    for first in refs:
        batch = chain([first], islice(refs, size - 1))
        yield from partition_by_shard(batch, shards, skip_shards=skip_shards, folder=folder)


def partition_by_shard(
    refs: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterable[tuple[int, RefChunk]]:
    """Partition references into a chunk per shard, see `chunk_refs`."""
    refs = iter(refs)
    batches: list[pa.RecordBatch] = []
    indices: list[int] = []
    while rows := list(islice(refs, _ROWS)):  # Arrow takes a quarter of the memory of the tuples.
        batches.append(_to_batch(rows, REFS_SCHEMA))
        indices += (shard_of(ref.image_id, shards) for ref in rows)
    if not batches:
        return []
    order = np.argsort(indices, kind="stable")
    ordered = pa.Table.from_batches(batches).take(pa.array(order)).combine_chunks().to_batches()[0]
    present, starts = np.unique(np.take(indices, order), return_index=True)
    ranges = zip(present.tolist(), pairwise([*starts.tolist(), len(order)]), strict=True)
    parts = ((shard, ordered.slice(start, end - start)) for shard, (start, end) in ranges if shard not in skip_shards)
    return _spill(parts, folder)


def to_chunks(
    rows: Iterable[tuple[int, Sequence[tuple[object, ...]]]], schema: pa.Schema, folder: str | None
) -> Iterable[tuple[int, RefChunk]]:
    """Serialize each list of rows as a chunk, in a file of the local folder if any."""
    return _spill(((key, _to_batch(values, schema)) for key, values in rows), folder)


def from_chunks(chunks: Iterable[RefChunk]) -> tuple[list[ImageRef], list[StagedImage]]:
    """Read chunks of references and of staged copies."""
    refs: list[ImageRef] = []
    copies: list[StagedImage] = []
    for chunk in chunks:
        with pa.input_stream(pa.py_buffer(read_range(chunk)), "zstd") as stream, pa.ipc.open_stream(stream) as reader:
            table = reader.read_all()
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        if table.schema.names == REFS_SCHEMA.names:
            refs += (ImageRef(*row) for row in rows)
        else:
            copies += (StagedImage(*row) for row in rows)
    return refs, copies


def _to_batch(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to Arrow, with 64-bit offsets: text may exceed 2 GiB."""
    types = [pa.large_string() if pa.types.is_string(field.type) else field.type for field in schema]
    columns = [pa.array(column, column_type) for column, column_type in zip(zip(*rows, strict=True), types, strict=True)]
    return pa.record_batch(columns, schema.names)


def _spill(batches: Iterable[tuple[int, pa.RecordBatch]], folder: str | None) -> Iterable[tuple[int, RefChunk]]:
    """Compress each batch as a chunk, in a file of the local folder if any."""
    chunks = ((key, _compress(batch)) for key, batch in batches)
    return chunks if folder is None else write_ranges(chunks, Path(folder) / uuid4().hex)


def _compress(batch: pa.RecordBatch) -> bytes:
    """Compress a batch as an Arrow IPC stream.

    The stream is compressed as a whole, because its schema and paddings are larger than a few references.
    """
    stream = batch.schema.serialize().to_pybytes() + batch.serialize().to_pybytes()
    return pa.compress(stream, "zstd", asbytes=True)

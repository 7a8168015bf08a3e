"""Chunks of image references: compressed tables of `ImageRef` per shard.

In a local run chunks are ranges of a spill file: the launcher, which shuffles them, holds a few bytes per image.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import pyarrow as pa

from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.listing import REFS_SCHEMA, Listing, SharedListing, read_listing
from pipelines.inputs.images.staged_images import StagedImage
from pipelines.jobs import FeaturesJob
from pipelines.running.spill_files import FileRange, from_ipc, to_ipc, write_ranges
from schemas.keys import shard_of

RefChunk: TypeAlias = bytes | FileRange
"""References to images of a shard, or to their staged copies: bytes, or a range of a file."""

Kept: TypeAlias = str | SharedListing
"""Cached listing: path of a shared file, or its file in the output; empty without one."""

_BATCH_REFS = 1 << 17
"""References that a worker partitions in a batch: some 30 MB."""

_FIRST_BATCH_REFS = 1 << 13
"""References of the first batch, which is never spilled; most listings are shorter."""


def reference_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder for the chunks of a local run."""
    return tempfile.TemporaryDirectory(prefix="imagepivot-references-", ignore_cleanup_errors=True)


def listed_refs(job: FeaturesJob, kept: Kept | Listing) -> Iterator[ImageRef]:
    """Yield the references of a cached listing or of the images, without skipped ones."""
    images, skip = job.open_images(), frozenset(job.skip)
    if isinstance(kept, Listing):
        kept = "" if kept.cached is None else kept.cached.path
    if isinstance(kept, SharedListing):
        refs = kept.refs(images)
    else:
        refs = read_listing(kept) if kept else images.refs()
    return (ref for ref in refs if ref.image_id not in skip) if skip else refs


def chunk_refs(
    refs: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterator[tuple[int, RefChunk]]:
    """Yield shard index and chunk of references.

    References of ``skip_shards`` are dropped. Chunks of a long listing are spilled to the local folder; None keeps them as bytes.

    Raises:
        DatasetError: the folder cannot be written.
    """
    refs = iter(refs)
    yield from partition_by_shard(islice(refs, _FIRST_BATCH_REFS), shards, skip_shards=skip_shards)
    while batch := list(islice(refs, _BATCH_REFS)):
        yield from partition_by_shard(batch, shards, skip_shards=skip_shards, folder=folder)


def partition_by_shard(
    refs: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterable[tuple[int, RefChunk]]:
    """Partition references into a chunk per shard, see `chunk_refs`."""
    by_shard: dict[int, list[ImageRef]] = {}
    for ref in refs:
        by_shard.setdefault(shard_of(ref.image_id, shards), []).append(ref)
    return to_chunks(((shard, by_shard[shard]) for shard in sorted(by_shard.keys() - skip_shards)), REFS_SCHEMA, folder)


def to_chunks(
    rows: Iterable[tuple[int, Sequence[tuple[object, ...]]]], schema: pa.Schema, folder: str | None
) -> Iterable[tuple[int, RefChunk]]:
    """Serialize each list of rows as a chunk, in a file of the local folder if any."""
    chunks = ((key, _serialize(values, schema)) for key, values in rows)
    return chunks if folder is None else write_ranges(chunks, Path(folder) / uuid4().hex)


def refs_in(chunks: Iterable[RefChunk]) -> list[ImageRef]:
    """Read chunks of references."""
    return from_chunks(chunks)[0]


def from_chunks(chunks: Iterable[RefChunk]) -> tuple[list[ImageRef], list[StagedImage]]:
    """Read chunks of references and of staged copies."""
    refs: list[ImageRef] = []
    copies: list[StagedImage] = []
    for chunk in chunks:
        table = from_ipc(chunk)
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        if table.schema.names == REFS_SCHEMA.names:
            refs += (ImageRef(*row) for row in rows)
        else:
            copies += (StagedImage(*row) for row in rows)
    return refs, copies


def _serialize(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> bytes:
    columns = zip(*rows, strict=True)
    return to_ipc(pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema))

"""References to images on their way from the listing to the workers that make the shards, whatever their number.

They travel in compressed pieces, each for one shard; in a local run through a file, so that the launcher, which shuffles there,
holds some bytes for an image and not its names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import pyarrow as pa

from pipelines.inputs.images import ImageRef, ImageSource, Listing, SharedListing, StagedImage, read_listing
from pipelines.inputs.images.listing import REFS_SCHEMA
from pipelines.running.spill_files import Place, from_ipc, read_place, to_ipc, write_places
from schemas.keys import shard_of

RefChunk: TypeAlias = bytes | Place
"""References to images of one shard, or the places of their copies, as bytes or as the place of these."""

Kept: TypeAlias = str | SharedListing
"""A listing: the path of a file that all workers see, or its place beside the output; empty if there is none."""

_GATHERED = 1 << 17
"""References that a worker gathers before it cuts them into pieces: some 30 MB."""

_FIRST = 1 << 13
"""References that are gathered first, and that travel as they are: most listings are no longer."""


@contextmanager
def folder_of_references(is_local: bool) -> Iterator[str | None]:
    """Yield a temporary folder that all workers of a local run see; None for workers elsewhere."""
    if not is_local:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="imagepivot-references-", ignore_cleanup_errors=True) as folder:
        yield folder


def listed_refs(images: ImageSource, kept: Kept | Listing) -> Iterator[ImageRef]:
    """Yield the references of a listing that was kept, or else of the images themselves."""
    if isinstance(kept, Listing):
        kept = "" if kept.cached is None else kept.cached.path
    if isinstance(kept, SharedListing):
        return kept.refs(images)
    return read_listing(kept) if kept else images.refs()


def chunk_refs(
    refs: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterator[tuple[int, RefChunk]]:
    """Gather references and cut them into pieces; yield the number of a shard, and some of its references.

    References of ``skip_shards`` are dropped. Pieces of a long listing go into the local folder; None passes their bytes on.

    Raises:
        DatasetError: the folder cannot be written.
    """
    refs, most = iter(refs), _FIRST
    while gathered := list(islice(refs, most)):
        yield from partition_by_shard(gathered, shards, skip_shards=skip_shards, folder=None if most == _FIRST else folder)
        most = _GATHERED


def partition_by_shard(
    gathered: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterable[tuple[int, RefChunk]]:
    """Cut some references into one piece for each shard; arguments, result and errors are those of `chunk_refs`."""
    by_shard: dict[int, list[ImageRef]] = {}
    for ref in gathered:
        by_shard.setdefault(shard_of(ref.image_id, shards), []).append(ref)
    return to_chunks(((number, by_shard[number]) for number in sorted(by_shard.keys() - skip_shards)), REFS_SCHEMA, folder)


def to_chunks(
    rows: Iterable[tuple[int, Sequence[tuple[object, ...]]]], schema: pa.Schema, folder: str | None
) -> Iterable[tuple[int, RefChunk]]:
    """Make a piece of each list of rows with these columns, in a file of a local folder if there is one."""
    pieces = ((number, _packed(some, schema)) for number, some in rows)
    return pieces if folder is None else write_places(pieces, Path(folder) / uuid4().hex)


def refs_in(pieces: Iterable[RefChunk]) -> list[ImageRef]:
    """Return the references in pieces."""
    return from_chunks(pieces)[0]


def from_chunks(pieces: Iterable[RefChunk]) -> tuple[list[ImageRef], list[StagedImage]]:
    """Return the references in pieces, and the places of copies in others."""
    refs: list[ImageRef] = []
    copies: list[StagedImage] = []
    for piece in pieces:
        table = from_ipc(piece) if isinstance(piece, bytes) else read_place(piece)
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        if table.schema.names == REFS_SCHEMA.names:
            refs += (ImageRef(*row) for row in rows)
        else:
            copies += (StagedImage(*row) for row in rows)
    return refs, copies


def _packed(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> bytes:
    columns = zip(*rows, strict=True)
    return to_ipc(pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema))

"""Pieces of shards: how captions travel from the workers that read them to those that write them, whatever their number.

A worker gathers about 32 MiB of captions, sorts them by shard and key, and cuts them into pieces (`pipelines.text.ordering`).
What becomes of a piece depends on the runner:

* The local runner holds everything that it shuffles in the launcher's memory. There each gathering becomes one file beside the
  shards, and only the places of its pieces are shuffled: some hundred bytes for a thousand captions. The files are temporary
  files of the dataset like any other: the commit deletes them before it writes the manifest, a run that fails when it ends, and
  the next run those of one that was killed.
* The workers of any other runner may share no disk, and its shuffle spills by itself: there the pieces are shuffled. The worker
  that writes a shard first puts them into a file of its own, since the sweep of the merge reads them in another order.

So memory hardly depends on the number of captions or shards: of each GB of captions, a merge holds 4 MB. Everything is written
and read once. Sorting a gathering by shard first makes its file a sequence of sorted runs, one for each shard, and merging these
is the only other step, however large the shard is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import pyarrow as pa

from pipelines.running.places import Place, from_ipc, read_place, to_ipc, write_places
from pipelines.text.ordering import RowKey, cut, first_key
from schemas.storage.folder import TEMPORARY_MARK
from schemas.storage.storage_errors import storage_errors

GATHERED_BYTES = 32 << 20
"""Bytes of captions that a worker gathers before it sorts them."""

Piece: TypeAlias = tuple[RowKey, bytes | Place]
"""Key of the first row, and all rows as bytes, or the place of these bytes."""


def make_pieces(
    blocks: Iterable[pa.Table], shards: int, *, left_out: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterator[tuple[int, Piece]]:
    """Gather blocks and cut them into pieces.

    Args:
        blocks: captions in any order.
        shards: number of shards.
        left_out: shards whose captions are dropped.
        folder: local folder for the pieces; None to pass their bytes on.

    Yields:
        The number of a shard and a piece of it.

    Raises:
        DatasetError: the folder cannot be written.
    """
    for table in _gather(blocks):
        pieces = (((number, first_key(rows)), to_ipc(rows)) for number, rows in cut(table, shards, left_out))
        name = f".captions-{uuid4().hex}{TEMPORARY_MARK}{os.getpid()}"
        contents = pieces if folder is None else write_places(pieces, Path(folder) / name)
        yield from ((number, (first, content)) for (number, first), content in contents)


def _gather(blocks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    gathered: list[pa.Table] = []
    size = 0
    for block in blocks:
        gathered.append(block)
        size += block.nbytes
        if size >= GATHERED_BYTES:
            yield pa.concat_tables(gathered)
            gathered, size = [], 0
    if gathered:
        yield pa.concat_tables(gathered)


def read_piece(piece: Piece) -> pa.Table:
    """Return the rows of a piece."""
    content = piece[1]
    return from_ipc(content) if isinstance(content, bytes) else read_place(content)


@contextmanager
def on_disk(pieces: Iterable[Piece]) -> Iterator[list[tuple[RowKey, Place]]]:
    """Yield the first keys and places of pieces; those that came as bytes are in a file as long as the block runs."""
    with tempfile.NamedTemporaryFile(prefix="imagepivot-") as file:
        places: list[tuple[RowKey, Place]] = []
        with storage_errors(file.name):
            for first, content in pieces:
                if isinstance(content, bytes):
                    places.append((first, (file.name, file.tell(), len(content))))
                    file.write(content)
                else:
                    places.append((first, content))
            file.flush()
        yield places

"""External merge sort of captions by shard and key, a bounded number of rows at a time.

1. Whoever reads captions gathers about 32 MiB, sorts them by shard and key, and cuts them into pieces: `make_pieces`.
2. Where one disk serves all, each gathering becomes one file beside the shards, a sequence of sorted runs, and only places in it
   are passed on: some hundred bytes for a thousand captions, since the local runner shuffles in the launcher's memory. The commit
   deletes these temporary files before it writes the manifest, a run that fails when it ends, the next run those of a killed one.
   Elsewhere the runner shuffles the pieces themselves, and the writer of a shard puts them into a file of its own: `on_disk`.
3. `merge` sweeps over the pieces of a shard in the order of their first keys: what is smaller than the first key of the next piece
   is in its final place. So a piece knows nothing of the others, and it does not matter who made it, or when.
4. `number_captions` gives each row its index and refuses keys that occur twice.

Everything is written and read once. Memory hardly depends on the number of captions or shards: a merge holds 4 MB per GB.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.captions.base import INDEX_ADVICE
from pipelines.running.spill_files import Place, from_ipc, read_place, to_ipc, write_places
from schemas.errors import InputError
from schemas.keys import CaptionKey, shard_of
from schemas.kinds import KEY_COLUMNS
from schemas.storage.folder import TEMPORARY_MARK
from schemas.storage.storage_errors import storage_errors

PIECE_BYTES = 128 << 10
"""Bytes of a piece, before compression: about a thousand captions. Merging holds at most one piece of each gathering."""

MERGED_BYTES = 8 << 20
"""Bytes that are read between two sorts while merging."""

RowKey: TypeAlias = tuple[str, str, str, int, int]
"""What rows are sorted by: image id, language, portion, index (-1 if the source gives none), position in the source."""

GATHERED_BYTES = 32 << 20
"""Bytes of captions that a worker gathers before it sorts them."""

Piece: TypeAlias = tuple[RowKey, bytes | Place]
"""Key of the first row, and all rows as bytes, or the place of these bytes."""

_KEY = KEY_COLUMNS["captions"]
_ORDER = (*_KEY, "position")
_MAX_INDEX = np.iinfo(np.int16).max

_Place = TypeVar("_Place")


def cut(table: pa.Table, shards: int, left_out: frozenset[int] = frozenset()) -> Iterator[tuple[int, pa.Table]]:
    """Cut the rows of a block, in any order, into sorted pieces of at most about 128 KiB.

    Yields:
        The number of a shard, in ascending order, and some of its rows, in the order of the shard.
    """
    image_ids = table["image_id"].combine_chunks().dictionary_encode()
    shard_of_id = np.array([shard_of(image_id, shards) for image_id in image_ids.dictionary.to_pylist()], np.int32)
    shard_of_row = shard_of_id[image_ids.indices.to_numpy()]
    order = np.lexsort((*_sort_keys(table), shard_of_row))
    if left_out:
        order = order[~np.isin(shard_of_row[order], list(left_out))]
    rows = table.take(order)
    piece_rows = max(1, PIECE_BYTES * rows.num_rows // max(1, rows.nbytes))
    runs = np.unique(shard_of_row[order], return_index=True, return_counts=True)
    for number, start, count in zip(*(array.tolist() for array in runs), strict=True):
        for first in range(start, start + count, piece_rows):
            yield number, rows.slice(first, min(piece_rows, start + count - first))


def merge(pieces: Iterable[tuple[RowKey, _Place]], read: Callable[[_Place], pa.Table]) -> Iterator[pa.Table]:
    """Merge the pieces of a shard.

    Memory holds the places of all pieces, the rows of those that overlap the current one, and about 8 MiB more.

    Args:
        pieces: the first key of each piece, and the place that it is read from, in any order.
        read: returns the rows of a piece.

    Yields:
        Tables of sorted rows, which follow one another.
    """
    in_order = sorted(pieces, key=lambda piece: piece[0])
    waiting: list[pa.Table] = []
    size = 0
    for number, (_, place) in enumerate(in_order):
        waiting.append(read(place))
        size += waiting[-1].nbytes
        is_last = number == len(in_order) - 1
        if size >= MERGED_BYTES or is_last:
            rows = pa.concat_tables(waiting).combine_chunks()
            rows = rows.take(np.lexsort(_sort_keys(rows)))
            done = rows.num_rows if is_last else _rows_below(rows, in_order[number + 1][0])
            waiting, size = [rows.slice(done)], 0
            if done:
                yield rows.slice(0, done)


def number_captions(tables: Iterable[pa.Table], advice: str = INDEX_ADVICE) -> Iterator[pa.Table]:
    """Give each caption of a shard its index, and check the keys.

    Captions whose source gives no index (-1) are numbered, in the order of the source, among the captions of the same image,
    language and portion.

    Args:
        tables: sorted rows, which follow one another.
        advice: what to do about a key that occurs twice, see `pipelines.inputs.captions.CaptionSource.repeat_advice`.

    Raises:
        InputError: a key occurs twice, only some captions have an index, or an image has more captions than an int16 can number.
    """
    last = number = numbered = None  # The last row so far, its number within its group, whether the source gives no index.
    for table in tables:
        rows = pa.concat_tables([table] if last is None else [last, table]).combine_chunks()
        old = rows.num_rows - table.num_rows
        missing = table["index"].to_numpy() < 0
        numbered = bool(missing[0]) if numbered is None else numbered
        if np.any(missing != numbered):
            raise InputError("some captions have an index and some have none: give every caption an index, or none of them")
        starts = np.flatnonzero(_is_new(rows, _KEY[:3]))
        numbers = np.arange(rows.num_rows) - np.repeat(starts, np.diff([*starts, rows.num_rows]))
        if number is not None:
            numbers[: starts[1] if len(starts) > 1 else None] += number
        _refuse_too_many(rows, numbers)
        number = int(numbers[-1])
        if numbered:
            index = pa.array(numbers, pa.int16())
            rows = rows.set_column(rows.schema.get_field_index("index"), "index", index)
        _refuse_duplicates(rows, advice)
        last = rows.slice(rows.num_rows - 1)
        yield rows.slice(old)


def first_key(rows: pa.Table) -> RowKey:
    """Return what the first row is sorted by."""
    return _row_key([rows[name] for name in _ORDER], 0)


def key_of(row: Mapping[str, Any]) -> CaptionKey:
    """Return the key of a row."""
    return CaptionKey(*(row[name] for name in _KEY))


def _sort_keys(table: pa.Table) -> tuple[np.ndarray, ...]:
    """Return numbers [rows] that sort like the columns of a row key, the last column first, as `numpy.lexsort` takes them."""
    ranks = [_ranks(table[name]) if pa.types.is_string(table[name].type) else table[name].to_numpy() for name in _ORDER]
    return tuple(reversed(ranks))


def _ranks(column: pa.ChunkedArray) -> np.ndarray:
    """Return numbers [rows] that sort like the strings of a column, by code point."""
    encoded = column.combine_chunks().dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), np.int16 if len(order) <= _MAX_INDEX else np.int32)  # numpy sorts 16 bits far faster.
    ranks[order] = np.arange(len(order))
    return ranks[encoded.indices.to_numpy()]


def _rows_below(rows: pa.Table, bound: RowKey) -> int:
    """Return how many of some sorted rows have a key below a bound."""
    columns = [rows[name] for name in _ORDER]
    return bisect_left(range(rows.num_rows), bound, key=lambda row: _row_key(columns, row))


def _row_key(columns: Iterable[pa.ChunkedArray], row: int) -> RowKey:
    image_id, language, portion, index, position = (column[row].as_py() for column in columns)
    return image_id, language, portion, index, position


def _is_new(table: pa.Table, columns: Iterable[str]) -> np.ndarray:
    """Return a mask [rows] that is True where a row of a sorted table differs from the previous one in any of the columns."""
    is_new = np.zeros(table.num_rows, bool)
    is_new[0] = True
    for name in columns:
        values = table[name].combine_chunks().dictionary_encode().indices.to_numpy()
        is_new[1:] |= values[1:] != values[:-1]
    return is_new


def _refuse_too_many(rows: pa.Table, numbers: np.ndarray) -> None:
    if numbers.max() > _MAX_INDEX:
        row = rows.slice(int(numbers.argmax()), 1).to_pylist()[0]
        raise InputError(
            f"image {row['image_id']!r} has more than 32,768 captions of portion {row['portion']!r} in language "
            f"{row['language']!r}: an index is a 16-bit integer. Remove some of them"
        )


def _refuse_duplicates(rows: pa.Table, advice: str) -> None:
    duplicates = np.flatnonzero(~_is_new(rows, _KEY))
    if len(duplicates):
        first, second = rows.slice(int(duplicates[0]) - 1, 2).to_pylist()
        raise InputError(
            f"caption key {str(key_of(first))!r} (image_id/language/portion/index) occurs twice: {first['text']!r} in split "
            f"{first['split']!r} and {second['text']!r} in split {second['split']!r}. {advice}"
        )


def make_pieces(
    blocks: Iterable[pa.Table], shards: int, *, left_out: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterator[tuple[int, Piece]]:
    """Gather blocks, in any order, cut them, and yield the number of a shard and a piece of it.

    Args:
        blocks: the blocks.
        shards: number of shards.
        left_out: shards whose captions are dropped.
        folder: local folder for the pieces; None to pass their bytes on.

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

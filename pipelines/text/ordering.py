"""The order of captions within a shard: plain functions that cut, merge and number, a bounded number of rows at a time.

`cut` turns rows in any order into sorted pieces of shards, `merge` turns the pieces of one shard into its rows, sorted, and
`number_captions` gives each row its index and refuses keys that occur twice. Merging is a sweep: the pieces are read in the
order of their first keys, and what is smaller than the first key of the next piece is in its final place. So a piece needs to
know nothing of the others, and it does not matter who made it, or when.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.captions.base import INDEX_ADVICE
from schemas.errors import InputError
from schemas.keys import CaptionKey, shard_of
from schemas.kinds import KEY_COLUMNS

PIECE_BYTES = 128 << 10
"""Bytes of a piece, before compression: about a thousand captions. Merging holds at most one piece of each gathering."""

MERGED_BYTES = 8 << 20
"""Bytes that are read between two sorts while merging."""

RowKey: TypeAlias = tuple[str, str, str, int, int]
"""What rows are sorted by: image id, language, portion, index (-1 if the source gives none), position in the source."""

_KEY = KEY_COLUMNS["captions"]
_ORDER = (*_KEY, "position")
_MAX_INDEX = np.iinfo(np.int16).max

_Place = TypeVar("_Place")


def cut(table: pa.Table, shards: int, left_out: frozenset[int] = frozenset()) -> Iterator[tuple[int, pa.Table]]:
    """Cut rows into sorted pieces of at most about 128 KiB.

    Args:
        table: rows with the columns of a block, in any order.
        shards: number of shards.
        left_out: shards whose rows are dropped.

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
    for number, start, count in zip(*_runs(shard_of_row[order]), strict=True):
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


def _runs(values: np.ndarray) -> tuple[list[int], ...]:
    """Return each of some sorted values once, where its first is, and how many there are."""
    return tuple(array.tolist() for array in np.unique(values, return_index=True, return_counts=True))


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

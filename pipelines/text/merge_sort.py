"""External merge sort of captions by (shard, key).

1. `make_sorted_runs`: a worker gathers 32 MiB of captions, sorts them by shard and key, and cuts them into runs of 128 KiB.
2. Local workers write each gathering to one file beside the shards, and only file ranges travel. A runner of Beam shuffles the
   runs, and the shard writer spills them: `spill_to_disk`.
3. `merge_runs`: the shard writer reads the runs of a shard in the order of their first keys. Rows below the first key of the next
   run are in their final place.
4. `number_captions`: each row gets its index; duplicate keys are an error.

Every caption is written once and read once. Memory hardly depends on the number of captions or shards. The commit deletes the
temporary files before it writes the manifest; a failed run deletes its own. The next run deletes those of a killed one.
"""

import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.captions.base import INDEX_ADVICE
from pipelines.running.spill_files import FileRange, from_ipc, gather, to_ipc, write_ranges
from schemas.errors import InputError
from schemas.keys import CaptionKey, shard_of
from schemas.kinds import KEY_COLUMNS
from schemas.storage.folder import TEMPORARY_MARK

RUN_BYTES = 128 << 10
"""Bytes of a run, before compression: about a thousand captions. Merging holds at most one run of each gathering."""

MERGED_BYTES = 8 << 20
"""Bytes that are read between two sorts while merging."""

GATHERED_BYTES = 32 << 20
"""Bytes of captions that a worker gathers before it sorts them."""

RowKey: TypeAlias = tuple[str, str, str, int, int]
"""The sort key of a row: image id, language, portion, index (-1 if the source has none), position in the source."""

SortedRun: TypeAlias = tuple[RowKey, bytes | FileRange]
"""Key of the first row, and the rows in Arrow's IPC format: their bytes or the file range of these."""

_KEY = KEY_COLUMNS["captions"]
_ORDER = (*_KEY, "position")
_MAX_INDEX = np.iinfo(np.int16).max


def make_sorted_runs(
    blocks: Iterable[pa.Table], shards: int, *, skip_shards: frozenset[int] = frozenset(), folder: str | None = None
) -> Iterator[tuple[int, SortedRun]]:
    """Sort blocks by shard and key, and yield pairs (shard index, sorted run).

    ``folder`` is a local folder for the runs; None yields their bytes.

    Raises:
        DatasetError: the folder cannot be written.
    """
    for gathered in gather(blocks, GATHERED_BYTES, attrgetter("nbytes")):
        table = pa.concat_tables(gathered)
        runs = (((shard, row_key(rows)), to_ipc(rows)) for shard, rows in partition_captions(table, shards, skip_shards))
        name = f".captions-{uuid4().hex}{TEMPORARY_MARK}{os.getpid()}"
        contents = runs if folder is None else write_ranges(runs, Path(folder) / name)
        yield from ((shard, (first, content)) for (shard, first), content in contents)


def partition_captions(
    table: pa.Table, shards: int, skip_shards: frozenset[int] = frozenset()
) -> Iterator[tuple[int, pa.Table]]:
    """Yield pairs (shard index, sorted rows) by ascending shard, of about `RUN_BYTES`."""
    image_ids = table["image_id"].combine_chunks().dictionary_encode()
    shard_of_id = np.array([shard_of(image_id, shards) for image_id in image_ids.dictionary.to_pylist()], np.int32)
    shard_of_row = shard_of_id[image_ids.indices.to_numpy()]
    order = np.lexsort((*_sort_keys(table), shard_of_row))
    if skip_shards:
        order = order[~np.isin(shard_of_row[order], list(skip_shards))]
    rows = table.take(order)
    run_rows = max(1, RUN_BYTES * rows.num_rows // max(1, rows.nbytes))
    partitions = np.unique(shard_of_row[order], return_index=True, return_counts=True)
    for shard, start, count in zip(*(array.tolist() for array in partitions), strict=True):
        for first in range(start, start + count, run_rows):
            yield shard, rows.slice(first, min(run_rows, start + count - first))


def read_run(run: SortedRun) -> pa.Table:
    """Return the rows of a run."""
    return from_ipc(run[1])


@contextmanager
def spill_to_disk(runs: Iterable[SortedRun]) -> Iterator[Sequence[SortedRun]]:
    """Spill the bytes of runs to a temporary file inside the block."""
    with tempfile.TemporaryDirectory(prefix="imagepivot-") as folder:
        yield write_ranges(runs, Path(folder) / "runs")


def merge_runs(runs: Iterable[SortedRun]) -> Iterator[pa.Table]:
    """Merge the runs of a shard, and yield tables of consecutive sorted rows.

    Memory holds the keys of all runs, the rows of those that overlap the current one, and about 8 MiB more.
    """
    in_order = sorted(runs, key=lambda run: run[0])
    waiting: list[pa.Table] = []
    size = 0
    for run, following in zip_longest(in_order, in_order[1:]):
        waiting.append(read_run(run))
        size += waiting[-1].nbytes
        if following is None or size >= MERGED_BYTES:
            rows = pa.concat_tables(waiting).combine_chunks()
            rows = rows.take(np.lexsort(_sort_keys(rows)))
            num_final = rows.num_rows
            if following is not None:
                num_final = bisect_left(range(rows.num_rows), following[0], key=lambda row: row_key(rows, row))
            waiting, size = [rows.slice(num_final)], 0
            if num_final:
                yield rows.slice(0, num_final)


def number_captions(tables: Iterable[pa.Table], advice: str = INDEX_ADVICE) -> Iterator[pa.Table]:
    """Set the index of each caption of a shard, and check the keys.

    If the source has no indices (-1), captions are numbered in its order, for each image, language and
    portion. ``advice`` ends the error for a duplicate key.

    Raises:
        InputError: a key occurs twice, only some captions have an index, or an image has more captions than an int16 can number.
    """
    last = last_index = has_no_index = None  # Last row of the previous table, and its index within its group.
    for table in tables:
        rows = pa.concat_tables([table] if last is None else [last, table]).combine_chunks()
        num_previous = rows.num_rows - table.num_rows
        missing = table["index"].to_numpy() < 0
        has_no_index = bool(missing[0]) if has_no_index is None else has_no_index
        if np.any(missing != has_no_index):
            raise InputError("some captions have an index and some have none: give every caption an index, or none of them")
        starts = np.flatnonzero(_differs(rows, _KEY[:3]))
        indices = np.arange(rows.num_rows) - np.repeat(starts, np.diff([*starts, rows.num_rows]))
        if last_index is not None:
            indices[: starts[1] if len(starts) > 1 else None] += last_index
        _check_count(rows, indices)
        last_index = int(indices[-1])
        if has_no_index:
            rows = rows.set_column(rows.schema.get_field_index("index"), "index", pa.array(indices, pa.int32()))
        _check_unique(rows, advice)
        last = rows.slice(rows.num_rows - 1)
        yield rows.slice(num_previous)


def row_key(rows: pa.Table, row: int = 0) -> RowKey:
    """Return the sort key of a row."""
    image_id, language, portion, index, position = (rows[name][row].as_py() for name in _ORDER)
    return image_id, language, portion, index, position


def key_of(row: Mapping[str, Any]) -> CaptionKey:
    """Return the key of a caption."""
    return CaptionKey(*(row[name] for name in _KEY))


def _sort_keys(table: pa.Table) -> tuple[np.ndarray, ...]:
    """Return numbers [rows] that sort like the columns of `_ORDER`, in reverse order."""
    return tuple(
        _ranks(table[name]) if pa.types.is_string(table[name].type) else table[name].to_numpy() for name in reversed(_ORDER)
    )


def _ranks(column: pa.ChunkedArray) -> np.ndarray:
    """Return numbers [rows] that sort like the strings of a column, by code point."""
    encoded = column.combine_chunks().dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), np.int16 if len(order) <= _MAX_INDEX else np.int32)  # numpy sorts 16 bits far faster.
    ranks[order] = np.arange(len(order))
    return ranks[encoded.indices.to_numpy()]


def _differs(table: pa.Table, columns: Iterable[str]) -> np.ndarray:
    """Mark the rows of a sorted table that differ from the previous one, bool [rows]."""
    differs = np.zeros(table.num_rows, bool)
    differs[0] = True
    for name in columns:
        values = table[name].combine_chunks().dictionary_encode().indices.to_numpy()
        differs[1:] |= values[1:] != values[:-1]
    return differs


def _check_count(rows: pa.Table, indices: np.ndarray) -> None:
    if indices.max() > _MAX_INDEX:
        row = rows.slice(int(indices.argmax()), 1).to_pylist()[0]
        raise InputError(
            f"image {row['image_id']!r} has more than 32,768 captions of portion {row['portion']!r} in "
            f"language {row['language']!r}: an index is a 16-bit integer. Remove some of them"
        )


def _check_unique(rows: pa.Table, advice: str) -> None:
    duplicates = np.flatnonzero(~_differs(rows, _KEY))
    if len(duplicates):
        first, second = rows.slice(int(duplicates[0]) - 1, 2).to_pylist()
        raise InputError(
            f"caption key {str(key_of(first))!r} (image_id/language/portion/index) occurs twice: {first['text']!r} in split "
            f"{first['split']!r} and {second['text']!r} in split {second['split']!r}. {advice}"
        )

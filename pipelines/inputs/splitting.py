"""Cutting one large table into ranges, each of which a worker reads by itself.

A range of a text table are the lines that begin in a range of bytes, so each line has to be a row. JSON lines are, and so are the
lines of CSV and TSV without quoting. With quoting a value may hold line ends; such a value begins with a quote, and a file without
any is cut. A range of Parquet is a range of row groups. What is compressed as a whole is not cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs.dialects import AUTO_DIALECT, Dialect
from pipelines.inputs.files import open_input, open_seekable
from pipelines.inputs.tables import delimiter_of, type_of
from schemas.errors import InputError
from schemas.storage.folder import Folder

RANGE_BYTES = 32 << 20
"""Bytes of a range: as much as a worker gathers before it sorts."""

_CHUNK = 1 << 20

Range: TypeAlias = tuple[int, int]
"""Where a range begins and ends: bytes of a text table, row groups of Parquet."""


def ranges_of(
    folder: Folder,
    name: str,
    *,
    required: tuple[str, ...] = (),
    renamed: tuple[tuple[str, str], ...] = (),
    dialect: Dialect = AUTO_DIALECT,
) -> list[Range]:
    """Cut a table into ranges; none if it is small, damaged, or cannot be cut.

    Args:
        folder: the folder of the table.
        name: its file name.
        required: as for `pipelines.inputs.tables.read_batches`, to find the delimiter.
        renamed: pairs (our name, the table's name) of columns, where they differ.
        dialect: delimiter and quoting, of CSV and TSV.
    """
    state = folder.state(name)
    if state is None or state[0] <= RANGE_BYTES or name.endswith(".gz"):
        return []
    try:
        return list(_ranges(folder, name, state, required, renamed, dialect))
    except InputError:
        return []  # Reading it will say what is wrong.


@lru_cache(maxsize=8)
def _ranges(
    folder: Folder,
    name: str,
    state: tuple[int, ...],
    required: tuple[str, ...],
    renamed: tuple[tuple[str, str], ...],
    dialect: Dialect,
) -> tuple[Range, ...]:
    """Cut a table that is in this state: a run asks several times."""
    kind = type_of(name)
    if kind == "parquet":
        return tuple(_row_groups(folder, name))
    if kind in ("csv", "tsv") and dialect.quoting != "none":
        delimiter = delimiter_of(folder, name, required=required, renamed=dict(renamed), dialect=dialect)
        if _has_quoted_values(folder, name, delimiter.encode()):
            return ()
    return tuple((start, min(start + RANGE_BYTES, state[0])) for start in range(0, state[0], RANGE_BYTES))


def _row_groups(folder: Folder, name: str) -> Iterator[Range]:
    with open_seekable(folder, name) as stream:
        try:
            metadata = pq.ParquetFile(stream).metadata
        except (pa.ArrowException, OSError):
            return
        start = size = 0
        for number in range(metadata.num_row_groups):
            size += metadata.row_group(number).total_byte_size
            if size >= RANGE_BYTES or number == metadata.num_row_groups - 1:
                yield start, number + 1
                start, size = number + 1, 0


def _has_quoted_values(folder: Folder, name: str, delimiter: bytes) -> bool:
    """Whether a quote stands at the start of the file, of a line or of a value. One behind a byte order mark counts as well."""
    with open_input(folder, name) as stream:
        last = b"\n"
        while chunk := stream.read(_CHUNK):
            text = last + chunk
            if b'\n"' in text or delimiter + b'"' in text or b'\xef\xbb\xbf"' in text:
                return True
            last = text[-len(delimiter) :]
    return False

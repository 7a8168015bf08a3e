"""Streaming the rows of a table. The extension determines the format: CSV, TSV or JSON lines, plain or ``.gz``, or Parquet.

* Every value is taken exactly as written: nothing is trimmed, and "NA", "None" or "null" are ordinary values. Only a byte order
  mark at the start of the file is dropped, and CR LF counts as LF, within quoted values as well; see `schemas.text`.
* CSV and TSV have a header line and are quoted as in RFC 4180: a value that *begins* with ``"`` ends at the closing ``"``, may
  contain line ends and delimiters, and writes a quote as ``""``. Completely empty lines are skipped.
* A JSON line is an object. The first line determines which of our columns exist; a later line with others is an error.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs.files import open_seekable, read_lines, without_gz
from schemas.errors import InputError, UsageError
from schemas.storage import Folder
from schemas.text import LONE_CR

__all__ = ["Row", "is_table", "read_rows", "type_of"]

_BATCH_ROWS = 4096
_BUFFER_BYTES = 1 << 18
_TEXT_TYPES = ("csv", "tsv", "jsonl", "ndjson")

Row = tuple[str, dict[str, Any]]
"""The place of a row, e.g. "row 3 (line 4)", and the values of those of our columns that the table has."""


def read_rows(
    folder: Folder,
    name: str,
    *,
    columns: tuple[str, ...],
    required: tuple[str, ...],
    renamed: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Read a table row by row.

    Args:
        folder: the folder of the table.
        name: its file name.
        columns: the columns to read if the table has them, by our names.
        required: the columns that it must have.
        renamed: our name of a column -> the table's name, where they differ.

    Yields:
        The place of a row, for messages, and its values by our names.

    Raises:
        InputError: the table lacks a column or is damaged.
        UsageError: the extension is unknown.
    """
    table = _Table(folder, name, columns, required, dict(renamed or {}))
    kind = type_of(name)
    if kind == "parquet":
        return table.parquet_rows()
    if kind in ("jsonl", "ndjson"):
        return table.json_rows()
    return table.csv_rows(delimiter="," if kind == "csv" else "\t")


def is_table(name: str) -> bool:
    """Return whether a file name has the extension of a table."""
    try:
        type_of(name)
    except UsageError:
        return False
    return True


def type_of(name: str) -> str:
    """Return the extension that determines how a table is read.

    Raises:
        UsageError: the extension is unknown.
    """
    stem = without_gz(name)
    kind = stem.rpartition(".")[2].lower() if "." in stem else ""
    if kind not in (*_TEXT_TYPES, "parquet") or (kind == "parquet" and stem != name):
        raise UsageError(
            f"cannot tell how to read the table {name!r}: expected a name that ends in "
            f"{', '.join('.' + known for known in _TEXT_TYPES)} (or these with .gz) or .parquet"
        )
    return kind


@dataclass(frozen=True)
class _Table:
    folder: Folder
    name: str
    columns: tuple[str, ...]
    required: tuple[str, ...]
    renamed: dict[str, str]

    @property
    def location(self) -> str:
        return self.folder.path_of(self.name)

    def _resolve(self, header: list[str]) -> dict[str, str]:
        """Map those of our columns that the table has to their names in it."""
        location, resolved = self.location, {}
        for ours in self.columns:
            theirs = self.renamed.get(ours, ours)
            if theirs in header:
                if header.count(theirs) > 1:
                    raise InputError(f"{location!r} has {header.count(theirs)} columns {theirs!r}: rename all but one")
                resolved[ours] = theirs
            elif ours in self.required or ours in self.renamed:
                advice = f"write the columns as {ours}={theirs},... with one of these names"
                if ours not in self.renamed:
                    advice = f"name them, such as --columns {','.join(f'{name}=...' for name in self.required)}"
                raise InputError(
                    f"{location!r} has no column {theirs!r}; its columns are {', '.join(map(repr, header))}: {advice}"
                )
        return resolved

    def csv_rows(self, *, delimiter: str) -> Iterator[Row]:
        location = self.location
        reader = csv.reader((line + "\n" for line in read_lines(self.folder, self.name)), delimiter=delimiter, strict=True)
        positions: dict[str, int] | None = None
        header: list[str] = []
        number, line = 0, 1  # of the row being read; row 0 is the header
        while True:
            place = f"row {number} (line {line})"
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise InputError(f"{location!r}, {place}: {_csv_advice(str(error))}") from error
            if row is None:
                break
            line = reader.line_num + 1
            if not row:
                continue
            number += 1
            if positions is None:
                header = row
                positions = {ours: row.index(theirs) for ours, theirs in self._resolve(row).items()}
                continue
            if len(row) != len(header):
                raise InputError(
                    f"{location!r}, {place}: {len(row)} columns, expected the {len(header)} of the header; a delimiter or line "
                    f"end inside a value needs quotes around the value"
                )
            yield place, {ours: row[position] for ours, position in positions.items()}
        if positions is None:
            raise InputError(f"{location!r} is empty: expected a line with the names of the columns")
        if number == 1:
            raise InputError(
                f"{location!r} has no rows below its header: check the program that wrote it, or name another file"
            )

    def json_rows(self) -> Iterator[Row]:
        location = self.location
        columns: dict[str, str] = {}
        names = {ours: self.renamed.get(ours, ours) for ours in self.columns}
        for number, line in enumerate(read_lines(self.folder, self.name), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{location!r}, line {number}: not JSON, {error}; each line must hold one whole object"
                ) from error
            if not isinstance(row, dict):
                raise InputError(f"{location!r}, line {number}: found {line[:80]!r}, expected a JSON object such as {{...}}")
            columns = columns or self._resolve(list(row))
            for ours, theirs in names.items():
                if (theirs in row) != (ours in columns):
                    has = "lacks" if ours in columns else "has"
                    raise InputError(
                        f"{location!r}, line {number}: {has} {theirs!r}, unlike the first line; all lines need the same columns"
                    )
            yield f"line {number}", {ours: row[theirs] for ours, theirs in columns.items()}
        if not columns:
            raise InputError(f"{location!r} is empty: expected one JSON object per line")

    def parquet_rows(self) -> Iterator[Row]:
        location = self.location
        done = 0
        with open_seekable(self.folder, self.name) as stream:
            try:
                # With a buffer, pages are read one by one; without it, whole column chunks, however large the row group is.
                table = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
                columns = self._resolve(table.schema_arrow.names)
                names = list(dict.fromkeys(columns.values()))
                for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                    values = [
                        _to_python(batch.column(n), place=f"{location!r}, column {n!r}", done=done) for n in columns.values()
                    ]
                    for number, row in enumerate(zip(*values, strict=True), start=done + 1):
                        yield f"row {number}", dict(zip(columns, row, strict=True))
                    done += batch.num_rows
                if not done:
                    raise InputError(f"{location!r} has no rows: check the program that wrote it, or name another file")
            except (pa.ArrowException, OSError) as error:
                raise InputError(
                    f"{location!r} is not a whole Parquet file (after {done} rows): {error}; write it again"
                ) from error


def _csv_advice(error: str) -> str:
    """Return what Python's reader of CSV found wrong, with advice."""
    if error.startswith("new-line character"):
        return f"a CR outside quotes, without the LF of a line end; {LONE_CR}"
    return (
        f"{error}. A value that begins with a quote must end with one, and a quote or line end inside a value needs quotes around "
        "the value (RFC 4180)"
    )


def _to_python(column: Any, *, place: str, done: int) -> list[Any]:
    """Convert the values of a Parquet column; an error names the row of a string that is not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        for row, value in enumerate(column, start=done + 1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise InputError(f"{place}, row {row}: not UTF-8, {error}; write the table again with UTF-8 strings") from error
        raise

"""Rows of a table: CSV, TSV, JSON lines or Parquet, told by the file's extension; the text ones plain or ``.gz``. Streaming.

* Every value is taken exactly as written: nothing is trimmed, and "NA", "None" or "null" are values like others.
* CSV and TSV have a header line and quotes as in RFC 4180: a value that *begins* with ``"`` ends at the closing ``"``, may hold
  line ends and delimiters, and writes a quote as ``""``. Wholly empty lines are skipped.
* A JSON line is an object. Which of our columns there are is told by the first; a later one with others is an error.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs.files import InputFolder, read_lines, without_gz
from schemas.errors import InputError, UsageError

__all__ = ["Row", "is_table", "read_rows", "type_of"]

_BATCH_ROWS = 4096
_BUFFER_BYTES = 1 << 18
_TEXT_TYPES = ("csv", "tsv", "jsonl", "ndjson")

# A row on its way: where it stands ("row 3 (line 4)") and the values of our columns that the table has.
Row = tuple[str, dict[str, Any]]


def read_rows(
    folder: InputFolder,
    name: str,
    *,
    columns: tuple[str, ...],
    required: tuple[str, ...],
    renamed: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Streams the rows of a table.

    Args:
        folder: the folder of the table.
        name: its file name.
        columns: our names of the columns that are read where the table has them.
        required: those that it must have.
        renamed: our name -> the table's name of a column, where they differ.

    Yields:
        Where the row stands, for messages, and its values by our names.

    Raises:
        InputError: the table lacks a column, or is broken.
        UsageError: the extension is none that we know.
    """
    table = _Table(folder, name, columns, required, dict(renamed or {}))
    kind = type_of(name)
    if kind == "parquet":
        return table.parquet_rows()
    if kind in ("jsonl", "ndjson"):
        return table.json_rows()
    return table.csv_rows(delimiter="," if kind == "csv" else "\t")


def is_table(name: str) -> bool:
    """Whether a file's name ends as that of a table."""
    try:
        type_of(name)
    except UsageError:
        return False
    return True


def type_of(name: str) -> str:
    """The extension that tells how to read a table."""
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
    folder: InputFolder
    name: str
    columns: tuple[str, ...]
    required: tuple[str, ...]
    renamed: dict[str, str]

    def _resolve(self, there: list[str]) -> dict[str, str]:
        """Our columns that a table has -> their names in it."""
        where, mapped = self.folder.where(self.name), self.renamed
        found = {}
        for ours in self.columns:
            theirs = mapped.get(ours, ours)
            if theirs in there:
                if there.count(theirs) > 1:
                    raise InputError(f"{where!r} has {there.count(theirs)} columns {theirs!r}: rename all but one")
                found[ours] = theirs
            elif ours in self.required or ours in mapped:
                advice = f"write the columns as {ours}={theirs},... with a name that is there"
                if ours not in mapped:
                    advice = f"say which they are, such as --columns {','.join(f'{each}=...' for each in self.required)}"
                raise InputError(f"{where!r} has no column {theirs!r}; there are {', '.join(map(repr, there))}: {advice}")
        return found

    def csv_rows(self, *, delimiter: str) -> Iterator[Row]:
        where = self.folder.where(self.name)
        reader = csv.reader((line + "\n" for line in read_lines(self.folder, self.name)), delimiter=delimiter, strict=True)
        positions: dict[str, int] | None = None
        header: list[str] = []
        number, line = 0, 1  # of the row that is read; row 0 is the header
        while True:
            place = f"row {number} (line {line})"
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise InputError(
                    f"{where!r}, {place}: {error}. A value that begins with a quote must end with one, and a quote or line end "
                    f"inside a value needs quotes around the value (RFC 4180)"
                ) from error
            if row is None:
                break
            line = reader.line_num + 1
            if not row:
                continue
            number += 1
            if positions is None:
                header = row
                if header and header[0].startswith("\ufeff"):
                    raise InputError(f"{where!r} begins with a byte order mark (U+FEFF): save it as UTF-8 without one")
                positions = {ours: row.index(theirs) for ours, theirs in self._resolve(row).items()}
                continue
            if len(row) != len(header):
                raise InputError(
                    f"{where!r}, {place}: {len(row)} columns, expected the {len(header)} of the header; a delimiter or line "
                    f"end inside a value needs quotes around the value"
                )
            yield place, {ours: row[position] for ours, position in positions.items()}
        if positions is None:
            raise InputError(f"{where!r} is empty: expected a line with the names of the columns")

    def json_rows(self) -> Iterator[Row]:
        where = self.folder.where(self.name)
        columns: dict[str, str] = {}
        names = {ours: self.renamed.get(ours, ours) for ours in self.columns}
        for number, line in enumerate(read_lines(self.folder, self.name), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"{where!r}, line {number}: no JSON, {error}; a line holds one whole object") from error
            if not isinstance(row, dict):
                raise InputError(f"{where!r}, line {number}: found {line[:80]!r}, expected a JSON object such as {{...}}")
            columns = columns or self._resolve(list(row))
            for ours, theirs in names.items():
                if (theirs in row) != (ours in columns):
                    has = "lacks" if ours in columns else "has"
                    raise InputError(
                        f"{where!r}, line {number}: {has} {theirs!r}, unlike the first line; all lines need the same columns"
                    )
            yield f"line {number}", {ours: row[theirs] for ours, theirs in columns.items()}
        if not columns:
            raise InputError(f"{where!r} is empty: expected one JSON object a line")

    def parquet_rows(self) -> Iterator[Row]:
        where = self.folder.where(self.name)
        done = 0
        with self.folder.open_seekable(self.name) as stream:
            try:
                # With a buffer, pages are read one by one; without, whole column chunks, however large the row group is.
                table = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
                columns = self._resolve(table.schema_arrow.names)
                names = list(dict.fromkeys(columns.values()))
                for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                    values = [
                        _to_python(batch.column(n), place=f"{where!r}, column {n!r}", done=done) for n in columns.values()
                    ]
                    for number, row in enumerate(zip(*values, strict=True), start=done + 1):
                        yield f"row {number}", dict(zip(columns, row, strict=True))
                    done += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise InputError(
                    f"{where!r} is not a whole Parquet file (after {done} rows): {error}; write it again"
                ) from error


def _to_python(column: Any, *, place: str, done: int) -> list[Any]:
    """Values of a Parquet column; a string that is not UTF-8 is found by its row."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        for row, value in enumerate(column, start=done + 1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise InputError(f"{place}, row {row}: not UTF-8, {error}; write the table again with UTF-8 strings") from error
        raise

"""Tables in CSV, TSV, JSON lines (plain or ``.gz``) or Parquet, by extension.

* Values are exact: nothing is trimmed, and "NA", "None" or "null" are ordinary values. Only a byte order mark at the start of the
  file is dropped, and CR LF counts as LF, also in quoted values; see `schemas.text`.
* CSV and TSV have a header line and are quoted as in RFC 4180. Empty lines are skipped. A value that looks like rows is an error
  without an explicit quoting, since an ordinary quote at the start of a value would absorb the rows below it.
  `pipelines.inputs.dialects` detects the delimiter.
* A JSON line is an object. The first line determines the columns; a later line with others is an error.

Several workers read ranges of a large table: row groups of Parquet, or lines by their first byte. Lines must
be rows, so CSV and TSV with quoted values are not split, nor are ``.gz`` files.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs.dialects import AUTO_DIALECT, Dialect, find_delimiter, header_lines, split_rows
from pipelines.inputs.files import open_input, open_seekable, read_lines
from schemas.errors import InputError, UsageError
from schemas.footers import ShardRows
from schemas.storage.folder import FileInfo, Folder
from schemas.text import LONE_CR

RANGE_BYTES = 32 << 20
"""Bytes of a range: the size of a worker's gathering before it sorts."""

_BATCH_ROWS = 2048
_CHUNK = 1 << 20
_BUFFER_BYTES = 1 << 18
_TEXT_TYPES = ("csv", "tsv", "jsonl", "ndjson")
_ARRAY = "if the file is one JSON array, write its objects line by line: jq -c '.[]' OLD > NEW.jsonl"
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_ROW = "row {} (line {})"

InputRow: TypeAlias = tuple[str, dict[str, Any]]
"""Place of a row, e.g. "row 3 (line 4)", and its values by our names of the columns."""

ColumnValues: TypeAlias = Sequence[Any] | pa.Array
"""Values of a column: Python values of a text table, or an array of Parquet, with strings that may be invalid UTF-8."""

Range: TypeAlias = tuple[int, int]
"""Start and stop of a range: bytes of a text table, row groups of Parquet."""


@dataclass(frozen=True)
class TableBatch:
    """Consecutive rows of a table.

    Attributes:
        columns: values by our names of the columns.
        place: function from a row, counted from 0, to its place, for messages.
        names: the table's names of the columns, by ours.
    """

    location: str
    columns: Mapping[str, ColumnValues]
    rows: int
    place: Callable[[int], str]
    names: Mapping[str, str]

    def __iter__(self) -> Iterator[InputRow]:
        """Yield the rows one by one."""
        columns = [self._values(name) for name in self.columns]
        for index, row in enumerate(zip(*columns, strict=True)):
            yield self.place(index), dict(zip(self.columns, row, strict=True))

    def _values(self, name: str) -> Sequence[Any]:
        """Return the values of a column.

        Raises:
            InputError: a string is not UTF-8; the message names its row.
        """
        column = self.columns[name]
        if not isinstance(column, pa.Array):
            return column
        try:
            return list(column.to_pylist())
        except UnicodeDecodeError:
            for row, value in enumerate(column):
                try:
                    value.as_py()
                except UnicodeDecodeError as error:
                    place = f"{self.location!r}, column {self.names[name]!r}, {self.place(row)}"
                    raise InputError(f"{place}: not UTF-8, {error}; write the table again with UTF-8 strings") from error
            raise


@dataclass(frozen=True)
class InputTable:
    """A table.

    Attributes:
        columns: our names of the columns to read, if present.
        required: our names of the required columns.
        renamed: pairs (our name, the table's name) of columns, where they differ.
    """

    folder: Folder
    name: str
    columns: tuple[str, ...]
    required: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    dialect: Dialect = AUTO_DIALECT

    def batches(self, part: Range | None = None) -> Iterator[TableBatch]:
        """Yield batches of some thousand rows of the table or of one of its `ranges`.

        Rows before an error are yielded first. Places count from the start of the range.

        Raises:
            InputError: the table lacks a column or is damaged.
            UsageError: the extension is unknown.
        """
        kind = type_of(self.name)
        if kind == "parquet":
            return self._parquet_batches(part)
        return self._csv_batches(part) if kind in _DELIMITERS else self._json_batches(part)

    def rows(self) -> Iterator[InputRow]:
        """Yield the rows one by one, see `batches`."""
        return (row for batch in self.batches() for row in batch)

    def ranges(self) -> list[Range]:
        """Return the ranges of a large table; empty for a table to be read whole."""
        entry = self.folder.stat(self.name)
        if entry is None or entry.size <= RANGE_BYTES or self.name.endswith(".gz"):
            return []
        try:
            return list(_table_ranges(self, entry))
        except (InputError, pa.ArrowException, OSError):
            return []  # Reading it fails with the reason.

    @property
    def _location(self) -> str:
        return self.folder.path_of(self.name)

    @property
    def _names(self) -> dict[str, str]:
        """The table's names of the columns, by ours."""
        return {ours: ours for ours in self.columns} | dict(self.renamed)

    def _resolve(self, header: list[str]) -> dict[str, str]:
        """Return the table's names of the present columns, by ours."""
        resolved, names, renamed = {}, self._names, dict(self.renamed)
        for ours in self.columns:
            theirs = names[ours]
            if theirs in header:
                if header.count(theirs) > 1:
                    raise InputError(f"{self._location!r} has {header.count(theirs)} columns {theirs!r}: rename all but one")
                resolved[ours] = theirs
            elif ours in self.required or ours in renamed:
                advice = f"write the columns as {ours}={theirs},... with one of these names"
                if ours not in renamed:
                    advice = f"name them, such as --columns {','.join(f'{name}=...' for name in self.required)}"
                    if type_of(self.name) in _DELIMITERS:
                        advice += ", or write a line with names above the rows if this is the first row"
                raise InputError(
                    f"{self._location!r} has no column {theirs!r}; its columns are {', '.join(map(repr, header))}: {advice}"
                )
        return resolved

    def delimiter(self, head: Iterable[tuple[int, str]]) -> str:
        """Return the delimiter of CSV or TSV, by its `header_lines`."""
        names = self._names
        wanted = {names[ours] for ours in (*self.required, *dict(self.renamed))}
        return self.dialect.delimiter or find_delimiter([line for _, line in head], _DELIMITERS[type_of(self.name)], wanted)

    def _csv_batches(self, part: Range | None) -> Iterator[TableBatch]:
        location, quoting = self._location, self.dialect.quoting
        numbered = enumerate(self._lines(header_lines, part), start=1)
        head = list(header_lines(numbered))
        if not head:
            raise InputError(f"{location!r} is empty: expected a line with the names of the columns")
        delimiter = self.delimiter(head)
        rows = split_rows(chain(head[-1:], numbered), delimiter, quoting, location)
        header = next(rows)[1]
        if len(header) == 1:
            raise InputError(
                f"{location!r} has a single column, {header[0]!r}, with {delimiter!r} as the delimiter: "
                "name the right one, e.g. --delimiter ':'"
            )
        names = self._resolve(header)
        positions = {ours: header.index(theirs) for ours, theirs in names.items()}

        def checked() -> Iterator[tuple[int, list[str]]]:
            row_number = 0
            for row_number, (line, row) in enumerate(rows, start=1):
                if len(row) != len(header):
                    advice = "a delimiter or line end inside a value needs quotes around the value"
                    if quoting == "none":
                        advice = "without quoting, no value can hold a delimiter or line end: "
                        advice += "leave out --quoting none if values are quoted"
                    raise InputError(
                        f"{location!r}, {_ROW.format(row_number, line)}: {len(row)} columns, expected the "
                        f"{len(header)} of the header, with {delimiter!r} as the delimiter; {advice}"
                    )
                yield line, row
            if not row_number and part is None:
                raise InputError(
                    f"{location!r} has no rows below its header: check the program that wrote it, or name another file"
                )

        def columns(rows: Sequence[list[str]]) -> dict[str, ColumnValues]:
            transposed = list(zip(*rows, strict=True))
            return {ours: transposed[position] for ours, position in positions.items()}

        return self._text_batches(checked(), columns, names, _ROW)

    def _json_batches(self, part: Range | None) -> Iterator[TableBatch]:
        numbered = (
            (line_number, line) for line_number, line in enumerate(self._lines(_first_object, part), start=1) if line.strip()
        )
        first = next(numbered, None)
        if first is None:
            raise InputError(f"{self._location!r} is empty: expected one JSON object per line")
        resolved = self._resolve(list(self._json_row(first[1], first[0])))
        names = self._names
        is_inside = part is not None and part[0] > 0  # The first line is that of the table.

        wanted, present = set(names.values()), set(resolved.values())

        def checked() -> Iterator[tuple[int, dict[str, Any]]]:
            for line_number, line in numbered if is_inside else chain((first,), numbered):
                row = self._json_row(line, line_number)
                if wanted.intersection(row) != present:
                    theirs = next(theirs for theirs in names.values() if (theirs in row) != (theirs in present))
                    raise InputError(
                        f"{self._location!r}, line {line_number}: {'lacks' if theirs in present else 'has'} "
                        f"{theirs!r}, unlike the first line; all lines need the same columns"
                    )
                yield line_number, row

        def columns(rows: Sequence[dict[str, Any]]) -> dict[str, ColumnValues]:
            return {ours: [row[theirs] for row in rows] for ours, theirs in resolved.items()}

        return self._text_batches(checked(), columns, resolved, "line {1}")

    def _text_batches(
        self,
        rows: Iterator[tuple[int, Any]],
        columns: Callable[[Sequence[Any]], dict[str, ColumnValues]],
        names: Mapping[str, str],
        place: str,
    ) -> Iterator[TableBatch]:
        """Yield batches of rows; `place` is a format string for row and line."""
        done, failure, is_last = 1, None, False  # The header of CSV is row 0.
        while not is_last and failure is None:
            lines: list[int] = []
            values: list[Any] = []
            try:
                for line, row in islice(rows, _BATCH_ROWS):
                    lines.append(line)
                    values.append(row)
            except InputError as error:  # Unmatched quotes, invalid UTF-8, a truncated file.
                failure = error
            if values:
                at = partial(lambda first, lines, row: place.format(first + row, lines[row]), done, lines)
                yield TableBatch(self._location, columns(values), len(values), at, names)
            done, is_last = done + len(values), len(values) < _BATCH_ROWS
        if failure is not None:
            raise failure

    def _lines(
        self, head: Callable[[Iterable[tuple[int, str]]], Iterable[tuple[int, str]]], part: Range | None
    ) -> Iterator[str]:
        """Yield the lines of the table, or its header lines and those of a range."""
        if part is None:
            return read_lines(self.folder, self.name)
        start, stop = part
        lines = read_lines(self.folder, self.name, start=start, stop=stop)
        if not start:
            return lines
        return chain((line for _, line in head(enumerate(read_lines(self.folder, self.name)))), lines)

    def _json_row(self, line: str, line_number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            advice = LONE_CR if "\r" in line else _ARRAY if line.startswith("[") else "each line must hold one whole object"
            raise InputError(f"{self._location!r}, line {line_number}: not JSON, {error}; {advice}") from error
        if not isinstance(row, dict):
            advice = f"; {_ARRAY}" if isinstance(row, list) else ""
            raise InputError(
                f"{self._location!r}, line {line_number}: found {line[:80]!r}, expected a JSON object such as {{...}}{advice}"
            )
        return row

    def _parquet_batches(self, part: Range | None) -> Iterator[TableBatch]:
        location = self._location
        done = 0
        with open_seekable(self.folder, self.name) as stream:
            try:
                # With a buffer, pages are read one by one; without it, whole column chunks.
                table = ShardRows(stream, location, check_text=False, buffer_size=_BUFFER_BYTES, pre_buffer=False)
                columns = self._resolve(table.schema.names)
                names = list(dict.fromkeys(columns.values()))
                groups = None if part is None else list(range(*part))
                for batch in table.batches(names, _BATCH_ROWS, groups):
                    values = {ours: batch.column(theirs) for ours, theirs in columns.items()}
                    at = partial(lambda first, row: f"row {first + row}", done + 1)
                    yield TableBatch(location, values, batch.num_rows, at, columns)
                    done += batch.num_rows
                if not done and part is None:
                    raise InputError(f"{location!r} has no rows: check the program that wrote it, or name another file")
            except (pa.ArrowException, OSError) as error:
                raise InputError(
                    f"{location!r} is not a whole Parquet file (after {done} rows): {error}; write it again"
                ) from error


def check_columns(columns: Iterable[str], known: Sequence[str]) -> None:
    """Check our names of columns.

    Raises:
        UsageError: a name is unknown.
    """
    unknown = sorted(set(columns) - set(known))
    if unknown:
        raise UsageError(
            f"unknown column {unknown[0]!r}: ours are {', '.join(known)}; write OURS=THEIRS, such as 'image_id=file'"
        )


def check_dialect(name: str, dialect: Dialect) -> None:
    """Check that only CSV and TSV have an explicit dialect.

    Raises:
        UsageError: another file has one.
    """
    if dialect != AUTO_DIALECT and type_of(name) not in _DELIMITERS:
        raise UsageError(f"--delimiter and --quoting are for CSV and TSV, but the table is {name!r}: leave them out")


def is_table(name: str) -> bool:
    """Return whether a file name has the extension of a table."""
    try:
        type_of(name)
    except UsageError:
        return False
    return True


def type_of(name: str) -> str:
    """Return the extension of a table, without ``.gz``.

    Raises:
        UsageError: the extension is unknown.
    """
    stem = name.removesuffix(".gz")
    kind = stem.rpartition(".")[2].lower() if "." in stem else ""
    if kind not in (*_TEXT_TYPES, "parquet") or (kind == "parquet" and stem != name):
        raise UsageError(
            f"cannot tell how to read the table {name!r}: expected a name that ends in "
            f"{', '.join('.' + known for known in _TEXT_TYPES)} (or these with .gz) or .parquet"
        )
    return kind


def _first_object(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    return islice(((line_number, line) for line_number, line in lines if line.strip()), 1)


@lru_cache(maxsize=8)
def _table_ranges(table: InputTable, entry: FileInfo) -> tuple[Range, ...]:
    """Return the ranges of a table's version; a run needs them several times."""
    folder, name = table.folder, table.name
    kind = type_of(name)
    if kind == "parquet":
        return tuple(_row_groups(folder, name))
    if kind in _DELIMITERS and table.dialect.quoting != "none":
        delimiter = table.delimiter(header_lines(enumerate(read_lines(folder, name), start=1)))
        if _has_quoted_values(folder, name, delimiter.encode()):
            return ()
    return tuple((start, min(start + RANGE_BYTES, entry.size)) for start in range(0, entry.size, RANGE_BYTES))


def _row_groups(folder: Folder, name: str) -> Iterator[Range]:
    with open_seekable(folder, name) as stream:
        metadata = pq.ParquetFile(stream).metadata
        start = size = 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            if size >= RANGE_BYTES or group == metadata.num_row_groups - 1:
                yield start, group + 1
                start, size = group + 1, 0


def _has_quoted_values(folder: Folder, name: str, delimiter: bytes) -> bool:
    """Return whether the file, a line or a value begins with a quote."""
    with open_input(folder, name) as stream:
        last = b"\n"
        while chunk := stream.read(_CHUNK):
            text = last + chunk
            if b'\n"' in text or delimiter + b'"' in text or b'\xef\xbb\xbf"' in text:
                return True
            last = text[-len(delimiter) :]
    return False

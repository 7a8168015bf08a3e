"""One table of captions, see `pipelines.inputs.tables`.

The columns ``image_id`` and ``text`` are required; ``language``, ``portion``, ``index`` and ``split`` are optional. `columns` maps
our names to the table's. Whole columns are checked; only for unusual values, rows are checked one by one.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.captions.base import (
    CAPTION_COLUMNS,
    COMPARABLE,
    EVERYTHING,
    CaptionSource,
    Part,
    RawCaption,
    Selection,
    check_label,
    check_text,
    record_labels,
    require_selected,
    tables_of,
)
from pipelines.inputs.dialects import Dialect
from pipelines.inputs.files import kind_of, list_files
from pipelines.inputs.tables import InputTable, TableBatch, check_dialect, type_of
from schemas.errors import InputError, UsageError
from schemas.keys import CONTROLS, check_image_id, check_language
from schemas.storage.folder import Folder, file_at

TABLE_COLUMNS = ("image_id", "text", "language", "portion", "index", "split")

_LIST = r"""(?s)^\s*\[\s*["'].*["']\s*\]\s*$"""
_REQUIRED = ("image_id", "text")
_MAX_INDEX = 32767
_SPLIT = "train"
_NO_ID = f"^$|[{CONTROLS}]"
_UNUSUAL = (InputError, UnicodeEncodeError, OverflowError, pa.ArrowException)


@dataclass(frozen=True)
class TableSource(CaptionSource):
    """The captions of one table."""

    folder: Folder
    table: InputTable
    language: str
    ids = "name"

    @classmethod
    def open(cls, location: str, *, language: str, columns: Mapping[str, str], dialect: Dialect) -> Self:
        """Open the file.

        Raises:
            InputError: it is a folder.
            UsageError: its extension is unknown, or it has a dialect but is neither CSV nor TSV.
        """
        if kind_of(location) == "folder":
            listed = ", ".join(map(repr, list_files(Folder(location))[:10])) or "no files"
            raise InputError(f"{location!r} is a folder, expected one table; it holds {listed}: name the file to read")
        folder, name = file_at(location)
        type_of(name)
        check_dialect(name, dialect)
        table = InputTable(folder, name, TABLE_COLUMNS, _REQUIRED, tuple(sorted(columns.items())), dialect)
        return cls(folder, table, language)

    def parameters(self) -> dict[str, Any]:
        """Return the default language, the columns and the explicit dialect."""
        delimiter, quoting = self.table.dialect.delimiter, self.table.dialect.quoting
        dialect = {"delimiter": delimiter} if delimiter else {}
        dialect |= {"quoting": "none"} if quoting == "none" else {}
        return {**super().parameters(), "columns": dict(self.table.renamed), **dialect}

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part, the file, or its ranges if it is large.

        A selection is checked against the whole file, so one worker reads it.
        """
        ranges = self.table.ranges() if selection == EVERYTHING else []
        return [Part(name=self.table.name, range=part) for part in ranges] or [Part(name=self.table.name)]

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions row by row."""
        for table in self.tables(part, selection):
            for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
                yield RawCaption(*row)

    def tables(self, part: Part, selection: Selection) -> Iterator[pa.Table]:
        """Yield the captions, by column unless a value is unusual."""
        try:
            yield from self._tables(part, selection)
        except InputError:
            if part.range:  # Row numbers count from its start: find the error in the whole table.
                deque(self._tables(replace(part, range=()), selection), maxlen=0)
            raise

    def _tables(self, part: Part, selection: Selection) -> Iterator[pa.Table]:
        location, seen = self.folder.path_of(part.name), set[tuple[str, str, str]]()
        start, stop = part.range or (0, 0)
        is_first = not start
        for batch in self.table.batches((start, stop) if part.range else None):
            whole = self._table(batch)
            captions = (self._caption(values, place=f"{batch.location!r}, {row}") for row, values in batch)
            for table in tables_of(captions) if whole is None else (whole,):
                if is_first:
                    _check_lists(table["text"].drop_null(), batch)
                    is_first = not table.num_rows
                kinds = pc.binary_join_element_wise(table["language"], table["portion"], table["split"], "/")
                for kind in kinds.unique().to_pylist():
                    language, portion, split = kind.split("/")  # They have no slash.
                    record_labels(seen, (language, portion, split), location=location)
                yield _selected(table, selection)
        if not part.range:
            require_selected(selection, seen, location=location)

    def _table(self, batch: TableBatch) -> pa.Table | None:
        """Return the captions of a batch; None if a value is unusual."""
        columns = {name: pa.repeat(value, batch.rows) for name, value in {**self._defaults, "index": -1}.items()}
        try:
            for name, values in batch.columns.items():
                column = values if isinstance(values, pa.Array) else pa.array(values)
                match name:
                    case "image_id":
                        columns[name] = _image_ids(column)
                    case "text":
                        columns[name] = _texts(column, nullable=True)
                    case "index":
                        columns[name] = _indices(column)
                    case _:
                        columns[name] = _labels(column, name)
        except _UNUSUAL:
            return None
        return pa.table({name: columns[name] for name in CAPTION_COLUMNS.names}, schema=CAPTION_COLUMNS)

    @property
    def _defaults(self) -> dict[str, str]:
        return {"language": self.language, "portion": COMPARABLE, "split": _SPLIT}

    def _caption(self, values: dict[str, Any], *, place: str) -> RawCaption:
        """Check the values of one row."""
        for ours, value in values.items():
            if value is None and ours != "text":
                raise InputError(f"{place}: {ours!r} is missing; fill it in or remove the row")
        image_id = values["image_id"]
        if type(image_id) is int:  # COCO's image numbers. A bool is not one.
            image_id = str(image_id)
        kinds = {
            name: _check_kind(values[name], ours=name, place=place) if name in values else default
            for name, default in self._defaults.items()
        }
        return RawCaption(
            image_id=check_image_id(image_id, place=place),
            index=_check_index(values["index"], place=place) if "index" in values else -1,
            text=None if values["text"] is None else check_text(values["text"], place=place),
            **kinds,
        )


def _check_kind(value: object, *, ours: str, place: str = "") -> str:
    """Return a language in its usual case, or a portion or split as it is."""
    label = check_label(value, ours=ours, place=place)
    try:
        return check_language(label) if ours == "language" else label
    except UsageError as error:
        raise InputError(f"{place}: the language {error}") from error


def _check_lists(texts: pa.ChunkedArray, batch: TableBatch) -> None:
    """Check that the first captions are not all lists in the form of text, as in CSV."""
    if len(texts) and pc.all(pc.match_substring_regex(texts, _LIST)).as_py():
        name, example = batch.names["text"], texts[0].as_py()[:80]
        raise InputError(
            f"{batch.location!r}, column {name!r}: every text is a list, such as {example!r}, expected one caption a row; "
            "with pandas: table['text'] = table['text'].map(ast.literal_eval), then table.explode('text')"
        )


def _selected(table: pa.Table, selection: Selection) -> pa.Table:
    for name, values in (("language", selection.languages), ("portion", selection.portions), ("split", selection.splits)):
        if values:
            table = table.filter(pc.is_in(table[name], pa.array(values, pa.string())))
    return table


def _check_index(value: object, *, place: str) -> int:
    """Return an index as an integer; text tables write it in digits."""
    index = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value) else value
    if type(index) is not int or not 0 <= index <= _MAX_INDEX:
        raise InputError(f"{place}: 'index' is {value!r}, expected an integer from 0 to {_MAX_INDEX}")
    return index


# --- columns; an error of `_UNUSUAL` leaves a batch to the checks of rows --------------------------------------------


def _texts(column: pa.Array, *, nullable: bool = False) -> pa.Array:
    """Return the strings of a column."""
    dtype = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)) or (column.null_count and not nullable):
        raise pa.ArrowInvalid("expected strings")
    strings = column.cast(pa.string())
    strings.validate(full=True)  # Parquet may hold strings that are not UTF-8.
    return strings


def _image_ids(column: pa.Array) -> pa.Array:
    """Return image ids as strings."""
    ids = _texts(column.cast(pa.string()) if pa.types.is_integer(column.type) else column)
    if pc.any(pc.match_substring_regex(ids, _NO_ID)).as_py():
        raise pa.ArrowInvalid("expected image ids")
    return ids


def _labels(column: pa.Array, ours: str) -> pa.Array:
    """Return checked languages, portions or splits."""
    encoded = _texts(column).dictionary_encode()
    checked = [_check_kind(value, ours=ours) for value in encoded.dictionary.to_pylist()]
    return pa.array(checked, pa.string()).take(encoded.indices)


def _indices(column: pa.Array) -> pa.Array:
    """Return indices, integers or digits, as int16."""
    if not pa.types.is_integer(column.type):
        column = _texts(column)
        if not pc.all(pc.match_substring_regex(column, r"^[0-9]{1,9}$")).as_py():
            raise pa.ArrowInvalid("expected digits")
        column = column.cast(pa.int64())
    if column.null_count or pc.any(pc.less(column, 0)).as_py():
        raise pa.ArrowInvalid("expected indices from 0")
    return column.cast(pa.int16())

"""One table of captions: CSV, TSV or JSON lines, plain or ``.gz``, or Parquet, by the file's extension.

The columns ``image_id`` and ``text`` are required; ``language``, ``portion``, ``index`` and ``split`` are optional. If the table
calls them something else, `columns` maps our names to its names. Other columns are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.inputs.captions.base import (
    COMPARABLE,
    EVERYTHING,
    CaptionSource,
    Part,
    RawCaption,
    Selection,
    Tally,
    check_image_id,
    check_label,
    check_text,
    find_files,
)
from pipelines.inputs.files import inventory, kind_of, list_files
from pipelines.inputs.tables import read_rows, type_of
from schemas.errors import InputError, UsageError
from schemas.keys import check_language
from schemas.storage import Folder

__all__ = ["TABLE_COLUMNS", "TableSource"]

TABLE_COLUMNS = ("image_id", "text", "language", "portion", "index", "split")

_REQUIRED = ("image_id", "text")
_MAX_INDEX = 32767


@dataclass(frozen=True)
class TableSource(CaptionSource):
    """The captions of one table.

    Attributes:
        folder: the folder of the file.
        name: the file.
        language: language of all captions if the table has no such column.
        columns: pairs (our name, the table's name) of columns, where they differ.
    """

    folder: Folder
    name: str
    language: str
    columns: tuple[tuple[str, str], ...] = ()

    @classmethod
    def open(cls, location: str, *, language: str, columns: Mapping[str, str]) -> TableSource:
        """Open the file.

        Raises:
            InputError: it is a folder.
            UsageError: its extension is unknown.
        """
        if kind_of(location) == "folder":
            listed = ", ".join(map(repr, list_files(Folder(location))[:10])) or "no files"
            raise InputError(f"{location!r} is a folder, expected one table; it holds {listed}: name the file to read")
        folder, (name,) = find_files(location, ".*", hint="table")
        type_of(name)
        return cls(folder, name, language, tuple(sorted(columns.items())))

    def parameters(self) -> dict[str, Any]:
        """Return the default language and the names of the table's columns."""
        return {"default_language": self.language, "columns": dict(self.columns)}

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part, the file. Its content becomes known only by reading it."""
        return [Part(name=self.name)]

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions row by row."""
        location = self.folder.path_of(part.name)
        tally = Tally(location)
        for row, values in read_rows(
            self.folder, part.name, columns=TABLE_COLUMNS, required=_REQUIRED, renamed=dict(self.columns)
        ):
            caption = self._caption(values, place=f"{location!r}, {row}")
            tally.add((caption.language, caption.portion, caption.split))
            if selection.takes(caption.language, caption.portion, caption.split):
                yield caption
        tally.require(selection)

    def inputs(self, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
        """Return the one file, whatever is selected."""
        return inventory(self.folder, [self.name])

    def _caption(self, values: dict[str, Any], *, place: str) -> RawCaption:
        """Check the values of one row."""
        for ours, value in values.items():
            if value is None:
                raise InputError(f"{place}: {ours!r} is missing; fill it in or remove the row")
        image_id = values["image_id"]
        if type(image_id) is int:  # Some tables store COCO's image numbers. A bool is not one.
            image_id = str(image_id)
        language = self.language
        if "language" in values:
            try:
                language = check_language(check_label(values["language"], ours="language", place=place))
            except UsageError as error:
                raise InputError(f"{place}: the language {error}") from error
        return RawCaption(
            image_id=check_image_id(image_id, place=place),
            language=language,
            portion=check_label(values.get("portion", COMPARABLE), ours="portion", place=place),
            index=_check_index(values["index"], place=place) if "index" in values else -1,
            split=check_label(values.get("split", "train"), ours="split", place=place),
            text=check_text(values["text"], place=place),
        )


def _check_index(value: object, *, place: str) -> int:
    """Return an index as an integer; text tables write it in digits."""
    number = value
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        number = int(value)
    if type(number) is not int or not 0 <= number <= _MAX_INDEX:
        raise InputError(f"{place}: the index is {value!r}, expected an integer from 0 to {_MAX_INDEX}")
    return number

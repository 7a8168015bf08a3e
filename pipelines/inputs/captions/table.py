"""One table of captions: CSV, TSV, JSON lines or Parquet, told by the file's extension; the text ones plain or ``.gz``.

Needed are the columns ``image_id`` and ``text``; ``language``, ``portion``, ``index`` and ``split`` may be there. Whatever the
table calls them, `columns` maps our names to its. Other columns are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.inputs.captions.base import (
    COMPARABLE,
    EVERYTHING,
    TABLE_COLUMNS,
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
from pipelines.inputs.files import InputFolder, inventory, kind_of
from pipelines.inputs.tables import read_rows, type_of
from schemas.errors import InputError, UsageError
from schemas.keys import check_language

__all__ = ["TableSource"]

_REQUIRED = ("image_id", "text")
_MAX_INDEX = 32767


@dataclass(frozen=True)
class TableSource(CaptionSource):
    """The captions of one table.

    Attributes:
        folder: the folder of the file.
        name: the file.
        language: language of all captions, where the table has no such column.
        columns: pairs (our name, the table's name) of a column, where they differ.
    """

    folder: InputFolder
    name: str
    language: str
    columns: tuple[tuple[str, str], ...] = ()

    @classmethod
    def open(cls, location: str, *, language: str, columns: Mapping[str, str]) -> TableSource:
        """Takes the file.

        Raises:
            InputError: it is a folder.
            UsageError: its extension is none that we know.
        """
        if kind_of(location) == "folder":
            there = ", ".join(map(repr, InputFolder(location).names()[:10])) or "no files"
            raise InputError(f"{location!r} is a folder, expected one table; it holds {there}: name the file to read")
        folder, (name,) = find_files(location, ".*", hint="table")
        type_of(name)
        return cls(folder, name, language, tuple(sorted(columns.items())))

    def parameters(self) -> dict[str, Any]:
        """The language where the table says none, and how its columns are called."""
        return {"default_language": self.language, "columns": dict(self.columns)}

    def parts(self, selection: Selection) -> list[Part]:
        """One part, the file. What it holds only reading tells."""
        return [Part(name=self.name)]

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Streams the rows."""
        where = self.folder.where(part.name)
        tally = Tally(where)
        for row, values in read_rows(
            self.folder, part.name, columns=TABLE_COLUMNS, required=_REQUIRED, renamed=dict(self.columns)
        ):
            caption = self._caption(values, place=f"{where!r}, {row}")
            tally.add((caption.language, caption.portion, caption.split))
            if selection.takes(caption.language, caption.portion, caption.split):
                yield caption
        tally.require(selection)

    def inputs(self, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
        """The one file, whatever is selected."""
        return inventory(self.folder, [self.name])

    def _caption(self, values: dict[str, Any], *, place: str) -> RawCaption:
        """Checks the values of one row."""
        for ours, value in values.items():
            if value is None:
                raise InputError(f"{place}: {ours!r} is missing; fill it in or take the row out")
        image_id = values["image_id"]
        if type(image_id) is int:  # as some tables store the numbers of COCO; True is no number
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
    """An index is an integer; text tables write it in digits."""
    number = value
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        number = int(value)
    if type(number) is not int or not 0 <= number <= _MAX_INDEX:
        raise InputError(f"{place}: the index is {value!r}, expected an integer from 0 to {_MAX_INDEX}")
    return number

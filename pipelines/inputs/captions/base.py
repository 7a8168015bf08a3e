"""What the readers of raw captions share: the row, the unit of reading, the selection, checks, and opening by format.

No Beam in here. A source is a small frozen value that travels to the workers; it holds no open file. The launcher asks it for
its parts (listing only), a worker reads one part as a stream. Every value is handed over as it was read.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipelines.inputs.files import InputFolder, kind_of, locate
from schemas.errors import InputError, UsageError
from schemas.keys import check_language

__all__ = [
    "COMPARABLE",
    "EVERYTHING",
    "FORMATS",
    "TABLE_COLUMNS",
    "TRANSLATION",
    "CaptionSource",
    "Part",
    "RawCaption",
    "Selection",
    "Tally",
    "check_image_id",
    "check_label",
    "check_text",
    "find_files",
    "image_id_of",
    "open_source",
    "parse_columns",
    "require_selected",
]

COMPARABLE = "comparable"
TRANSLATION = "translation"
FORMATS = ("multi30k", "karpathy", "coco", "table")
TABLE_COLUMNS = ("image_id", "text", "language", "portion", "index", "split")

_MAX_TALLY = 10_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class RawCaption(NamedTuple):
    """One caption as read.

    Attributes:
        image_id: key of the image.
        language: BCP 47 tag in its usual case.
        portion: `COMPARABLE`, `TRANSLATION`, or as a table names it.
        index: position among the image's captions of this language and portion; -1 = number them by order of appearance.
        split: as named by the source.
        text: the sentence, exactly as it stands in the file.
    """

    image_id: str
    language: str
    portion: str
    index: int  # type: ignore[assignment]  # hides `tuple.index`, which a row of captions has no use for
    split: str
    text: str


@dataclass(frozen=True, order=True)
class Part:
    """What one worker reads at a time. An empty string or -1 stands for "given row by row in the file".

    Attributes:
        name: the file with the captions, relative to the source's folder.
        images: the file that names the image of each line, where there is one.
        language: language of all captions.
        portion: portion of all captions.
        split: split of all captions.
        index: index of all captions.
    """

    name: str
    images: str = ""
    language: str = ""
    portion: str = ""
    split: str = ""
    index: int = -1


@dataclass(frozen=True)
class Selection:
    """Which captions to read; an empty tuple means all.

    Attributes:
        languages: BCP 47 tags, brought to their usual case.
        portions: portions.
        splits: splits, as named by the source.

    Raises:
        UsageError: a language is not a BCP 47 tag.
    """

    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "languages", tuple(check_language(tag) for tag in self.languages))

    def takes(self, language: str, portion: str, split: str) -> bool:
        """Whether captions of this kind are selected."""
        return (
            (not self.languages or language in self.languages)
            and (not self.portions or portion in self.portions)
            and (not self.splits or split in self.splits)
        )


EVERYTHING = Selection()


class CaptionSource(ABC):
    """A collection of raw captions on disk: a frozen, picklable value."""

    def parameters(self) -> dict[str, Any]:
        """What beside the files changes the captions, as plain JSON values for a manifest."""
        return {}

    @abstractmethod
    def parts(self, selection: Selection) -> list[Part]:
        """Lists what there is to read, in a fixed order. Cheap: looks at names, not into the captions.

        Raises:
            InputError: something selected is not there, as far as names tell.
        """

    @abstractmethod
    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Streams the selected captions of one part, in the order of the file.

        Raises:
            InputError: the file is broken; or, where only the rows tell, something selected was not there (at the end).
        """

    @abstractmethod
    def inputs(self, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
        """``name`` (relative), ``bytes`` and ``sha256`` of every file that is read for a selection, sorted by name."""


class Tally:
    """The kinds of caption (language, portion, split) that were seen while reading; their number is bounded."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: set[tuple[str, str, str]] = set()

    def add(self, kind: tuple[str, str, str]) -> None:
        """Notes one kind.

        Raises:
            InputError: there are far too many kinds for them to be languages, portions and splits.
        """
        if kind in self._seen:
            return
        if len(self._seen) >= _MAX_TALLY:
            raise InputError(
                f"{self._where!r} has more than {_MAX_TALLY} combinations of language, portion and split, the latest {kind!r}: "
                f"is one of them read from the wrong column?"
            )
        self._seen.add(kind)

    def require(self, selection: Selection) -> None:
        """Raises InputError when something selected was not seen."""
        require_selected(selection, self._seen, where=self._where)


def require_selected(selection: Selection, kinds: Iterable[tuple[str, str, str]], *, where: str) -> None:
    """Checks that every value of a selection meets captions, given the rest of the selection.

    Args:
        selection: what was asked for.
        kinds: the (language, portion, split) that there are.
        where: name of the source, for the message.

    Raises:
        InputError: a value meets none; the message names the values that there are.
    """
    kinds = set(kinds)
    wanted = (selection.languages, selection.portions, selection.splits)
    nouns = ("in language", "of portion", "of split")
    for narrowed in (False, True):
        for field, noun in enumerate(nouns):
            others = [(i, values) for i, values in enumerate(wanted) if narrowed and values and i != field]
            there = {kind[field] for kind in kinds if all(kind[i] in values for i, values in others)}
            for value in wanted[field]:
                if value not in there:
                    rest = "".join(f" {nouns[i]} {' or '.join(values)}" for i, values in others)
                    listed = f"there are {', '.join(sorted(there))}" if there else "there are none of any"
                    raise InputError(f"no captions {noun} {value!r}{rest} in {where!r}: {listed}; change the selection")


def check_image_id(image_id: object, *, place: str) -> str:
    """Checks that an image id is a non-empty string without control characters.

    Raises:
        InputError: it is not; `place` says where it was read.
    """
    if not isinstance(image_id, str):
        raise InputError(f"{place}: the image id is {image_id!r}, expected a string")
    if not image_id:
        raise InputError(f"{place}: the image id is empty; every caption needs the id of its image")
    if (match := _CONTROL.search(image_id)) is not None:
        advice = "the lines end in CR LF; convert them to LF" if image_id.endswith("\r") else "take it out of the file"
        raise InputError(f"{place}: the image id {image_id!r} has the control character {match[0]!r}; {advice}")
    return image_id


def image_id_of(file_name: object, *, place: str) -> str:
    """Image id of an image's file name: its last component without the extension."""
    name = check_image_id(file_name, place=place).rpartition("/")[2]
    image_id = name.rpartition(".")[0] or name
    return image_id or check_image_id(image_id, place=place)


def check_label(value: object, *, ours: str, place: str) -> str:
    """Checks the name of a portion, split or language as it stands in a row: not empty, no control character, and no ``/``,
    which separates the parts of a key.

    Raises:
        InputError: it is none; `place` says where it was read.
    """
    if not isinstance(value, str) or not value or "/" in value or _CONTROL.search(value) is not None:
        raise InputError(
            f"{place}: {ours!r} is {value!r}, expected a name such as 'train', without '/'; "
            "fill it in, or leave the whole column out"
        )
    return value


def check_text(text: object, *, place: str) -> str:
    """Checks that a caption is a string that can be written as UTF-8. An empty one is let through.

    Raises:
        InputError: it is missing, no string, or holds half a surrogate pair.
    """
    if not isinstance(text, str):
        raise InputError(f"{place}: the text of the caption is {text!r}, expected a string; mend the row or take it out")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place}: the text {text!r} has half a surrogate pair, {text[error.start]!r}, which is no character; "
            f"write the JSON again from the original text"
        ) from error
    return text


def find_files(path: str | os.PathLike[str], pattern: str, *, hint: str) -> tuple[InputFolder, list[str]]:
    """A file, or all files in a folder whose name matches; either way as a folder and names in it.

    Args:
        path: the file or folder; it is there.
        pattern: regular expression of the whole name; it only filters what stands in a folder.
        hint: how such files are called, for the message.

    Raises:
        InputError: the folder holds no such file.
    """
    location = locate(path)
    if kind_of(location) == "file":
        parent, _, name = location.rpartition("/")
        return InputFolder(parent or "/"), [name]
    folder = InputFolder(location)
    names = [name for name in folder.names() if re.fullmatch(pattern, name)]
    if not names:
        there = ", ".join(map(repr, folder.names()[:10])) or "no files"
        raise InputError(f"no {hint} in {location!r}; it holds {there}. Name the file itself, or the folder that holds it")
    return folder, names


def parse_columns(argument: str) -> dict[str, str]:
    """Parses ``image_id=img,text=caption``: our name of a column, then the table's.

    Raises:
        UsageError: it is of another form, or names a column that we do not have, or names one twice.
    """
    columns: dict[str, str] = {}
    for item in argument.split(","):
        ours, equals, theirs = item.partition("=")
        ours = ours.strip()
        if not (ours and equals and theirs):
            raise UsageError(
                f"cannot understand {item!r} in the columns {argument!r}: write OURS=THEIRS with commas between, "
                f"such as 'image_id=img,text=caption'"
            )
        if ours in columns:
            raise UsageError(f"the columns {argument!r} name {ours!r} twice: keep one")
        columns[ours] = theirs
    _check_columns(columns)
    return columns


def open_source(
    format: str,  # noqa: A002 -- the word of the command line
    path: str | os.PathLike[str],
    *,
    language: str = "en",
    columns: Mapping[str, str] | None = None,
) -> CaptionSource:
    """Opens a collection of captions.

    Args:
        format: one of `FORMATS`.
        path: local path, ``gs://`` or ``s3://`` of the file or folder.
        language: language of the captions where the files do not say it.
        columns: for a table, our name -> the table's name of a column.

    Raises:
        UsageError: the format, language or columns make no sense.
        InputError: there is nothing at `path`, or not what the format expects.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown format of captions {format!r}: use one of {', '.join(FORMATS)}")
    if columns and format != "table":
        raise UsageError(f"columns {dict(columns)!r} were given for the format {format!r}: only a 'table' has columns")
    _check_columns(columns or {})
    language = check_language(language)
    if format == "multi30k" and language != "en":
        raise UsageError(
            f"a language, {language!r}, was given for the format 'multi30k': its file names say the languages; select some"
        )
    location = locate(path)
    if kind_of(location) == "nothing":
        raise InputError(f"the source {location!r} is not there: check the path")
    # Imported here, because these modules import this one.
    if format == "multi30k":
        from pipelines.inputs.captions.multi30k import Multi30kSource

        return Multi30kSource.open(location)
    if format == "karpathy":
        from pipelines.inputs.captions.karpathy import KarpathySource

        return KarpathySource.open(location, language=language)
    if format == "coco":
        from pipelines.inputs.captions.coco import CocoSource

        return CocoSource.open(location, language=language)
    from pipelines.inputs.captions.table import TableSource

    return TableSource.open(location, language=language, columns=columns or {})


def _check_columns(columns: Mapping[str, str]) -> None:
    unknown = sorted(set(columns) - set(TABLE_COLUMNS))
    if unknown:
        raise UsageError(
            f"unknown column {unknown[0]!r}: ours are {', '.join(TABLE_COLUMNS)}; write OURS=THEIRS, "
            f"such as 'image_id=img,text=caption'"
        )

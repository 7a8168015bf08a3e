"""Base of the caption sources: row, part, selection and checks of values.

A source is a small frozen value without open files. The launcher lists its parts by file name; a worker
streams one part. Every value is passed on exactly as read.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from pipelines.inputs.files import inventory, kind_of, list_files
from pipelines.inputs.ids import IdRule
from schemas.errors import InputError
from schemas.keys import CONTROLS, check_language
from schemas.storage.folder import Folder, file_at

COMPARABLE = "comparable"
TRANSLATION = "translation"

INDEX_ADVICE = "Remove one of them, or leave out the index so that captions are numbered in their order"
RENAME = "rename one of them, here and on the disk, or write a table with ids of your own (--format table)"

_MAX_COMBINATIONS = 10_000
_NO_LABEL = re.compile(f"[/{CONTROLS}\ud800-\udfff]")
TABLE_ROWS = 8000


class RawCaption(NamedTuple):
    """One caption as read.

    Attributes:
        language: BCP 47 tag in its usual case.
        portion: `COMPARABLE`, `TRANSLATION`, or as a table names it.
        index: position among the image's captions of this language and portion; -1: numbered in order of appearance.
        text: the sentence, exactly as in the file; None for a null in a table.
    """

    image_id: str
    language: str
    portion: str
    index: int  # type: ignore[assignment]  # hides `tuple.index`
    split: str
    text: str | None


@dataclass(frozen=True, order=True)
class Part:
    """The unit that one worker reads.

    Attributes:
        name: the file with the captions, relative to the source's folder.
        images: the file with the image of each line; empty without one.
        language, portion, split, index: values of all captions; an empty string or -1: values of each row.
        range: range of a large file, see `pipelines.inputs.tables`; empty for the whole file.
    """

    name: str
    images: str = ""
    language: str = ""
    portion: str = ""
    split: str = ""
    index: int = -1
    range: tuple[int, ...] = ()


CAPTION_COLUMNS = pa.schema([(name, pa.int32() if name == "index" else pa.string()) for name in RawCaption._fields])
"""The columns of raw captions in a table: the attributes of `RawCaption`."""


def tables_of(captions: Iterable[RawCaption]) -> Iterator[pa.Table]:
    """Convert captions to tables of at most `TABLE_ROWS` rows."""
    remaining = iter(captions)
    while rows := list(islice(remaining, TABLE_ROWS)):
        columns = map(list, zip(*rows, strict=True))
        yield pa.table(dict(zip(CAPTION_COLUMNS.names, columns, strict=True)), schema=CAPTION_COLUMNS)


@dataclass(frozen=True)
class Selection:
    """The captions to read; an empty tuple selects all.

    Raises:
        UsageError: a language is not a BCP 47 tag.

    Examples:
        >>> imagepivot.Selection(languages=("EN", "de")).takes("en", "comparable", "train")
        True
    """

    languages: tuple[str, ...] = ()
    portions: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "languages", tuple(check_language(tag) for tag in self.languages))

    def takes(self, language: str, portion: str, split: str) -> bool:
        """Return whether captions of this language, portion and split are selected."""
        pairs = ((language, self.languages), (portion, self.portions), (split, self.splits))
        return all(not values or value in values for value, values in pairs)


EVERYTHING = Selection()


class CaptionSource(ABC):
    """A collection of raw captions in a folder: a frozen, picklable value.

    Attributes:
        language: language of captions without one; empty if every caption has one.
        ids: rule for image ids, of a source with paths.

    Examples:
        >>> source = imagepivot.open_captions("table", "captions.tsv")
        >>> len(source.parts(imagepivot.Selection()))
        1
    """

    folder: Folder
    language: str
    ids: IdRule

    @property
    def location(self) -> str:
        """Location of its files, for messages."""
        return self.folder.location

    @property
    def repeat_advice(self) -> str:
        """Advice for a duplicate caption key, as the end of a message."""
        return INDEX_ADVICE

    def parameters(self) -> dict[str, Any]:
        """Return the options that determine the captions, as JSON values for a manifest."""
        language = {"default_language": self.language} if self.language else {}
        return language | ({} if self.ids == "name" else {"ids": self.ids})

    @abstractmethod
    def parts(self, selection: Selection) -> list[Part]:
        """List the parts to read, in a fixed order, by file names alone.

        Raises:
            InputError: by the file names, a selected value does not exist.
        """

    @abstractmethod
    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions of one of the parts of a selection, in the order of the file.

        Raises:
            InputError: the file is damaged, or a selected value did not occur.
        """

    def tables(self, part: Part, selection: Selection) -> Iterator[pa.Table]:
        """Yield the captions of `read` as tables with the columns `CAPTION_COLUMNS`."""
        return tables_of(self.read(part, selection))

    def inputs(self, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
        """Return ``name``, ``bytes`` and ``sha256`` of each file of a selection."""
        parts = self.parts(selection)
        return inventory(self.folder, [name for part in parts for name in (part.name, part.images) if name])

    def _select(self, parts: Sequence[Part], selection: Selection) -> list[Part]:
        """Return the selected parts, if each part has one language, portion and split.

        Raises:
            InputError: a value of the selection matches no part.
        """
        kinds = {(part.language, part.portion, part.split) for part in parts}
        require_selected(selection, kinds, location=self.folder.location)
        return [part for part in parts if selection.takes(part.language, part.portion, part.split)]


class PathSource(CaptionSource):
    """A source with image ids from file names."""

    @property
    def repeat_advice(self) -> str:
        """Advice for a duplicate caption key, as the end of a message."""
        apart = "make ids of whole paths with --id-rule path, or " if self.ids == "name" else ""
        return (
            "If both describe one image, remove one of them, or read one split with --splits; if they "
            f"describe two, {apart}{RENAME}"
        )


def record_labels(kinds: set[tuple[str, str, str]], kind: tuple[str, str, str], *, location: str) -> None:
    """Add a combination of language, portion and split to those of a file.

    Raises:
        InputError: the file has too many for languages, portions and splits.
    """
    kinds.add(kind)
    if len(kinds) > _MAX_COMBINATIONS:
        raise InputError(
            f"{location!r} has more than {_MAX_COMBINATIONS} combinations of language, portion and split, "
            f"the latest {kind!r}: is one of them read from the wrong column?"
        )


def require_selected(selection: Selection, kinds: Collection[tuple[str, str, str]], *, location: str) -> None:
    """Check that there are captions, and that every value of a selection matches some.

    ``kinds`` holds all combinations of language, portion and split. A value must match alone and together with the others.

    Raises:
        InputError: there are no captions, or a value matches none; the message names the existing values.
    """
    if not kinds:
        raise InputError(f"{location!r} holds no captions: check the program that wrote it, or fetch it again")
    wanted = (selection.languages, selection.portions, selection.splits)
    nouns = ("in language", "of portion", "of split")
    for narrowed in (False, True):
        for field, noun in enumerate(nouns):
            others = [(i, values) for i, values in enumerate(wanted) if narrowed and values and i != field]
            existing = {kind[field] for kind in kinds if all(kind[i] in values for i, values in others)}
            for value in wanted[field]:
                if value not in existing:
                    others_text = "".join(f" {nouns[i]} {' or '.join(values)}" for i, values in others)
                    listed = f"there are {', '.join(sorted(existing))}" if existing else "there are none at all"
                    raise InputError(
                        f"no captions {noun} {value!r}{others_text} in {location!r}: {listed}; change the selection"
                    )


def check_label(value: object, *, ours: str, place: str, advice: str = "fill it in, or leave the whole column out") -> str:
    """Return the name of a portion, split or language.

    Raises:
        InputError: it is not a string, empty, or contains a control character or ``/``, the separator of keys.
    """
    if not isinstance(value, str) or not value or _NO_LABEL.search(value) is not None:
        raise InputError(f"{place}: {ours!r} is {value!r}, expected a name such as 'train', without '/'; {advice}")
    return value


def check_text(text: object, *, place: str) -> str:
    """Return the text of a caption; it may be empty.

    Raises:
        InputError: it is not a string, or contains half a surrogate pair.
    """
    if not isinstance(text, str):
        advice = "correct the row or remove it"
        if isinstance(text, list):
            advice = "write a row for each caption of the list, e.g. with pandas: table.explode('text')"
        raise InputError(f"{place}: 'text' is {text!r}, expected a string; {advice}")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place}: the text {text!r} has half a surrogate pair, {text[error.start]!r}, which is not a "
            "character; write the JSON again from the original text"
        ) from error
    return text


def find_files(location: str, pattern: str, *, hint: str) -> tuple[Folder, list[str]]:
    """Return folder and names of one file, or of a folder's files by a regex.

    Raises:
        InputError: the folder contains no such file; ``hint`` describes the files in the message.
    """
    if kind_of(location) == "file":
        folder, name = file_at(location)
        return folder, [name]
    folder = Folder(location)
    names = list_files(folder)
    matches = [name for name in names if re.fullmatch(pattern, name)]
    if not matches:
        listed = ", ".join(map(repr, names[:10])) or "no files"
        raise InputError(f"no {hint} in {location!r}; it holds {listed}. Name the file itself, or the folder that holds it")
    return folder, matches


def find_splits(location: str, pattern: str, form: str) -> tuple[Folder, dict[str, str]]:
    """Return the folder and the files by split, of one file or of a folder's files.

    The group of the regex is the split; ``form`` describes the names of files in messages.

    Raises:
        InputError: the folder contains none, a file name does not contain a split, or two contain the same.
    """
    folder, names = find_files(location, pattern, hint=repr(form))
    splits: dict[str, str] = {}
    for name in names:
        place, match = repr(folder.path_of(name)), re.fullmatch(pattern, name)
        if match is None:
            raise InputError(f"{place} is not named {form!r}, so its split is unknown: rename it")
        split = check_label(match[1], ours="split", place=place, advice=f"rename it {form!r}")
        if splits.setdefault(split, name) != name:
            raise InputError(f"{splits[split]!r} and {name!r} in {location!r} are the same split: keep one")
    return folder, splits

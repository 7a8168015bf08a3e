"""Lists of duplicates: groups of images or captions, a CSV row per member."""

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from schemas.console.tables import Table
from schemas.errors import InputError
from schemas.fingerprints import sha256_of_bytes
from schemas.storage.folder import file_at
from schemas.text import decode_text

KINDS = ("bytes", "pixels", "hash", "cosine", "text", "words")
"""Kinds of match of images (bytes to cosine) and captions, the strongest first."""


@dataclass(frozen=True)
class Duplicate:
    """Image or caption of a group.

    Attributes:
        kind: strongest match with another member, of `KINDS`.
        similarity: highest similarity of this kind to another member, at most 1.
        split: its split, or several joined by commas; empty if unknown.
        language: language of a caption; empty for an image, as ``portion`` and ``index``.

    Examples:
        >>> imagepivot.Duplicate(0, "hash", 0.98, image_id="img-00", split="train").language
        ''
    """

    group: int
    kind: str
    similarity: float
    image_id: str
    split: str
    language: str = ""
    portion: str = ""
    index: str = ""


_COLUMNS = tuple(item.name for item in fields(Duplicate))


def duplicates_csv(duplicates: Iterable[Duplicate]) -> str:
    """Return a list as CSV."""
    return Table(_COLUMNS, [astuple(duplicate) for duplicate in duplicates]).to_csv()


def read_duplicates(location: str, *, needs_splits: bool = True) -> tuple[list[Duplicate], str]:
    """Read a list, and return it with the SHA-256 of the file.

    Raises:
        InputError: the file does not exist, is no such list, or has no splits that are needed.
    """
    folder, name = file_at(location)
    try:
        data = folder.read(name)
        header, *rows = csv.reader(io.StringIO(decode_text(data, location), newline=""), strict=True)
        if tuple(header) != _COLUMNS:
            raise ValueError(f"its columns are {','.join(header)[:80]!r}, expected {','.join(_COLUMNS)!r}")
        duplicates = [Duplicate(int(row[0]), row[1], float(row[2]), *row[3:]) for row in rows]
        if needs_splits and rows and not any(duplicate.split for duplicate in duplicates):
            raise ValueError("it has no splits")
    except (FileNotFoundError, ValueError, TypeError, IndexError, csv.Error) as error:
        is_missing = isinstance(error, FileNotFoundError)
        fault = "does not exist" if is_missing else f"is not a list of duplicates with splits ({error})"
        raise InputError(
            f"{location!r} {fault}: write it with imagepivot duplicates FEATURES CAPTIONS --output FILE"
        ) from error
    return duplicates, sha256_of_bytes(data)

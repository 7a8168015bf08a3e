"""Image ids from paths, and search for duplicate keys."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np

from pipelines.inputs.files import read_lines
from pipelines.inputs.images.base import EXTENSIONS
from schemas.errors import InputError
from schemas.keys import check_image_id
from schemas.storage.folder import file_at

IdRule = Literal["name", "path"]
"""Rule for image ids: the file name or the whole relative path, without extension."""


def id_of_path(path: str, ids: IdRule) -> str:
    """Return the image id of a path; empty if its last component is.

    >>> id_of_path("train2014/a.b.jpg", "name"), id_of_path("train2014/a.b.jpg", "path")
    ('a.b', 'train2014/a.b')
    """
    parent, slash, name = (path if ids == "name" else str(PurePosixPath(path))).rpartition("/")
    stem = name.rpartition(".")[0]
    stem = stem if stem.strip(".") else name  # As `os.path.splitext`: leading dots begin no extension.
    return stem if ids == "name" else f"{parent}{slash}{stem}"


def extension_remark(image_ids: Sequence[str]) -> str:
    """Return a remark if all image ids end as names of image files do, else "".

    >>> extension_remark(["1.jpg", "a"])
    ''
    """
    if not image_ids or not all(PurePosixPath(image_id).suffix.lower() in EXTENSIONS for image_id in image_ids):
        return ""
    return (
        f"image ids such as {image_ids[0]!r} end as file names, but ids of imagepivot features have no "
        "extension: remove it from the ids in SOURCE, or training finds no features"
    )


def read_skipped(values: Iterable[str]) -> tuple[str, ...]:
    """Return image ids, with those on the lines of a file for ``@FILE``.

    Raises:
        InputError: a file does not exist or is not text.
    """
    image_ids: list[str] = []
    for value in values:
        image_ids += filter(None, read_lines(*file_at(value[1:]))) if value.startswith("@") else [value]
    return tuple(image_ids)


def image_id_of(file_name: object, ids: IdRule = "name", *, place: str) -> str:
    """Return the image id of a file name, see `id_of_path`.

    A backslash is refused: nearly always it is a separator that a tool on Windows wrote, which would become part of the id.

    Raises:
        InputError: it is not a usable file name; the message begins with `place`.
    """
    path = check_image_id(file_name, place=place)
    if "\\" in path:
        raise InputError(
            f"{place}: the file name {path!r} has a backslash, expected '/' between folders: replace "
            "backslashes by '/', or give ids in a table"
        )
    image_id = id_of_path(path, ids)
    return image_id or check_image_id(image_id, place=place)


class KeyHashes:
    """Hashes of the keys of a source, eight bytes each, to find a duplicate key.

    If two hashes are equal, the records are read again and their keys compared.
    """

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, key: Hashable) -> None:
        """Add the key of a record."""
        self._hashes.append(hash(key))

    def suspects(self) -> set[int]:
        """Return the hashes that occur twice."""
        hashes = np.sort(np.frombuffer(self._hashes, np.int64))
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())

    def repeat(self, records: Iterable[tuple[Hashable, object]]) -> tuple[Any, Any, Any] | None:
        """Return the first duplicate key and its first two places; None without one.

        The records are pairs of key and place, read only if two hashes are equal.
        """
        suspects = self.suspects()
        places: dict[Hashable, object] = {}
        for key, place in records if suspects else ():
            if hash(key) in suspects:
                if key in places:
                    return key, places[key], place
                places[key] = place
        return None

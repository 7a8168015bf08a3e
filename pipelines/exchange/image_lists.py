"""Lists of image ids: text files with one id or file name per line, as imports and exports share them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from pipelines.exchange.jobs import IdRule
from pipelines.inputs.images.base import EXTENSIONS
from schemas.errors import InputError, UsageError
from schemas.keys import check_image_id
from schemas.storage.locations import is_remote, local_path
from schemas.text import read_text

_EXTENSION = re.compile(f"({'|'.join(map(re.escape, sorted(EXTENSIONS)))})$", re.IGNORECASE)
_WITH_FOLDERS: tuple[IdRule, ...] = ("exact", "path")
_CAPTION = re.compile(r"#\d+$")


def local_file(location: str) -> Path:
    """Return the path of an existing local file.

    Raises:
        UsageError: it is in an object store.
        InputError: there is no such file.
    """
    if is_remote(location):
        raise UsageError(f"cannot import {location!r}: the files are mapped into memory, copy them to this machine first")
    path = local_path(location)
    if not os.path.isfile(path):  # noqa: PTH113 -- false, too, where no file can be
        exists = os.path.exists(path)  # noqa: PTH110 -- likewise
        found = "" if not exists else " is a folder" if path.is_dir() else " is a pipe, a socket or a device"
        raise InputError(f"no such file: {location!r}{found}; check the path")
    return path


def make_image_id(text: str, rule: IdRule, *, place: str) -> str:
    """Return the image id that a list entry stands for.

    >>> make_image_id("flickr30k/1000092795.jpg#3", "name", place="line 1")
    '1000092795'

    Raises:
        InputError: the id would be empty, or `schemas.keys.check_image_id` refuses it.
    """
    image_id = _cut(text, rule)
    if not image_id:
        raise InputError(f"{place}: {text!r} is not an image id, expected an id or file name of an image")
    return check_image_id(image_id, place=place)


def _cut(text: str, rule: IdRule) -> str:
    if rule == "exact":
        return text
    path = _EXTENSION.sub("", _CAPTION.sub("", text.strip()))
    return path.rpartition("/")[2] if rule == "name" else path


def needs_exact_rule(image_ids: Iterable[str]) -> bool:
    """Return True if the rule ``name`` would change one of the image ids of a list."""
    return any(_cut(image_id, "name") != image_id for image_id in image_ids)


class ImageIds:
    """Reader of the image ids of all sources of an import: different entries have different ids.

    Entries that differ only in their caption number, as ``1.jpg#0`` and ``1.jpg#1``, name one image.
    """

    def __init__(self, rule: IdRule) -> None:
        self.rule = rule
        self._entries: dict[str, str] = {}

    def read(self, entry: str, *, place: str) -> str:
        """Return the image id of an entry.

        Raises:
            InputError: it is not an image id, or another entry has the same id.
        """
        image_id = make_image_id(entry, self.rule, place=place)
        if self.rule != "exact":
            image = _CAPTION.sub("", entry)
            other = self._entries.setdefault(image_id, image)
            if other != image:
                kept_apart = _cut(other, "path") != _cut(image, "path")
                raise InputError(
                    f"{place}: {other!r} and {image!r} would both be the image {image_id!r}: give --id-rule "
                    f"{'path' if kept_apart else 'exact'} to keep them apart"
                )
        return image_id

    def read_list(self, path: Path) -> list[str]:
        """Read the image ids of a text file, one per line.

        Raises:
            InputError: it is not UTF-8, a line is not an image id, or two different lines have the same id.
        """
        return [self.read(line, place=f"{path.name}, line {number}") for number, line in enumerate(_lines(path), 1)]


def match_ids(path: Path, image_ids: Collection[str]) -> list[str]:
    """Read a list of images of a dataset: each line is an image id or, where the dataset has none, the path of an image file.

    Raises:
        InputError: it is not UTF-8, a line is not an image id, or two different lines name one image.
    """
    listed, images = [], dict[str, str]()
    for number, line in enumerate(_lines(path), 1):
        place = f"{path.name}, line {number}"
        usual: IdRule = "name"
        rule = next((rule for rule in _WITH_FOLDERS if _cut(line, rule) in image_ids), usual)
        image_id, image = make_image_id(line, rule, place=place), _CAPTION.sub("", line)
        if images.setdefault(image_id, image) != image:
            raise InputError(
                f"{place}: {images[image_id]!r} and {image!r} are both the image {image_id!r} of the dataset, which tells "
                "no folders or extensions apart: list the ids of its images"
            )
        listed.append(image_id)
    return listed


def _lines(path: Path) -> list[str]:
    text = read_text(path)
    return text.removesuffix("\n").split("\n") if text else []


def expand_ids(ids: list[str], rows: int, repeats: int, *, list_name: str, array_name: str) -> list[str]:
    """Return the image id of each row of an array; an image may occur several times in a row, in the array, the list or both.

    Raises:
        InputError: list and array are of different lengths.
    """
    if len(ids) == rows:
        return ids
    if repeats > 1 and len(ids) * repeats == rows:
        return [image_id for image_id in ids for _ in range(repeats)]
    if repeats > 1 and rows * repeats == len(ids):
        images = ids[::repeats]
        for number, image_id in enumerate(ids):
            if image_id != images[number // repeats]:
                raise InputError(
                    f"{list_name}, line {number + 1}: image {image_id!r} among the {repeats} lines of image "
                    f"{images[number // repeats]!r}: not every image occurs {repeats} times in a row"
                )
        return images
    small, large = sorted((len(ids), rows))
    hint = ""
    if repeats == 1 and small and large % small == 0:
        hint = f"; if each image occurs {large // small} times in a row, give --repeats {large // small}"
    raise InputError(f"{list_name} has {len(ids):,} ids but {array_name} has {rows:,} rows: they do not belong together{hint}")

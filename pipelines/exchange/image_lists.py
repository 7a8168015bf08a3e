"""Image ids in text files, one id or file name per line, and the image numbers of Karpathy's ``dataset_*.json``."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pipelines.exchange.jobs import IdRule, KarpathyKey
from pipelines.inputs.files import inventory, iter_json
from pipelines.inputs.ids import image_id_of
from pipelines.inputs.images.base import EXTENSIONS
from schemas.errors import InputError, UsageError
from schemas.keys import check_image_id
from schemas.storage.folder import Folder
from schemas.storage.locations import is_remote, local_path
from schemas.text import read_text

_EXTENSION = re.compile(f"({'|'.join(map(re.escape, sorted(EXTENSIONS)))})$", re.IGNORECASE)
_RULES_WITH_FOLDERS: tuple[IdRule, ...] = ("exact", "path")
_CAPTION = re.compile(r"#\d+$")


def local_file(location: str) -> Path:
    """Return the path of an existing local file.

    Raises:
        UsageError: it is in an object store.
        InputError: the file is missing.
    """
    if is_remote(location):
        raise UsageError(f"cannot import {location!r}: the files are mapped into memory, copy them to this machine first")
    path = local_path(location)
    if not os.path.isfile(path):  # noqa: PTH113 -- False, not an error, for impossible paths
        exists = os.path.exists(path)  # noqa: PTH110
        kind = "" if not exists else " is a folder" if path.is_dir() else " is a pipe, a socket or a device"
        raise InputError(f"no such file: {location!r}{kind}; check the path")
    return path


def make_image_id(text: str, rule: IdRule, *, place: str) -> str:
    """Return the image id of a list entry.

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
    """Return True if the rule ``name`` would change an image id of a list."""
    return any(_cut(image_id, "name") != image_id for image_id in image_ids)


class ImageIds:
    """Reader of the image ids of all sources of an import; different entries have different ids.

    Entries that differ only in their caption number, as ``1.jpg#0`` and ``1.jpg#1``, name one image. With a ``dataset_*.json`` of
    Karpathy's splits, entries are its numbers, and ids are the file names without extension.

    Args:
        rule: rule for the id of an entry.
        karpathy: location of the ``dataset_*.json``; empty if entries are ids.
        key: numbers to read from that file.

    Raises:
        InputError: the file is missing or invalid, see `read_karpathy_numbers`.
    """

    def __init__(self, rule: IdRule, karpathy: str = "", key: KarpathyKey = "imgid") -> None:
        self._rule, self._key = rule, key
        self._entries: dict[str, str] = {}
        self._karpathy = local_file(karpathy) if karpathy else None
        self._ids_by_number = read_karpathy_numbers(self._karpathy, key) if self._karpathy is not None else {}

    @property
    def parameters(self) -> dict[str, Any]:
        """Options that determine the ids, for a dataset's parameters."""
        return {"id_rule": self._rule} | ({"karpathy_key": self._key} if self._karpathy is not None else {})

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """The ``dataset_*.json``, if given, for a dataset's inputs."""
        return inventory(Folder(str(self._karpathy.parent)), [self._karpathy.name]) if self._karpathy is not None else []

    def read(self, entry: str, *, place: str) -> str:
        """Return the image id of an entry.

        Raises:
            InputError: it is not an image id or not a number of the file, or another entry has the same id.
        """
        image_id = make_image_id(entry, self._rule, place=place)
        if self._rule != "exact":
            image = _CAPTION.sub("", entry)
            other = self._entries.setdefault(image_id, image)
            if other != image:
                rule = "path" if _cut(other, "path") != _cut(image, "path") else "exact"
                raise InputError(
                    f"{place}: {other!r} and {image!r} would both be the image {image_id!r}: give --id-rule {rule} to keep them "
                    "apart"
                )
        return image_id if self._karpathy is None else self._id_of_number(image_id, self._karpathy, place)

    def _id_of_number(self, text: str, path: Path, place: str) -> str:
        number = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
        if number is None:
            raise InputError(f"{place}: {text!r} is not a number, but --karpathy was given: leave it out where ids are names")
        if number not in self._ids_by_number:
            others = " or ".join(key for key in get_args(KarpathyKey) if key != self._key)
            raise InputError(
                f"{place}: {str(path)!r} has no {self._key} {number}, only {len(self._ids_by_number):,} from "
                f"{min(self._ids_by_number)} to {max(self._ids_by_number)}: is it the file of another dataset, or are these other "
                f"numbers (--karpathy-key {others})?"
            )
        return self._ids_by_number[number]

    def read_list(self, path: Path) -> list[str]:
        """Read the image ids of a text file, one per line.

        Raises:
            InputError: it is not UTF-8, or a line is invalid, see `read`.
        """
        return [self.read(line, place=f"{path.name}, line {number}") for number, line in enumerate(_lines(path), 1)]


def read_karpathy_numbers(path: Path, key: KarpathyKey) -> dict[int, str]:
    """Read the image id of each number of a ``dataset_*.json``, plain or ``.gz``.

    Raises:
        InputError: the file has another content, lacks these numbers, has one twice, or has two images of one name.
    """
    image_ids: dict[int, str] = {}
    positions: dict[str, int] = {}
    for position, image in enumerate(iter_json(Folder(str(path.parent)), path.name, prefix="images.item"), start=1):
        place = f"{str(path)!r}, image number {position}"
        if not isinstance(image, dict) or "filename" not in image:
            raise InputError(f"{place}: no 'filename' in it; is it a 'dataset_*.json' of Karpathy's splits?")
        image_id = image_id_of(image["filename"], place=place)
        if (other := positions.setdefault(image_id, position)) != position:
            raise InputError(
                f"{place}: {image['filename']!r} would be the image {image_id!r}, as image number {other} is: give each "
                "a file name of its own, here and in the captions"
            )
        for number in _numbers(image, key, place):
            if image_ids.setdefault(number, image_id) != image_id:
                raise InputError(f"{place}: {key} {number} is that of {image_ids[number]!r} and of {image_id!r}; expected one")
    if not image_ids:
        raise InputError(f"{str(path)!r} has no 'images' at its top level: is it a 'dataset_*.json' of Karpathy's splits?")
    return image_ids


def _numbers(image: Mapping[str, Any], key: KarpathyKey, place: str) -> Iterator[int]:
    numbers = image.get("sentids") if key == "sentid" else [image.get(key)]
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        keys = ", ".join(map(repr, sorted(image)))
        raise InputError(f"{place}: no {key!r} in it; the file has {keys}. Give --karpathy-key the one that your numbers are")
    yield from numbers


def match_ids(path: Path, image_ids: Collection[str]) -> list[str]:
    """Read a list of images of a dataset: each line is an image id or, if the dataset lacks that id, a path of an image file.

    Raises:
        InputError: it is not UTF-8, a line is not an image id, or two different lines name one image.
    """
    listed, images = [], dict[str, str]()
    for number, line in enumerate(_lines(path), 1):
        place = f"{path.name}, line {number}"
        rule: IdRule = next((rule for rule in _RULES_WITH_FOLDERS if _cut(line, rule) in image_ids), "name")
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
    """Return the image id of each row of an array; images may be repeated in successive rows of the array, the list or both.

    Raises:
        InputError: list and array are of different lengths.
    """
    if len(ids) == rows:
        return ids
    if repeats > 1 and len(ids) * repeats == rows:
        return [image_id for image_id in ids for _ in range(repeats)]
    if repeats > 1 and rows * repeats == len(ids):
        images = ids[::repeats]
        for index, image_id in enumerate(ids):
            if image_id != images[index // repeats]:
                raise InputError(
                    f"{list_name}, line {index + 1}: image {image_id!r} among the {repeats} lines of image "
                    f"{images[index // repeats]!r}: not every image occurs {repeats} times in a row"
                )
        return images
    small, large = sorted((len(ids), rows))
    hint = ""
    if repeats == 1 and small and large % small == 0:
        hint = f"; if each image occurs {large // small} times in a row, give --repeats {large // small}"
    raise InputError(f"{list_name} has {len(ids):,} ids but {array_name} has {rows:,} rows: they do not belong together{hint}")

"""Image ids in text files, one id or file name per line."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from pipelines.exchange.jobs import ListIdRule
from pipelines.inputs.images.base import EXTENSIONS
from schemas.errors import InputError, UsageError
from schemas.keys import check_image_id
from schemas.storage.locations import check_location, is_remote, local_path
from schemas.text import read_text

_EXTENSION = re.compile(f"({'|'.join(map(re.escape, sorted(EXTENSIONS)))})$", re.IGNORECASE)
_RULES_WITH_FOLDERS: tuple[ListIdRule, ...] = ("exact", "path")
CAPTION_NUMBER = re.compile(r"#\d+$")


def local_file(location: str) -> Path:
    """Return the path of an existing local file.

    Raises:
        UsageError: it is in an object store, or its name is not UTF-8.
        InputError: the file is missing.
    """
    check_location(location)
    if is_remote(location):
        raise UsageError(f"cannot import {location!r}: the files are mapped into memory, copy them to this machine first")
    path = local_path(location)
    if not os.path.isfile(path):  # noqa: PTH113 -- False, not an error, for impossible paths
        exists = os.path.exists(path)  # noqa: PTH110
        kind = "" if not exists else " is a folder" if path.is_dir() else " is a pipe, a socket or a device"
        raise InputError(f"no such file: {location!r}{kind}; check the path")
    return path


def make_image_id(text: str, rule: ListIdRule, *, place: str) -> str:
    """Return the image id of a list entry.

    >>> make_image_id("flickr30k/1000092795.jpg#3", "name", place="line 1")
    '1000092795'

    Raises:
        InputError: the id would be empty, or `schemas.keys.check_image_id` refuses it.
    """
    image_id = apply_rule(text, rule)
    if not image_id:
        raise InputError(f"{place}: {text!r} is not an image id, expected an id or file name of an image")
    return check_image_id(image_id, place=place)


def apply_rule(text: str, rule: ListIdRule) -> str:
    """Return the image id of a list entry, unchecked."""
    if rule == "exact":
        return text
    path = _EXTENSION.sub("", CAPTION_NUMBER.sub("", text.strip()))
    return path.rpartition("/")[2] if rule == "name" else path


def match_ids(path: Path, image_ids: Collection[str]) -> list[str]:
    """Read a list of images of a dataset, one image id or file path per line.

    Raises:
        InputError: it is not UTF-8, a line is not an image id, or two different lines name one image.
    """
    listed, images = [], dict[str, str]()
    for line_number, line in enumerate(lines_of(path), 1):
        place = f"{path.name}, line {line_number}"
        rule: ListIdRule = next((rule for rule in _RULES_WITH_FOLDERS if apply_rule(line, rule) in image_ids), "name")
        image_id, image = make_image_id(line, rule, place=place), CAPTION_NUMBER.sub("", line)
        if images.setdefault(image_id, image) != image:
            raise InputError(
                f"{place}: {images[image_id]!r} and {image!r} are both the image {image_id!r} of the "
                "dataset, which tells no folders or extensions apart: list the ids of its images"
            )
        listed.append(image_id)
    return listed


def lines_of(path: Path) -> list[str]:
    """Read a text file; its last line may lack the line end."""
    text = read_text(path)
    return text.removesuffix("\n").split("\n") if text else []


def expand_ids(ids: list[str], rows: int, repeats: int, *, list_name: str, array_name: str) -> list[str]:
    """Return the image id of each row; array or list may repeat each image.

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

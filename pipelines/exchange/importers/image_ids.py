"""Image ids of an import, from lists or Karpathy's ``dataset_*.json``."""

import re
from pathlib import Path
from typing import Any, get_args

from pipelines.exchange.image_lists import CAPTION_NUMBER, apply_rule, lines_of, local_file, make_image_id
from pipelines.exchange.jobs import KarpathyKey, ListIdRule
from pipelines.inputs.files import KARPATHY_FORM, inventory, iter_json
from pipelines.inputs.ids import image_id_of
from schemas.errors import InputError
from schemas.storage.folder import Folder


class ImageIds:
    """Reader of the image ids of an import; different entries have different ids.

    Entries that differ only in their caption number, as ``1.jpg#0`` and ``1.jpg#1``, name one image. With a ``dataset_*.json`` of
    Karpathy's splits, entries are its numbers, and ids are the file names without extension.

    Raises:
        InputError: the file is missing or invalid, see `read_karpathy_numbers`.
    """

    def __init__(self, rule: ListIdRule, karpathy: str = "", key: KarpathyKey = "imgid") -> None:
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
            image = CAPTION_NUMBER.sub("", entry)
            other = self._entries.setdefault(image_id, image)
            if other != image:
                rule = "path" if apply_rule(other, "path") != apply_rule(image, "path") else "exact"
                raise InputError(
                    f"{place}: {other!r} and {image!r} would both be the image {image_id!r}: give --id-rule "
                    f"{rule} to keep them apart"
                )
        if self._karpathy is None:
            return image_id
        if not re.fullmatch("[0-9]{1,18}", image_id):
            raise InputError(
                f"{place}: {image_id!r} is not a number, but --karpathy was given: leave it out where ids are names"
            )
        number = int(image_id)
        if number not in self._ids_by_number:
            others = " or ".join(key for key in get_args(KarpathyKey) if key != self._key)
            raise InputError(
                f"{place}: {str(self._karpathy)!r} has no {self._key} {number}, only {len(self._ids_by_number):,} from "
                f"{min(self._ids_by_number)} to {max(self._ids_by_number)}: is it the file of another dataset, or are these other "
                f"numbers (--karpathy-key {others})?"
            )
        return self._ids_by_number[number]

    def read_list(self, path: Path) -> list[str]:
        """Read the image ids of a text file, one per line.

        Raises:
            InputError: it is not UTF-8, or a line is invalid, see `read`.
        """
        return [self.read(line, place=f"{path.name}, line {line_number}") for line_number, line in enumerate(lines_of(path), 1)]


def read_karpathy_numbers(path: Path, key: KarpathyKey) -> dict[int, str]:
    """Read the image id of each number of a ``dataset_*.json``, plain or ``.gz``.

    Raises:
        InputError: the file has another content, lacks these numbers, has one twice, or has two images of one name.
    """
    image_ids: dict[int, str] = {}
    positions: dict[str, int] = {}
    images = iter_json(Folder(str(path.parent)), path.name, prefix="images.item", form=KARPATHY_FORM)
    for position, (place, image) in enumerate(images, start=1):
        if not isinstance(image, dict) or "filename" not in image:
            raise InputError(f"{place}: no 'filename' in it; is it {KARPATHY_FORM}?")
        image_id = image_id_of(image["filename"], place=place)
        if (other := positions.setdefault(image_id, position)) != position:
            raise InputError(
                f"{place}: {image['filename']!r} would be the image {image_id!r}, as image number {other} "
                "is: give each a file name of its own, here and in the captions"
            )
        numbers = image.get("sentids") if key == "sentid" else [image.get(key)]
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            keys = ", ".join(map(repr, sorted(image)))
            raise InputError(
                f"{place}: no {key!r} in it; the file has {keys}. Give --karpathy-key the one that your numbers are"
            )
        for number in numbers:
            if image_ids.setdefault(number, image_id) != image_id:
                raise InputError(f"{place}: {key} {number} is that of {image_ids[number]!r} and of {image_id!r}; expected one")
    if not image_ids:
        raise InputError(f"{str(path)!r} has no {key} of any image: is it {KARPATHY_FORM}?")
    return image_ids

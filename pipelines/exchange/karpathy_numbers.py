"""The numbers that features are listed by where their makers counted the images of Karpathy's ``dataset_*.json``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pipelines.exchange.image_lists import local_file
from pipelines.exchange.jobs import KarpathyKey
from pipelines.inputs.files import inventory, iter_json
from pipelines.inputs.ids import image_id_of
from schemas.errors import InputError
from schemas.storage.folder import Folder


@dataclass(frozen=True)
class KarpathyNumbers:
    """Image ids, file names without extension, by number; without a file ids are left as they are."""

    key: KarpathyKey
    folder: Folder | None = None
    name: str = ""
    image_ids: Mapping[int, str] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, location: str, key: KarpathyKey) -> KarpathyNumbers:
        """Read the numbers of a ``dataset_*.json``, plain or ``.gz``; none if the location is empty.

        Raises:
            InputError: there is no such file, it is of another kind, has no such numbers, has one twice, or two images
                of one name.
        """
        if not location:
            return cls(key)
        path = local_file(location)
        folder = Folder(str(path.parent))
        image_ids: dict[int, str] = {}
        positions: dict[str, int] = {}
        for position, image in enumerate(iter_json(folder, path.name, prefix="images.item"), start=1):
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
                    raise InputError(
                        f"{place}: {key} {number} is that of {image_ids[number]!r} and of {image_id!r}; expected one"
                    )
        if not image_ids:
            raise InputError(f"{str(path)!r} has no 'images' at its top level: is it a 'dataset_*.json' of Karpathy's splits?")
        return cls(key, folder, path.name, image_ids)

    def image_id(self, text: str, *, place: str) -> str:
        """Return the image id that a listed number stands for.

        Raises:
            InputError: it is not a number, or not one of the file.
        """
        if self.folder is None:
            return text
        number = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
        if number is None:
            raise InputError(f"{place}: {text!r} is not a number, but --karpathy was given: leave it out where ids are names")
        if number not in self.image_ids:
            others = " or ".join(key for key in get_args(KarpathyKey) if key != self.key)
            raise InputError(
                f"{place}: {self.folder.path_of(self.name)!r} has no {self.key} {number}, only {len(self.image_ids):,} from "
                f"{min(self.image_ids)} to {max(self.image_ids)}: is it the file of another dataset, or are these other numbers "
                f"(--karpathy-key {others})?"
            )
        return self.image_ids[number]

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """The file, if there is one, for a dataset's inputs."""
        return inventory(self.folder, [self.name]) if self.folder is not None else []

    @property
    def parameters(self) -> dict[str, Any]:
        """What the numbers count, if there is a file."""
        return {"karpathy_key": self.key} if self.folder is not None else {}


def _numbers(image: Mapping[str, Any], key: KarpathyKey, place: str) -> Iterator[int]:
    found = image.get("sentids") if key == "sentid" else [image.get(key)]
    if not isinstance(found, list) or not all(type(number) is int for number in found):
        raise InputError(
            f"{place}: no {key!r} in it; the file has {', '.join(map(repr, sorted(image)))}. Give --karpathy-key the one that your "
            "numbers are"
        )
    yield from found

"""COCO's ``captions_*.json``: a list of images and a list of annotations.

The two lists may come in either order, so the file is read twice. Memory holds the images' names and counts, not the captions.
An image's captions are indexed in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.inputs.captions.base import (
    COMPARABLE,
    EVERYTHING,
    CaptionSource,
    Part,
    RawCaption,
    Selection,
    check_text,
    find_files,
    image_id_of,
    select_parts,
)
from pipelines.inputs.files import inventory, iter_json, without_gz
from schemas.errors import InputError
from schemas.storage import Folder

__all__ = ["CocoSource"]

_FILE = r"captions_.+\.json(\.gz)?"


@dataclass(frozen=True)
class CocoSource(CaptionSource):
    """The captions of one or more ``captions_SPLIT.json``.

    Attributes:
        folder: the folder of the files.
        names: the files.
        language: language of all captions.
    """

    folder: Folder
    names: tuple[str, ...]
    language: str

    @classmethod
    def open(cls, location: str, *, language: str) -> CocoSource:
        """Open one file, or all ``captions_*.json`` of a folder.

        Raises:
            InputError: the folder contains none, a file name does not contain a split, or two contain the same.
        """
        folder, names = find_files(location, _FILE, hint="'captions_*.json'")
        splits: dict[str, str] = {}
        for name in names:
            split = _split_of(name)
            if not split:
                raise InputError(
                    f"{folder.path_of(name)!r} is not named 'captions_SPLIT.json', so its split is unknown: rename it"
                )
            if splits.setdefault(split, name) != name:
                raise InputError(f"{splits[split]!r} and {name!r} in {location!r} are the same split: keep one")
        return cls(folder, tuple(names), language)

    def parameters(self) -> dict[str, Any]:
        """Return the language, which the files do not say."""
        return {"default_language": self.language}

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part per file."""
        parts = [Part(name=n, language=self.language, portion=COMPARABLE, split=_split_of(n)) for n in self.names]
        return select_parts(selection, parts, location=self.folder.location)

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions of one file, annotation by annotation."""
        if not selection.takes(part.language, part.portion, part.split):
            return
        location = self.folder.path_of(part.name)
        images = self._images(part.name)
        counts = dict.fromkeys(images.values(), 0)
        number = 0
        for number, annotation in enumerate(iter_json(self.folder, part.name, prefix="annotations.item"), start=1):
            place = f"{location!r}, annotation number {number}"
            if not isinstance(annotation, dict) or "image_id" not in annotation or "caption" not in annotation:
                raise InputError(f"{place}: no 'image_id' or no 'caption' in it; is it one of COCO's 'captions_*.json'?")
            key = annotation["image_id"]
            if not isinstance(key, int | str) or (image_id := images.get(key)) is None:
                raise InputError(
                    f"{place}: its image {key!r} is not among the 'images' of the file; was the file edited? Fetch it again"
                )
            text = check_text(annotation["caption"], place=f"{place} (image {image_id!r})")
            yield RawCaption(image_id, part.language, part.portion, counts[image_id], part.split, text)
            counts[image_id] += 1
        if not number:
            raise InputError(f"{location!r} has no 'annotations': is it one of COCO's 'captions_*.json'? Fetch it again")

    def inputs(self, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
        """Return the files of a selection."""
        return inventory(self.folder, [part.name for part in self.parts(selection)])

    def _images(self, name: str) -> dict[int | str, str]:
        """Return the image ids by COCO's image numbers."""
        location = self.folder.path_of(name)
        images: dict[int | str, str] = {}
        for number, image in enumerate(iter_json(self.folder, name, prefix="images.item"), start=1):
            place = f"{location!r}, image number {number}"
            if not isinstance(image, dict) or "file_name" not in image or not isinstance(image.get("id"), int | str):
                raise InputError(f"{place}: no 'id' or no 'file_name' in it; is it one of COCO's 'captions_*.json'?")
            image_id = image_id_of(image["file_name"], place=place)
            if images.setdefault(image["id"], image_id) != image_id:
                raise InputError(
                    f"{place}: the id {image['id']!r} stands for {images[image['id']]!r} and {image_id!r}; ids must be unique"
                )
        if not images:
            raise InputError(f"{location!r} has no 'images' at its top level: is it one of COCO's 'captions_*.json'?")
        return images


def _split_of(name: str) -> str:
    """Return ``train2014`` for ``captions_train2014.json``, and an empty string for names of another form."""
    stem = without_gz(name).removesuffix(".json")
    return stem.removeprefix("captions_") if stem.startswith("captions_") else ""

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
    path_parameters,
    select_parts,
)
from pipelines.inputs.captions.repeats import advice_apart, path_advice
from pipelines.inputs.files import inventory, iter_json, without_gz
from pipelines.inputs.ids import IdRule, KeyHashes
from schemas.errors import InputError
from schemas.storage.folder import Folder

_FILE = r"captions_.+\.json(\.gz)?"


@dataclass(frozen=True)
class CocoSource(CaptionSource):
    """The captions of one or more ``captions_SPLIT.json``.

    Attributes:
        folder: the folder of the files.
        names: the files.
        language: language of all captions.
        ids: how image ids are made from ``file_name``.
    """

    folder: Folder
    names: tuple[str, ...]
    language: str
    ids: IdRule = "name"

    @classmethod
    def open(cls, location: str, *, language: str, ids: IdRule = "name") -> CocoSource:
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
        return cls(folder, tuple(names), language, ids)

    @property
    def repeat_advice(self) -> str:
        """What to do about an image in two files."""
        return path_advice(self.ids)

    def parameters(self) -> dict[str, Any]:
        """Return the language, which the files do not say, and another rule for ids than the usual one."""
        return {"default_language": self.language, **path_parameters(self.ids)}

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
        keys = KeyHashes()
        places = f"{location!r}, annotation number "
        number = 0
        for number, annotation in enumerate(self._items(part.name, "annotations"), start=1):
            if not isinstance(annotation, dict) or "image_id" not in annotation or "caption" not in annotation:
                raise InputError(
                    f"{places}{number}: no 'image_id' or no 'caption' in it; is it one of COCO's 'captions_*.json'?"
                )
            key = annotation["image_id"]
            if type(key) not in (int, str) or (image_id := images.get(key)) is None:
                raise InputError(
                    f"{places}{number}: its image {key!r} is not among the 'images' of the file; was the file edited? Fetch it "
                    "again"
                )
            if (own := annotation.get("id")) is not None:
                keys.add((key, str(own)))
            text = check_text(annotation["caption"], place=f"{places}{number} (image {image_id!r})")
            yield RawCaption(image_id, part.language, part.portion, counts[image_id], part.split, text)
            counts[image_id] += 1
        if not number:
            raise InputError(f"{location!r} has no 'annotations': is it one of COCO's 'captions_*.json'? Fetch it again")
        # Files that were joined may count annotations from the start again, but not those of one image.
        annotations = enumerate(self._items(part.name, "annotations"), start=1)
        if repeat := keys.repeat(((item["image_id"], str(item.get("id"))), number) for number, item in annotations):
            raise InputError(
                f"{location!r}: the annotations number {repeat.first} and {repeat.second} both have the id {repeat.key[1]!r} and "
                f"describe the image {repeat.key[0]!r}: remove one of them, or if both are meant, give each an id of its own"
            )

    def inputs(self, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
        """Return the files of a selection."""
        return inventory(self.folder, [part.name for part in self.parts(selection)])

    def _items(self, name: str, section: str) -> Iterator[Any]:
        return iter_json(self.folder, name, prefix=f"{section}.item")

    def _images(self, name: str) -> dict[int | str, str]:
        """Return the image ids by COCO's image numbers."""
        location = self.folder.path_of(name)
        paths: dict[int | str, str] = {}
        keys: dict[str, int | str] = {}
        for number, image in enumerate(self._items(name, "images"), start=1):
            place = f"{location!r}, image number {number}"
            if not isinstance(image, dict) or "file_name" not in image or type(image.get("id")) not in (int, str):
                raise InputError(f"{place}: no 'id' or no 'file_name' in it; is it one of COCO's 'captions_*.json'?")
            key, path = image["id"], image["file_name"]
            image_id = image_id_of(path, self.ids, place=place)
            if paths.setdefault(key, path) != path:
                raise InputError(
                    f"{place}: the id {key!r} stands for {paths[key]!r} and {path!r}: number images anew, here and in 'annotations'"
                )
            if (other := keys.setdefault(image_id, key)) != key:
                raise InputError(
                    f"{place}: the images {other!r} ({paths[other]!r}) and {key!r} ({path!r}) would both be {image_id!r}: "
                    f"{advice_apart(paths[other], path, self.ids)}"
                )
        if not keys:
            raise InputError(f"{location!r} has no 'images' at its top level: is it one of COCO's 'captions_*.json'?")
        return {key: image_id for image_id, key in keys.items()}


def _split_of(name: str) -> str:
    """Return ``train2014`` for ``captions_train2014.json``, and an empty string for names of another form."""
    stem = without_gz(name).removesuffix(".json")
    return stem.removeprefix("captions_") if stem.startswith("captions_") else ""

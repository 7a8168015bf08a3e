"""Captions in JSON documents: Karpathy's splits and COCO.

Karpathy's splits of Flickr8k, Flickr30k and COCO hold images with their captions. Image ids come from ``filename`` and the optional
``filepath``. A caption's index is its position in ``sentences``, its text is ``raw``; ``tokens`` are not read. Splits keep their
names (``train``, ``restval``, ``val``, ``test``). ``imgid``, ``sentid`` and ``sentids`` are optional and only checked.

COCO's files hold a list of images and a list of annotations in either order, so a file is read twice. Image ids come from
``file_name``. Memory holds the names and counts of images. An image's captions are indexed in the order of the file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pipelines.inputs.captions.base import (
    COMPARABLE,
    RENAME,
    Part,
    PathSource,
    RawCaption,
    Selection,
    check_label,
    check_text,
    find_files,
    find_splits,
    record_labels,
    require_selected,
)
from pipelines.inputs.files import KARPATHY_FORM, iter_json
from pipelines.inputs.ids import IdRule, KeyHashes, id_of_path, image_id_of
from schemas.errors import InputError
from schemas.keys import check_image_id
from schemas.storage.folder import Folder

_COCO_FORM = "one of COCO's 'captions_*.json'"
_KARPATHY_FILE = r"dataset.*\.json(\.gz)?"
_COCO_FILE = r"captions_(.+)\.json(?:\.gz)?"


@dataclass(frozen=True)
class KarpathySource(PathSource):
    """The captions of one ``dataset_*.json``."""

    folder: Folder
    name: str
    language: str
    ids: IdRule = "name"

    @classmethod
    def open(cls, location: str, *, language: str, ids: IdRule = "name") -> Self:
        """Open the file, or the only such file of a folder.

        Raises:
            InputError: the folder contains none or several.
        """
        folder, names = find_files(location, _KARPATHY_FILE, hint="'dataset_*.json'")
        if len(names) > 1:
            raise InputError(f"{location!r} holds several files, {', '.join(map(repr, names))}: name the one to read")
        return cls(folder, names[0], language, ids)

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part, the file; reading it shows its splits."""
        without_splits = Selection(selection.languages, selection.portions)
        require_selected(without_splits, {(self.language, COMPARABLE, "")}, location=self.folder.path_of(self.name))
        return [Part(name=self.name, language=self.language, portion=COMPARABLE)]

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions image by image."""
        location = self.folder.path_of(part.name)
        kinds = set[tuple[str, str, str]]()
        for place, image in iter_json(self.folder, part.name, prefix="images.item", form=KARPATHY_FORM):
            image_id, split, texts = _parse_image(image, self.ids, place=place)
            if texts:
                record_labels(kinds, (part.language, part.portion, split), location=location)
            if selection.takes(part.language, part.portion, split):
                for index, text in enumerate(texts):
                    yield RawCaption(image_id, part.language, part.portion, index, split, text)
        require_selected(selection, kinds, location=location)


def _parse_image(image: Any, ids: IdRule, *, place: str) -> tuple[str, str, list[str]]:
    """Return image id, split and texts of one entry of ``images``."""
    for key in ("filename", "split", "sentences"):
        if not isinstance(image, dict) or key not in image:
            raise InputError(f"{place}: no {key!r} in it; is it {KARPATHY_FORM}?")
    path = image["filename"]
    if ids == "path" and image.get("filepath"):
        path = f"{image['filepath']}/{check_image_id(path, place=place)}"
    image_id = image_id_of(path, ids, place=place)
    place = f"{place} ({image_id!r})"
    split, sentences = image["split"], image["sentences"]
    check_label(split, ours="split", place=place, advice="write the split of the image")
    if not isinstance(sentences, list):
        raise InputError(f"{place}: 'sentences' is {sentences!r}, expected a list")
    texts, places = [], f"{place}, sentence "
    for index, sentence in enumerate(sentences):
        if not isinstance(sentence, dict) or "raw" not in sentence:
            raise InputError(f"{place}: sentence {index} has no 'raw' text; take the file that has the captions as written")
        texts.append(check_text(sentence["raw"], place=f"{places}{index}"))
    _check_numbers(image, place=place)
    return image_id, split, texts


def _check_numbers(image: Mapping[str, Any], *, place: str) -> None:
    """Check the optional ``imgid``, ``sentid`` and ``sentids`` of an image."""
    sentences, listed, imgid = image["sentences"], image.get("sentids"), image.get("imgid")
    sentids = [sentence.get("sentid") for sentence in sentences]
    if imgid is not None:
        for sentence in sentences:
            if sentence.get("imgid", imgid) != imgid:
                raise InputError(
                    f"{place}: its 'imgid' is {imgid!r}, but that of a sentence is {sentence['imgid']!r}; fetch the file again"
                )
    for row, sentid in enumerate(sentids):
        if sentid is not None and sentid in sentids[:row]:
            raise InputError(
                f"{place}: two of its sentences have the 'sentid' {sentid!r}: remove one of them, or renumber them"
            )
    if isinstance(listed, list) and listed != sentids:
        sentids = [sentid for sentid in sentids if sentid is not None]
        if len(listed) != len(sentences) or not all(sentid in listed for sentid in sentids):
            raise InputError(
                f"{place}: 'sentids' is {listed!r}, but its sentences are {sentids or len(sentences)!r}: some are missing or "
                "belong to another image; fetch the file again, or if the sentences are right, take 'sentids' out"
            )


@dataclass(frozen=True)
class CocoSource(PathSource):
    """The captions of one or more ``captions_SPLIT.json``."""

    folder: Folder
    files: tuple[Part, ...]
    language: str
    ids: IdRule = "name"

    @classmethod
    def open(cls, location: str, *, language: str, ids: IdRule = "name") -> Self:
        """Open one file, or all ``captions_*.json`` of a folder.

        Raises:
            InputError: the folder contains none, a file name does not contain a split, or two contain the same.
        """
        folder, splits = find_splits(location, _COCO_FILE, "captions_SPLIT.json")
        files = (Part(name, language=language, portion=COMPARABLE, split=split) for split, name in splits.items())
        return cls(folder, tuple(files), language, ids)

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part per file."""
        return self._select(self.files, selection)

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions of one file, annotation by annotation."""
        location = self.folder.path_of(part.name)
        images = self._images(part.name)
        counts = dict.fromkeys(images.values(), 0)
        keys = KeyHashes()
        for place, annotation in iter_json(self.folder, part.name, prefix="annotations.item", form=_COCO_FORM):
            if not isinstance(annotation, dict) or "image_id" not in annotation or "caption" not in annotation:
                raise InputError(f"{place}: no 'image_id' or no 'caption' in it; is it {_COCO_FORM}?")
            key = annotation["image_id"]
            if type(key) not in (int, str) or (image_id := images.get(key)) is None:
                raise InputError(
                    f"{place}: its image {key!r} is not among the 'images' of the file; was the file edited? Fetch it again"
                )
            if (own := annotation.get("id")) is not None:
                keys.add((key, str(own)))
            text = check_text(annotation["caption"], place=f"{place} (image {image_id!r})")
            yield RawCaption(image_id, part.language, part.portion, counts[image_id], part.split, text)
            counts[image_id] += 1
        # Joined files may repeat annotation ids, but not for one image.
        annotations = iter_json(self.folder, part.name, prefix="annotations.item", form=_COCO_FORM)
        places = enumerate((item for _, item in annotations), start=1)
        if repeat := keys.repeat(((item["image_id"], str(item.get("id"))), position) for position, item in places):
            (image, own), first, second = repeat
            raise InputError(
                f"{location!r}: the annotations number {first} and {second} both have the id {own!r} and describe the image "
                f"{image!r}: remove one of them, or if both are meant, give each an id of its own"
            )

    def _images(self, name: str) -> dict[int | str, str]:
        """Return the image ids by COCO's image numbers."""
        paths: dict[int | str, str] = {}
        keys: dict[str, int | str] = {}
        for place, image in iter_json(self.folder, name, prefix="images.item", form=_COCO_FORM):
            if not isinstance(image, dict) or "file_name" not in image or type(image.get("id")) not in (int, str):
                raise InputError(f"{place}: no 'id' or no 'file_name' in it; is it {_COCO_FORM}?")
            key, path = image["id"], image["file_name"]
            image_id = image_id_of(path, self.ids, place=place)
            if paths.setdefault(key, path) != path:
                raise InputError(
                    f"{place}: the id {key!r} belongs to {paths[key]!r} and {path!r}: renumber images, here and in 'annotations'"
                )
            if (other := keys.setdefault(image_id, key)) != key:
                helps = self.ids == "name" and id_of_path(paths[other], "path") != id_of_path(path, "path")
                raise InputError(
                    f"{place}: the images {other!r} ({paths[other]!r}) and {key!r} ({path!r}) would both be {image_id!r}: "
                    f"{'make ids of whole paths with --id-rule path, or ' if helps else ''}{RENAME}"
                )
        return {key: image_id for image_id, key in keys.items()}

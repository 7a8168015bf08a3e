"""The ``dataset_*.json`` of Karpathy's splits of Flickr8k, Flickr30k and COCO: images with their captions.

A caption's index is its position in ``sentences``, its text is ``raw``; ``tokens`` are not read. Splits keep their names
(``train``, ``restval``, ``val``, ``test``). The numbers of images and sentences, where a file has them, are only checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.inputs.captions.base import (
    COMPARABLE,
    EVERYTHING,
    CaptionSource,
    Part,
    RawCaption,
    Selection,
    Tally,
    check_label,
    check_text,
    find_files,
    image_id_of,
    path_parameters,
    require_selected,
)
from pipelines.inputs.captions.repeats import path_advice
from pipelines.inputs.files import inventory, iter_json
from pipelines.inputs.ids import IdRule
from schemas.errors import InputError
from schemas.keys import check_image_id
from schemas.storage.folder import Folder

_FILE = r"dataset.*\.json(\.gz)?"


@dataclass(frozen=True)
class KarpathySource(CaptionSource):
    """The captions of one ``dataset_*.json``.

    Attributes:
        folder: the folder of the file.
        name: the file.
        language: language of all captions.
        ids: how image ids are made from ``filename`` and, where there is one, ``filepath``.
    """

    folder: Folder
    name: str
    language: str
    ids: IdRule = "name"

    @classmethod
    def open(cls, location: str, *, language: str, ids: IdRule = "name") -> KarpathySource:
        """Open the file, or the only such file of a folder.

        Raises:
            InputError: the folder contains none or several.
        """
        folder, names = find_files(location, _FILE, hint="'dataset_*.json'")
        if len(names) > 1:
            raise InputError(f"{location!r} holds several files, {', '.join(map(repr, names))}: name the one to read")
        return cls(folder, names[0], language, ids)

    @property
    def repeat_advice(self) -> str:
        """What to do about two images of one name."""
        return path_advice(self.ids)

    def parameters(self) -> dict[str, Any]:
        """Return the language, which the file does not say, and another rule for ids than the usual one."""
        return {"default_language": self.language, **path_parameters(self.ids)}

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part, the file. Its splits become known only by reading it."""
        known = Selection(selection.languages, selection.portions)
        require_selected(known, {(self.language, COMPARABLE, "")}, location=self.folder.path_of(self.name))
        return [Part(name=self.name, language=self.language, portion=COMPARABLE)]

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions image by image."""
        location = self.folder.path_of(part.name)
        tally = Tally(location)
        number = 0
        places = f"{location!r}, image number "
        for number, image in enumerate(iter_json(self.folder, part.name, prefix="images.item"), start=1):
            image_id, split, texts = _parse_image(image, self.ids, place=f"{places}{number}")
            if texts:
                tally.add((part.language, part.portion, split))
            if selection.takes(part.language, part.portion, split):
                for index, text in enumerate(texts):
                    yield RawCaption(image_id, part.language, part.portion, index, split, text)
        if not number:
            raise InputError(f"{location!r} has no 'images' at its top level: is it a 'dataset_*.json' of Karpathy's splits?")
        tally.require(selection)

    def inputs(self, selection: Selection = EVERYTHING) -> list[dict[str, Any]]:
        """Return the one file, whatever is selected."""
        return inventory(self.folder, [self.name])


def _parse_image(image: Any, ids: IdRule, *, place: str) -> tuple[str, str, list[str]]:
    """Return image id, split and texts of one entry of ``images``."""
    for key in ("filename", "split", "sentences"):
        if not isinstance(image, dict) or key not in image:
            raise InputError(f"{place}: no {key!r} in it; is it a 'dataset_*.json' of Karpathy's splits?")
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
    """Check that the sentences of an image are those that it lists, as far as it lists any."""
    sentences, listed, imgid = image["sentences"], image.get("sentids"), image.get("imgid")
    numbers = [sentence.get("sentid") for sentence in sentences]
    if imgid is not None:
        for sentence in sentences:
            if sentence.get("imgid", imgid) != imgid:
                raise InputError(
                    f"{place}: its 'imgid' is {imgid!r}, but that of a sentence is {sentence['imgid']!r}; fetch the file again"
                )
    for row, number in enumerate(numbers):
        if number is not None and number in numbers[:row]:
            raise InputError(
                f"{place}: two of its sentences have the 'sentid' {number!r}: remove one of them, or number them anew"
            )
    if isinstance(listed, list) and listed != numbers:
        numbers = [number for number in numbers if number is not None]
        if len(listed) != len(sentences) or not all(number in listed for number in numbers):
            raise InputError(
                f"{place}: 'sentids' is {listed!r}, but its sentences are {numbers or len(sentences)!r}: some are missing or "
                "belong to another image; fetch the file again, or if the sentences are right, take 'sentids' out"
            )

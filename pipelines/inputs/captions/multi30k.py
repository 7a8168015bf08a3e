"""Caption source: Multi30K in its authors' layout, with lists of images.

``task1`` holds translations (``raw/SPLIT.LANG.gz``, one caption per image and language), ``task2``
independent captions (``raw/SPLIT.N.LANG.gz``, N from 1). The same test images are ``test_2016_flickr`` in
task 1 and ``test_2016`` in task 2; both names are kept.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from pipelines.inputs.captions.base import COMPARABLE, TRANSLATION, Part, PathSource, RawCaption, Selection
from pipelines.inputs.files import count_lines, kind_of, list_files, read_lines
from pipelines.inputs.ids import IdRule, image_id_of
from schemas.errors import InputError, UsageError
from schemas.keys import check_language
from schemas.storage.folder import Folder

_NAMES = {
    "task1": re.compile(r"(?P<split>[^.]+)\.(?P<language>[^.]+)"),
    "task2": re.compile(r"(?P<split>[^.]+)\.(?P<number>[1-9][0-9]{0,3})\.(?P<language>[^.]+)"),
}
_FORMS = {"task1": "SPLIT.LANG.gz", "task2": "SPLIT.N.LANG.gz"}
_LISTS = {"task1": "{}.txt", "task2": "{}_images.txt"}
_PORTIONS = {"task1": TRANSLATION, "task2": COMPARABLE}
_NOT_CAPTIONS = re.compile(r"\..*|(README|LICENSE).*", re.IGNORECASE)


@dataclass(frozen=True)
class Multi30kSource(PathSource):
    """The captions of Multi30K, with image ids from the image lists."""

    folder: Folder
    ids: IdRule = "name"
    language = ""

    @classmethod
    def open(cls, location: str, *, ids: IdRule = "name") -> Self:
        """Find ``task1`` or ``task2`` in a folder or its subfolder ``data``.

        Raises:
            InputError: neither exists.
        """
        for folder in (Folder(location), Folder(f"{location}/data")):
            if any(kind_of(folder.path_of(task)) == "folder" for task in _NAMES):
                return cls(folder, ids)
        raise InputError(
            f"{location!r} is not Multi30K: it holds neither 'task1' nor 'task2', directly or below 'data'. "
            "Give the folder of a checkout of multi30k/dataset, or its 'data' folder"
        )

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part per text file."""
        parts = sorted(part for task in _NAMES for part in self._parts_of(task))
        if not parts:
            raise InputError(
                f"no captions in {self.folder.location!r}: expected files such as 'task1/raw/train.en.gz'; fetch the text files"
            )
        parts = self._select(parts, selection)
        lists = {f"{task}/image_splits/{name}" for task in _NAMES for name in list_files(self.folder, f"{task}/image_splits")}
        for part in parts:
            if part.images not in lists:
                raise InputError(
                    f"{self.folder.path_of(part.name)!r} has no image list: {self.folder.path_of(part.images)!r} does not exist. "
                    f"Fetch it, or remove the text file from 'raw'"
                )
        return parts

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions of a text file with its image list."""
        texts, images = count_lines(self.folder, part.name), count_lines(self.folder, part.images)
        if texts != images:
            raise InputError(
                f"{self.folder.path_of(part.name)!r} has {texts} lines, but its image list {self.folder.path_of(part.images)!r} "
                f"has {images}: line N of one belongs to line N of the other. One was cut short or edited; fetch both again"
            )
        if not texts:
            raise InputError(f"{self.folder.path_of(part.name)!r} holds no captions: fetch it again, or leave its split out")
        for image_id, text in zip(self._image_ids(part.images), read_lines(self.folder, part.name), strict=True):
            yield RawCaption(image_id, part.language, part.portion, part.index, part.split, text)

    def _parts_of(self, task: str) -> list[Part]:
        """Return one part per text file of a task."""
        parts: dict[tuple[str, str, int], Part] = {}
        for file_name in list_files(self.folder, f"{task}/raw"):
            if _NOT_CAPTIONS.fullmatch(file_name):
                continue
            name = f"{task}/raw/{file_name}"
            location = self.folder.path_of(name)
            match = _NAMES[task].fullmatch(file_name.removesuffix(".gz"))
            if match is None:
                raise InputError(
                    f"{location!r} is not named {_FORMS[task]!r}, so split and language are unknown: rename "
                    "it or remove it from 'raw'"
                )
            try:
                language = check_language(match["language"])
            except UsageError as error:
                raise InputError(f"the name of {location!r}: {error}; rename it or remove it from 'raw'") from error
            images = f"{task}/image_splits/{_LISTS[task].format(match['split'])}"
            index = int(match.groupdict().get("number", "1")) - 1
            part = Part(name, images, language, _PORTIONS[task], match["split"], index)
            other = parts.setdefault((part.split, part.language, part.index), part)
            if other is not part:
                raise InputError(f"{self.folder.path_of(other.name)!r} and {location!r} are the same captions: keep one")
        return list(parts.values())

    def _image_ids(self, name: str) -> Iterator[str]:
        """Yield the image ids of a list, without caption ids (``NAME.jpg#367178``)."""
        lines = f"{self.folder.path_of(name)!r}, line "
        for line_number, line in enumerate(read_lines(self.folder, name), start=1):
            yield image_id_of(line.partition("#")[0], self.ids, place=f"{lines}{line_number}")

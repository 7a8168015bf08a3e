"""Captions in the ``*_precomp`` folders of VSE++ and SCAN.

``SPLIT_caps.txt`` holds one caption per line, grouped by image. An optional ``SPLIT_ids.txt`` holds image ids: one line per image,
or per caption (VSE++ repeats each image). Without it each image has five captions, as the loaders of both assume, and ids such as
``test-7``, counted from 0. Splits keep their names (``train``, ``dev``, ``test``, ``testall``). ``export`` writes this layout.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Self

from pipelines.inputs.captions.base import COMPARABLE, CaptionSource, Part, RawCaption, Selection, find_splits
from pipelines.inputs.files import count_lines, list_files, read_lines
from schemas.errors import InputError
from schemas.keys import check_image_id
from schemas.storage.folder import Folder

_FILE = r"(.+)_caps\.txt(?:\.gz)?"
_PER_IMAGE = 5


@dataclass(frozen=True)
class ScanSource(CaptionSource):
    """The captions of one or more ``SPLIT_caps.txt``."""

    folder: Folder
    files: tuple[Part, ...]
    language: str
    ids = "name"

    @classmethod
    def open(cls, location: str, *, language: str) -> Self:
        """Open one file, or all ``SPLIT_caps.txt`` of a folder, with their ids.

        Raises:
            InputError: the folder contains none, a file name does not contain a split, or two contain the same.
        """
        folder, splits = find_splits(location, _FILE, "SPLIT_caps.txt")
        present = set(list_files(folder))
        files = []
        for split, name in splits.items():
            ids = next((list_ for list_ in (f"{split}_ids.txt", f"{split}_ids.txt.gz") if list_ in present), "")
            files.append(Part(name, ids, language, COMPARABLE, split))
        return cls(folder, tuple(files), language)

    @property
    def repeat_advice(self) -> str:
        """Advice for an image in two splits."""
        return (
            "If both describe one image, read one split with --splits; if they describe two, give each an "
            "id of its own in 'SPLIT_ids.txt'"
        )

    def parts(self, selection: Selection) -> list[Part]:
        """Return one part per file of captions."""
        return self._select(self.files, selection)

    def read(self, part: Part, selection: Selection) -> Iterator[RawCaption]:
        """Yield the captions of one split."""
        captions = count_lines(self.folder, part.name)
        counts: Counter[str] = Counter()
        for image_id, text in zip(self._image_ids(part, captions), read_lines(self.folder, part.name), strict=True):
            yield RawCaption(image_id, part.language, part.portion, counts[image_id], part.split, text)
            counts[image_id] += 1

    def _image_ids(self, part: Part, captions: int) -> Iterator[str]:
        """Yield the image id of each caption of a split."""
        location = self.folder.path_of(part.name)
        if not part.images:
            if captions % _PER_IMAGE:
                raise InputError(
                    f"{location!r} has {captions:,} captions, expected {_PER_IMAGE} for each image, or their image ids in "
                    f"'{part.split}_ids.txt': was it cut short? Fetch it again, or write the image id of each caption"
                )
            yield from (f"{part.split}-{line // _PER_IMAGE}" for line in range(captions))
            return
        list_location = self.folder.path_of(part.images)
        images = count_lines(self.folder, part.images)
        if not images or captions % images:
            raise InputError(
                f"{location!r} has {captions:,} captions, but {list_location!r} has {images:,} ids: expected the same number of "
                "captions for each id. One was cut short or edited; fetch both again"
            )
        line_of: dict[str, int] = {}
        places = f"{list_location!r}, line "
        for line_number, line in enumerate(read_lines(self.folder, part.images), start=1):
            image_id = check_image_id(line, place=f"{places}{line_number}")
            if images < captions and (other := line_of.setdefault(image_id, line_number)) != line_number:
                raise InputError(
                    f"{list_location!r} has an id for {captions // images} captions each, but the lines {other} and "
                    f"{line_number} are both {image_id!r}: give each image an id of its own, or list the id of every caption"
                )
            yield from repeat(image_id, captions // images)

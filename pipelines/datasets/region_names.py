"""What the classes and attributes of regions are called: text files beside the shards, for people.

``names/classes.txt`` and ``names/attributes.txt`` hold one name a line: line ``N`` names id ``N``, since 0 is the background, or no
attribute. They are listed in the manifest and no part of the dataset's identity: names change no feature.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from extractors import Description
from extractors.regions.class_names import read_names
from extractors.settings import RegionOptions
from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError
from schemas.storage import Folder

__all__ = ["NAMES_FILES", "NamedRegion", "RegionNames", "named_regions", "names_files", "stored_names"]

_CLASSES = "names/classes.txt"
_ATTRIBUTES = "names/attributes.txt"
NAMES_FILES = "|".join(map(re.escape, (_CLASSES, _ATTRIBUTES)))
"""Regular expression of the paths of these files within a dataset."""


@dataclass(frozen=True)
class RegionNames:
    """Names by id, as far as a dataset has them.

    Attributes:
        classes: of ids 1, 2, ...; empty where nobody named them.
        attributes: likewise.
    """

    classes: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset) -> RegionNames:
        """The names that a dataset holds.

        Raises:
            DatasetError: a file that the manifest lists is not there.
        """
        listed = {entry.path for entry in dataset.manifest.files}
        try:
            found = [_lines(dataset.folder.read(name)) if name in listed else () for name in (_CLASSES, _ATTRIBUTES)]
        except FileNotFoundError as error:
            raise DatasetError(
                f"the names of {dataset.folder.location!r} are listed in the manifest but not there: copy the whole folder again"
            ) from error
        return cls(*found)

    def label(self, class_id: int, attribute_id: int = 0) -> str:
        """What a region shows, e.g. ``blue sky``; ids where there are no names, empty for the background without attribute.

        Of a line with several names, separated by commas, the first is taken.
        """
        name, attribute = _name(self.classes, class_id, "class"), _name(self.attributes, attribute_id, "attribute")
        if self.attributes:
            return f"{attribute} {name}".strip()
        return ", ".join(filter(None, (name, attribute)))


class NamedRegion(NamedTuple):
    """A region as people see it.

    Attributes:
        text: name and score of its class, e.g. ``blue sky 0.93``.
        class_id: its class.
        xyxy: its corners, in pixels of the picture.
    """

    text: str
    class_id: int
    xyxy: tuple[float, float, float, float]


def named_regions(row: Mapping[str, Any], names: RegionNames) -> list[NamedRegion]:
    """The regions of an image, the best by the score of their class first.

    Args:
        row: a row of a dataset of kind ``regions``.
        names: of its classes and attributes.
    """
    used = int(row["num_regions"])
    columns = (row["class_scores"], row["class_ids"], row["attribute_ids"], np.reshape(row["boxes"], (-1, 4)))
    scores, classes, attributes, boxes = (np.asarray(values)[:used] for values in columns)
    found = []
    for region in np.argsort(-scores, kind="stable").tolist():
        label = names.label(int(classes[region]), int(attributes[region])) or f"region {region + 1}"
        text = f"{label} {scores[region]:.2f}" if scores[region] else label  # Imported regions may have no scores.
        x1, y1, x2, y2 = boxes[region].tolist()
        found.append(NamedRegion(text, int(classes[region]), (x1, y1, x2, y2)))
    return found


def _name(names: tuple[str, ...], number: int, what: str) -> str:
    if number <= 0:
        return ""
    return names[number - 1].split(",")[0] if number <= len(names) else f"{what} {number}"


def _lines(data: bytes) -> tuple[str, ...]:
    return tuple(data.decode("utf-8", errors="replace").split("\n")[:-1])


def names_files(options: RegionOptions | None, description: Description) -> dict[str, bytes]:
    """Reads the names that a user gave.

    Args:
        options: their files.
        description: of the extractor, which says how many classes and attributes there are.

    Returns:
        The files that the dataset gets, by name.

    Raises:
        UsageError: names were given of what the extractor does not tell.
        InputError: a file is missing, or does not hold a name for each.
    """
    given = ((_CLASSES, "class", description.classes), (_ATTRIBUTES, "attribute", description.attributes))
    files = {}
    for name, what, expected in given:
        path = getattr(options, f"{what}_names") if options is not None else None
        if path is None:
            continue
        if not expected:
            raise UsageError(
                f"--{what}-names is given, and the regions of {description.spec.name!r} have no {what}: leave the option out"
            )
        files[name] = "".join(f"{line}\n" for line in read_names(Path(path).expanduser(), expected)).encode()
    return files


def stored_names(folder: Folder, description: Description) -> Mapping[str, bytes]:
    """The files with names that lie in the folder of a dataset, or of one that is being made, where an extractor has as many."""
    expected = {_CLASSES: description.classes, _ATTRIBUTES: description.attributes}
    found = {name: folder.read(name) for name in expected if folder.size(name) is not None}
    return {name: data for name, data in found.items() if len(_lines(data)) == expected[name]}

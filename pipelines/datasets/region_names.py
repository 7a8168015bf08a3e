"""Class and attribute names of regions, in text files of a dataset.

``_names/classes`` and ``_names/attributes`` hold one name per line: line ``N`` names id ``N``; id 0 is the background or no
attribute. The manifest lists them, but they are not part of the dataset's fingerprint, since features do not depend on names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from extractors import Description
from extractors.options import RegionOptions
from schemas.dataset import Dataset
from schemas.errors import InputError, UsageError
from schemas.storage.folder import Folder
from schemas.storage.locations import local_path
from schemas.text import read_text

# Without an extension: some tools infer the data format from the most frequent extension of a folder.
_CLASSES = "_names/classes"
_ATTRIBUTES = "_names/attributes"
NAMES_FILES = f"{_CLASSES}|{_ATTRIBUTES}"
"""Regular expression of the paths of these files within a dataset."""


def read_names(path: Path, expected: int) -> tuple[str, ...]:
    """Read names from a UTF-8 file with one name per line.

    A line with synonyms, ``gray,grey``, is one name and stays as it is. The first name is that of id 1.

    Raises:
        InputError: the file is missing or not text, a line is empty, or the number of names differs.
    """
    text = read_text(path)
    names = tuple(line.strip() for line in text.rstrip().split("\n")) if text.strip() else ()
    if "" in names:
        raise InputError(
            f"line {names.index('') + 1} of {str(path)!r} is empty: expected one name per line; remove it or add the name"
        )
    if len(names) != expected:
        raise InputError(
            f"{str(path)!r} has {len(names)} names, expected {expected}, one per line, without one for id 0 (background, or no "
            "attribute): pass the file of the classes as class names and that of the attributes as attribute names"
        )
    return names


@dataclass(frozen=True)
class RegionNames:
    """Names of the ids 1, 2, ...; empty without names."""

    classes: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset) -> Self:
        """Read the names that a dataset holds.

        Raises:
            DatasetError: a file that the manifest lists is missing or damaged.
        """
        listed = {entry.path: entry for entry in dataset.manifest.files}
        stored = (listed.get(name) for name in (_CLASSES, _ATTRIBUTES))
        return cls(*(() if entry is None else _split_lines(dataset.read_file(entry)) for entry in stored))

    def label(self, class_id: int, attribute_id: int = 0) -> str:
        """Return the label of a region, e.g. ``blue sky``, or ids if names are missing.

        The label has the first of several synonyms, and is empty for the background without attribute.
        """
        name, attribute = _name(self.classes, class_id, "class"), _name(self.attributes, attribute_id, "attribute")
        if self.attributes:
            return f"{attribute} {name}".strip()
        return ", ".join(filter(None, (name, attribute)))


class NamedRegion(NamedTuple):
    """A region with its label.

    Attributes:
        text: label and score, e.g. ``blue sky 0.93``.
        xyxy: its corners, in pixels of the picture.
    """

    text: str
    class_id: int
    xyxy: tuple[float, float, float, float]


def named_regions(row: Mapping[str, Any], names: RegionNames) -> list[NamedRegion]:
    """Return the regions of a row, the best class score first."""
    used = int(row["num_regions"])
    columns = (row["class_scores"], row["class_ids"], row["attribute_ids"], np.reshape(row["boxes"], (-1, 4)))
    scores, classes, attributes, boxes = (np.asarray(values)[:used] for values in columns)
    regions = []
    for region in np.argsort(-scores, kind="stable").tolist():
        label = names.label(int(classes[region]), int(attributes[region])) or f"region {region + 1}"
        text = f"{label} {scores[region]:.2f}" if scores[region] else label  # Imported regions may have no scores.
        x1, y1, x2, y2 = boxes[region].tolist()
        regions.append(NamedRegion(text, int(classes[region]), (x1, y1, x2, y2)))
    return regions


def _name(names: tuple[str, ...], label_id: int, noun: str) -> str:
    if label_id <= 0:
        return ""
    return names[label_id - 1].split(",")[0] if label_id <= len(names) else f"{noun} {label_id}"


def _split_lines(data: bytes) -> tuple[str, ...]:
    return tuple(data.decode("utf-8", errors="replace").split("\n")[:-1])


def names_files(options: RegionOptions | None, description: Description) -> dict[str, bytes]:
    """Return the files with names for a dataset, by path.

    Raises:
        UsageError: the extractor has no classes or attributes to name.
        InputError: a file is missing, or has another number of names.
    """
    expected = ((_CLASSES, "class", description.classes), (_ATTRIBUTES, "attribute", description.attributes))
    files = {}
    for name, noun, count in expected:
        path = getattr(options, f"{noun}_names", None)
        if path is None:
            continue
        if not count:
            raise UsageError(f"--{noun}-names: the regions of {description.spec.name!r} have no {noun}, leave the option out")
        files[name] = "".join(f"{line}\n" for line in read_names(local_path(path), count)).encode()
    return files


def stored_names(folder: Folder, description: Description) -> Mapping[str, bytes]:
    """Read the files with names that match the extractor from a dataset's folder."""
    expected = {_CLASSES: description.classes, _ATTRIBUTES: description.attributes}
    files = {name: folder.read(name) for name in expected if folder.stat(name) is not None}
    return {name: data for name, data in files.items() if len(_split_lines(data)) == expected[name]}

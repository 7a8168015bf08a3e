"""Regions in the tsv files of bottom-up-attention and of its PyTorch port: one line an image, arrays in base64.

The files are read twice: once to index and check every line, and once line by line as shards need them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.exchange.importers.base import IdRule, local_file, make_image_id
from schemas.errors import InputError

__all__ = ["BOTTOM_UP", "LXMERT", "TsvFiles"]

BOTTOM_UP = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
"""Columns as peteanderson80/bottom-up-attention writes them."""
LXMERT = (
    "img_id",
    "img_h",
    "img_w",
    "objects_id",
    "objects_conf",
    "attrs_id",
    "attrs_conf",
    "num_boxes",
    "boxes",
    "features",
)
"""Columns as airsplay/lxmert and airsplay/py-bottom-up-attention write them, and LXMERT reads them. Height stands before width.

Their ids of classes and attributes count from 0, without background and none, where those of `regions` count from 1.
"""

_NAMES = {
    "img_id": "image_id",
    "img_w": "image_w",
    "img_h": "image_h",
    "objects_id": "class_ids",
    "objects_conf": "class_scores",
    "attrs_id": "attribute_ids",
    "attrs_conf": "attribute_scores",
}
# Column, type in the file, values a box.
_ARRAYS: dict[str, tuple[np.dtype, int]] = {
    "boxes": (np.dtype("<f4"), 4),
    "class_ids": (np.dtype("<i8"), 1),
    "class_scores": (np.dtype("<f4"), 1),
    "attribute_ids": (np.dtype("<i8"), 1),
    "attribute_scores": (np.dtype("<f4"), 1),
}


@dataclass(frozen=True)
class _Line:
    """Where a line begins, and what it says about its image."""

    file: int
    offset: int
    number: int


@dataclass
class TsvFiles:
    """tsv files with regions, one behind the other.

    Attributes:
        files: the files.
        id_rule: what of a file name is the image id.
        regions: most regions of an image that are stored.
    """

    files: Sequence[str]
    id_rule: IdRule = "name"
    regions: int = 36
    _lines: list[_Line] = field(default_factory=list, init=False, repr=False)
    _image_ids: list[str] = field(default_factory=list, init=False, repr=False)
    _width: int = field(default=0, init=False, repr=False)
    _most: tuple[int, str] = field(default=(0, ""), init=False, repr=False)

    def __post_init__(self) -> None:
        self._paths = [local_file(each) for each in self.files]
        self._columns: list[list[str]] = []
        self._inputs: list[dict[str, Any]] = []
        for number, path in enumerate(self._paths):
            self._scan(number, path)
        if not self._lines:
            raise InputError(f"{self._paths[0].name} holds no images, expected one a line")
        most, place = self._most
        if most > self.regions:
            raise InputError(
                f"{place}: an image with {most} regions, at most {self.regions} are stored: give --max-regions {most}"
            )
        if not self._width:
            raise InputError(f"{self._paths[0].name} holds no regions at all, so that the size of a feature is not known")

    def _scan(self, file: int, path: Path) -> None:
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                digest.update(line)
                if number == 1:
                    self._columns.append(_columns_of(line, path))
                    if _is_header(line):
                        offset += len(line)
                        continue
                self._index(_Line(file, offset, number), line)
                offset += len(line)
        if not offset:
            raise InputError(f"{path.name} is empty")
        self._inputs.append({"name": path.name, "bytes": offset, "sha256": digest.hexdigest()})

    def _index(self, where: _Line, line: bytes) -> None:
        row = self._parse(where, line)
        width = row["features"].shape[1]
        if row["num_regions"] and self._width not in (0, width):
            raise InputError(
                f"{self._place(where)}: image {row['image_id']!r} has features of {width} values, those before it "
                f"{self._width}: the file holds features of several models, or is damaged"
            )
        self._width = self._width or width
        if row["num_regions"] > self._most[0]:
            self._most = (row["num_regions"], self._place(where))
        self._lines.append(where)
        self._image_ids.append(row["image_id"])

    def _parse(self, where: _Line, line: bytes) -> dict[str, Any]:
        place, names = self._place(where), self._columns[where.file]
        parts = line.rstrip(b"\r\n").split(b"\t")
        if len(parts) != len(names):
            raise InputError(f"{place} has {len(parts)} columns, expected {len(names)} ({', '.join(names)})")
        fields = dict(zip(names, parts, strict=True))
        try:
            image_id = make_image_id(fields["image_id"].decode(), self.id_rule, place=place)
            width, height, boxes = (int(fields[name]) for name in ("image_w", "image_h", "num_boxes"))
        except ValueError as error:
            raise InputError(f"{place}: width, height and num_boxes must be numbers and the image id UTF-8: {error}") from error
        if boxes < 0 or not (0 <= width < 2**31 and 0 <= height < 2**31):
            raise InputError(f"{place}: width {width}, height {height} and num_boxes {boxes} are no sizes of an image")
        row: dict[str, Any] = {"image_id": image_id, "width": width, "height": height, "num_regions": boxes}
        for name, (dtype, values) in _ARRAYS.items():
            if name in fields:
                row[name] = _decode(fields[name], dtype, boxes, values, place=place, name=name)
        row["features"] = _decode(fields["features"], np.dtype("<f4"), boxes, None, place=place, name="features")
        for name in ("class_ids", "attribute_ids"):
            if name in row:
                row[name] = _ids_from_one(row[name], place=place, name=name)
        return row

    def _place(self, where: _Line) -> str:
        return f"{self._paths[where.file].name}, line {where.number}"

    @property
    def kind(self) -> str:
        """Always ``regions``."""
        return "regions"

    @property
    def shape(self) -> tuple[int, ...]:
        """Regions that are stored, and values of one."""
        return (self.regions, self._width)

    @property
    def dtype(self) -> np.dtype:
        """Always float32."""
        return np.dtype(np.float32)

    @property
    def image_ids(self) -> Sequence[str]:
        """The image id of each line."""
        return self._image_ids

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """The files."""
        return self._inputs

    @property
    def parameters(self) -> dict[str, Any]:
        """What image ids are made of, and what was done to the labels."""
        labelled = any("class_ids" in names for names in self._columns)
        return {"id_rule": self.id_rule} | ({"labels": "from 1"} if labelled else {})

    def place(self, row: int) -> str:
        """File and line, from 1."""
        return self._place(self._lines[row])

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Reads these lines again."""
        found: dict[str, np.ndarray] = {}
        for name in ("width", "height", "num_regions"):
            found[name] = np.zeros(len(rows), np.int32)
        for name, (dtype, values) in _ARRAYS.items():
            found[name] = np.zeros((len(rows), self.regions * values), dtype).reshape(len(rows), self.regions, values)
        found["features"] = np.zeros((len(rows), self.regions, self._width), np.float32)
        streams = {number: self._paths[number].open("rb") for number in {self._lines[row].file for row in rows}}
        try:
            for target, row in enumerate(rows):
                where = self._lines[row]
                streams[where.file].seek(where.offset)
                for name, value in self._parse(where, streams[where.file].readline()).items():
                    if name in ("width", "height", "num_regions"):
                        found[name][target] = value
                    elif name != "image_id" and len(value):
                        found[name][target, : len(value)] = value
        finally:
            for stream in streams.values():
                stream.close()
        return found


def _is_header(line: bytes) -> bool:
    return line.split(b"\t", 1)[0] in (b"image_id", b"img_id")


def _columns_of(line: bytes, path: Path) -> list[str]:
    """Names of the columns: those of the header, or by their number where there is none."""
    parts = line.rstrip(b"\r\n").split(b"\t")
    by_number: dict[int, Sequence[str]] = {len(each): each for each in (BOTTOM_UP, LXMERT)}
    names = [part.decode(errors="replace") for part in parts] if _is_header(line) else by_number.get(len(parts), ())
    names = [_NAMES.get(name, name) for name in names]
    missing = [name for name in BOTTOM_UP if name not in names]
    if missing:
        raise InputError(
            f"{path.name} has {len(parts)} columns and lacks {', '.join(missing)}: expected the {len(BOTTOM_UP)} columns of "
            f"bottom-up-attention ({', '.join(BOTTOM_UP)}) or the {len(LXMERT)} of its PyTorch port ({', '.join(LXMERT)})"
        )
    return names


def _ids_from_one(ids: np.ndarray, *, place: str, name: str) -> np.ndarray:
    """From ids that count from 0, where -1 is none, to ids that count from 1."""
    if len(ids) and (ids.min() < -1 or ids.max() >= 2**15 - 1):
        raise InputError(f"{place}: {name} lie between {ids.min()} and {ids.max()}, expected 0 to 32766, or -1 for none")
    return ids + 1


def _decode(text: bytes, dtype: np.dtype, boxes: int, width: int | None, *, place: str, name: str) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InputError(
            f"{place}: column {name!r} is no base64 ({error}): the file is damaged or was written as text"
        ) from error
    unit = dtype.itemsize * boxes * (width or 1)
    if (len(data) != unit) if width or not boxes else (not data or len(data) % unit):
        expected = f"{unit}" if width or not boxes else f"a multiple of {unit}"
        raise InputError(f"{place}: column {name!r} has {len(data)} bytes, expected {expected} for {boxes} boxes")
    return np.frombuffer(data, dtype=dtype).reshape(boxes, -1) if boxes else np.zeros((0, width or 0), dtype)

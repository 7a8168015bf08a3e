"""Regions in the tsv files of bottom-up-attention and of its PyTorch port.

A line holds an image, with arrays in base64. The files are read twice: first to index and check every line,
then line by line as shards need them.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.exchange.exporters.base import apply_sidecars
from pipelines.exchange.exporters.tsv import ARRAYS, BOTTOM_UP, LXMERT
from pipelines.exchange.image_lists import local_file
from pipelines.exchange.importers.base import FeatureFiles
from pipelines.exchange.importers.image_ids import ImageIds
from pipelines.exchange.jobs import ImportJob
from schemas.errors import InputError
from schemas.kinds import REGIONS
from schemas.text import HEAD, mark_length

_NAMES = {"img_id": "image_id", "img_w": "image_w", "img_h": "image_h"}
_NAMES |= {theirs: ours for theirs, (ours, _) in ARRAYS.items()}
_FLOAT = np.dtype("<f4")
_SIZES = ("width", "height", "num_regions")
# Column -> type in the file and values per box.
_ARRAYS: dict[str, tuple[np.dtype, int]] = {
    ours: (np.dtype(dtype), 4 if ours == "boxes" else 1) for ours, dtype in ARRAYS.values() if ours != "features"
}


class _Line(NamedTuple):
    """The place of a line: index of the file, byte offset, line number from 1."""

    file: int
    offset: int
    line_number: int


def open_tsv(job: ImportJob) -> FeatureFiles:
    """Read every line once, index it and check it.

    Raises:
        ImagepivotError: a file is missing or damaged, or the files do not belong together.
    """
    files = _TsvFiles(job)
    labelled = any("class_ids" in names for names in files.columns)
    return FeatureFiles(
        "regions",
        (files.max_regions, files.width),
        np.dtype(np.float32),
        files.image_ids,
        lambda: files.inputs + files.ids.inputs,
        files.ids.parameters | ({"labels": "from 1"} if labelled else {}),
        lambda row: files.place(files.lines[row]),
        files.read,
    )


class _TsvFiles:
    """Indexed tsv files with regions, concatenated."""

    def __init__(self, job: ImportJob) -> None:
        self.paths = [local_file(location) for location in job.sources]
        job = apply_sidecars(job, self.paths)
        self.max_regions = job.max_regions or REGIONS
        self.ids = ImageIds(job.id_rule or "name", job.karpathy, job.karpathy_key)
        self.columns: list[list[str]] = []
        self.inputs: list[dict[str, Any]] = []
        self.lines: list[_Line] = []
        self.image_ids: list[str] = []
        self.width = 0
        self._longest = (0, "")  # Number of regions and place of the line that has the most.
        for index, path in enumerate(self.paths):
            self._scan(index, path)
        if not self.lines:
            raise InputError(f"{self.paths[0].name} holds no images, expected one per line")
        num_regions, place = self._longest
        if num_regions > self.max_regions:
            raise InputError(
                f"{place}: an image with {num_regions} regions, at most {self.max_regions} are stored: give "
                f"--max-regions {num_regions}"
            )
        if not self.width:
            raise InputError(f"{self.paths[0].name} holds no regions at all, so the size of a feature is unknown")

    def _scan(self, file: int, path: Path) -> None:
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as stream:
            mark = stream.read(mark_length(stream.peek(HEAD)[:HEAD], str(path)))
            digest.update(mark)
            offset += len(mark)
            for line_number, line in enumerate(stream, 1):
                digest.update(line)
                if line_number == 1:
                    self.columns.append(_columns_of(line, path))
                if line_number > 1 or not _is_header(line):
                    self._index(_Line(file, offset, line_number), line)
                offset += len(line)
        if len(self.columns) == file:
            raise InputError(f"{path.name} is empty")
        self.inputs.append({"name": path.name, "bytes": offset, "sha256": digest.hexdigest()})

    def _index(self, entry: _Line, line: bytes) -> None:
        row, place = self._parse(entry, line), self.place(entry)
        width = row["features"].shape[1]
        if row["num_regions"] and self.width not in (0, width):
            raise InputError(
                f"{place}: image {row['image_id']!r} has features of {width} values, those before it "
                f"{self.width}: the file holds features of several models, or is damaged"
            )
        self.width = self.width or width
        if row["num_regions"] > self._longest[0]:
            self._longest = (row["num_regions"], place)
        self.lines.append(entry)
        self.image_ids.append(self.ids.read(row["image_id"], place=place))

    def _parse(self, entry: _Line, line: bytes) -> dict[str, Any]:
        place, names = self.place(entry), self.columns[entry.file]
        parts = _split_cells(line)
        if len(parts) != len(names):
            raise InputError(f"{place} has {len(parts)} columns, expected {len(names)} ({', '.join(names)})")
        fields = dict(zip(names, parts, strict=True))
        try:
            image_id = fields["image_id"].decode()
            width, height, boxes = (int(fields[name]) for name in ("image_w", "image_h", "num_boxes"))
        except ValueError as error:
            raise InputError(f"{place}: width, height and num_boxes must be numbers and the image id UTF-8: {error}") from error
        if boxes < 0 or not (0 <= width < 2**31 and 0 <= height < 2**31):
            raise InputError(f"{place}: width {width}, height {height} and num_boxes {boxes} are not sizes of an image")
        row: dict[str, Any] = {"image_id": image_id, "width": width, "height": height, "num_regions": boxes}
        for name, (dtype, values) in {**_ARRAYS, "features": (_FLOAT, None)}.items():
            if name in fields:
                row[name] = _decode_base64(fields[name], dtype, boxes, values, place=place, name=name)
        for name in ("class_ids", "attribute_ids"):
            if name in row:
                ids = row[name]
                if len(ids) and (ids.min() < -1 or ids.max() >= 2**15 - 1):
                    limits = f"{ids.min()} and {ids.max()}"
                    raise InputError(f"{place}: {name} lie between {limits}, expected 0 to 32766, or -1 for none")
                row[name] = ids + 1  # Stored ids count from 1; 0 is none.
        return row

    def place(self, entry: _Line) -> str:
        """Return file and line, counted from 1."""
        return f"{self.paths[entry.file].name}, line {entry.line_number}"

    def read(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Read lines again, and return their columns."""
        columns = {name: np.zeros(len(rows), np.int32) for name in _SIZES}
        for name, (dtype, values) in {**_ARRAYS, "features": (_FLOAT, self.width)}.items():
            columns[name] = np.zeros((len(rows), self.max_regions, values), dtype)
        with ExitStack() as stack:
            files = {self.lines[row].file for row in rows}
            streams = {file: stack.enter_context(self.paths[file].open("rb")) for file in files}
            for index, row in enumerate(rows):
                entry = self.lines[row]
                streams[entry.file].seek(entry.offset)
                parsed = self._parse(entry, streams[entry.file].readline())
                for name in columns.keys() & parsed.keys():
                    if name in _SIZES:
                        columns[name][index] = parsed[name]
                    elif len(parsed[name]):
                        columns[name][index, : len(parsed[name])] = parsed[name]
        return columns


def _split_cells(line: bytes) -> list[bytes]:
    return line.rstrip(b"\r\n").split(b"\t")


def _is_header(line: bytes) -> bool:
    parts = _split_cells(line)
    return parts[0] in (b"image_id", b"img_id") and b"num_boxes" in parts  # The id of an image may be "image_id".


def _columns_of(line: bytes, path: Path) -> list[str]:
    """Return the column names from the header, or by their number."""
    parts = _split_cells(line)
    by_count: dict[int, Sequence[str]] = {len(columns): columns for columns in (BOTTOM_UP, LXMERT)}
    names = [part.decode(errors="replace") for part in parts] if _is_header(line) else by_count.get(len(parts), ())
    names = [_NAMES.get(name, name) for name in names]
    missing = [name for name in BOTTOM_UP if name not in names]
    if missing:
        raise InputError(
            f"{path.name} has {len(parts)} columns and lacks {', '.join(missing)}: expected the {len(BOTTOM_UP)} columns of "
            f"bottom-up-attention ({', '.join(BOTTOM_UP)}) or the {len(LXMERT)} of its PyTorch port ({', '.join(LXMERT)})"
        )
    return names


def _decode_base64(text: bytes, dtype: np.dtype, boxes: int, width: int | None, *, place: str, name: str) -> np.ndarray:
    """Decode an array ``[boxes, width]``; the width None is that of the data."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InputError(
            f"{place}: column {name!r} is not base64 ({error}): the file is damaged or was written as text"
        ) from error
    unit = dtype.itemsize * boxes * (width or 1)
    if (len(data) != unit) if width or not boxes else (not data or len(data) % unit):
        expected = f"{unit}" if width or not boxes else f"a multiple of {unit}"
        raise InputError(f"{place}: column {name!r} has {len(data)} bytes, expected {expected} for {boxes} boxes")
    return np.frombuffer(data, dtype=dtype).reshape(boxes, -1) if boxes else np.zeros((0, width or 0), dtype)

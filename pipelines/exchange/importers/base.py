"""What every reader of imported features has in common: files, ids, stored types, and rows of regions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_file
from schemas.kinds import schema_of
from schemas.storage import is_remote

__all__ = [
    "FeatureFiles",
    "IdRule",
    "ImportedFile",
    "check_finite",
    "local_file",
    "make_image_id",
    "pad_regions",
    "read_ids",
    "stored_dtype",
    "table_of",
]

IdRule = Literal["name", "path", "exact"]
"""What of an entry of a list is the image id: its last component, all of it, both without ``#N`` and extension; or as it is."""

_EXTENSION = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?)$", re.IGNORECASE)
_CAPTION = re.compile(r"#\d+$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPECS = {"f2": "float16", "f4": "float32", "f8": "float32"}


class FeatureFiles(Protocol):
    """Files with features of images, in the order in which they lie there."""

    @property
    def kind(self) -> str:
        """``features`` or ``regions``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature of one image, as it is stored."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the values in the files."""

    @property
    def image_ids(self) -> Sequence[str]:
        """The image id of each row; an image may stand there more than once."""

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """Name, size and SHA-256 of each file."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What besides the bytes of the files determines the rows."""

    def place(self, row: int) -> str:
        """Where a row stands, for people."""

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Values of these rows by column, without the image id; vectors keep their own shape."""


@dataclass(frozen=True)
class ImportedFile:
    """A file that is imported.

    Attributes:
        path: where it is.
    """

    path: Path

    def describe(self) -> dict[str, Any]:
        """Its name, size and SHA-256, for a dataset's identity."""
        with self.path.open("rb") as file:
            return {"name": self.path.name, "bytes": self.path.stat().st_size, "sha256": sha256_of_file(file)}


def local_file(location: str) -> Path:
    """The path of a local file that is there.

    Raises:
        UsageError: it is in an object store.
        InputError: there is no such file.
    """
    if is_remote(location):
        raise UsageError(f"cannot import {location!r}: the files are mapped into memory, copy them to this machine first")
    path = Path(location).expanduser()
    if not path.is_file():
        raise InputError(f"no such file: {location!r}{' is a folder' if path.is_dir() else ''}; check the path")
    return path


def make_image_id(text: str, rule: IdRule, *, place: str) -> str:
    """Image id of an entry of a list, by the rule.

    >>> make_image_id("flickr30k/1000092795.jpg#3", "name", place="line 1")
    '1000092795'

    Raises:
        InputError: nothing is left of it, or it holds a control character.
    """
    image_id = text if rule == "exact" else _EXTENSION.sub("", _CAPTION.sub("", text.strip()))
    image_id = image_id.rpartition("/")[2] if rule == "name" else image_id
    if not image_id or _CONTROL.search(image_id):
        raise InputError(f"{place}: {text!r} is no image id, expected an id or file name of an image")
    return image_id


def read_ids(path: Path, rule: IdRule) -> list[str]:
    """The image ids of a text file, one a line.

    Raises:
        InputError: it is not UTF-8, or a line is empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is no text in UTF-8 ({error}): give a list of image ids, one a line") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    return [make_image_id(line, rule, place=f"{path.name}, line {number}") for number, line in enumerate(lines, 1)]


def stored_dtype(dtype: np.dtype, *, place: str) -> str:
    """The type in which values are stored: float16 and float32 as they are, float64 as float32.

    Raises:
        InputError: they are no such numbers.
    """
    try:
        return _SPECS[f"{dtype.kind}{dtype.itemsize}"]
    except KeyError:
        raise InputError(f"{place} holds {dtype}, expected float16, float32 or float64: convert the array first") from None


def table_of(image_ids: Sequence[str], columns: Mapping[str, np.ndarray], kind: str, spec: FeatureSpec) -> pa.Table:
    """Rows of a dataset; values are converted to the stored type."""
    schema = schema_of(kind, spec)
    arrays = [pa.array(image_ids, type=pa.string())]
    for field in list(schema)[1:]:
        vector = pa.types.is_fixed_size_list(field.type)
        dtype = (field.type.value_type if vector else field.type).to_pandas_dtype()
        with np.errstate(over="ignore"):  # What does not fit becomes infinite, which `check_finite` reports.
            flat = pa.array(np.ascontiguousarray(columns[field.name], dtype=dtype).ravel())
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if vector else flat)
    return pa.Table.from_arrays(arrays, schema=schema)


def pad_regions(values: np.ndarray, regions: int) -> np.ndarray:
    """An array of fewer regions, its second axis filled up with zeros: ``(N, r, ...)`` to ``(N, regions, ...)``."""
    if values.shape[1] == regions:
        return values
    padded = np.zeros((len(values), regions, *values.shape[2:]), dtype=values.dtype)
    padded[:, : values.shape[1]] = values
    return padded


def check_finite(table: pa.Table) -> np.ndarray:
    """Number of values of each row that are not finite."""
    bad = np.zeros(table.num_rows, dtype=np.int64)
    for column in table.schema:
        if pa.types.is_fixed_size_list(column.type) and pa.types.is_floating(column.type.value_type):
            values = table[column.name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1)
            bad += values.shape[1] - np.isfinite(values).sum(axis=1)
    return bad

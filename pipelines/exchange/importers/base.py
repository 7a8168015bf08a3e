"""Interface of the readers of imported features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.errors import InputError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_file
from schemas.kinds import numpy_type, schema_of

_STORED_DTYPES = {"f2": "float16", "f4": "float32", "f8": "float32"}


@dataclass(frozen=True)
class FeatureFiles:
    """Open files with features, in the order of the files.

    Attributes:
        kind: ``features`` or ``regions``.
        shape: shape of the stored feature of one image.
        dtype: type of the values in the files.
        image_ids: image id of each row; an image may occur more than once.
        inputs: returns name, size and SHA-256 of each file.
        parameters: options that determine the rows, besides the bytes of the files.
        place: returns file and position of a row, for messages.
        columns: returns the values of rows by column, without the image id; vectors keep their shape.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    image_ids: Sequence[str]
    inputs: Callable[[], list[dict[str, Any]]]
    parameters: Mapping[str, Any]
    place: Callable[[int], str]
    columns: Callable[[Sequence[int]], dict[str, np.ndarray]]


def describe_file(path: Path) -> dict[str, Any]:
    """Return name, size in bytes and SHA-256 of a file, for a dataset's inputs."""
    with path.open("rb") as file:
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of_file(file)}


def stored_dtype(dtype: np.dtype, *, place: str) -> str:
    """Return the stored dtype: float16 or float32, also for float64.

    Raises:
        InputError: the values have another type.
    """
    try:
        return _STORED_DTYPES[f"{dtype.kind}{dtype.itemsize}"]
    except KeyError:
        raise InputError(f"{place} holds {dtype}, expected float16, float32 or float64: convert the array first") from None


def table_of(image_ids: Sequence[str], columns: Mapping[str, np.ndarray], kind: str, spec: FeatureSpec) -> pa.Table:
    """Build rows of a dataset, with values converted to the stored types."""
    schema = schema_of(kind, spec)
    arrays = [pa.array(image_ids, type=pa.string())]
    for field in list(schema)[1:]:
        vector = pa.types.is_fixed_size_list(field.type)
        dtype = numpy_type(field.type)
        with np.errstate(over="ignore"):  # Overflow becomes inf, which `check_finite` reports.
            flat = pa.array(np.ascontiguousarray(columns[field.name], dtype=dtype).ravel())
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if vector else flat)
    return pa.Table.from_arrays(arrays, schema=schema)


def check_finite(table: pa.Table) -> np.ndarray:
    """Count the inf and NaN values of each row."""
    bad = np.zeros(table.num_rows, dtype=np.int64)
    for column in table.schema:
        if pa.types.is_fixed_size_list(column.type) and pa.types.is_floating(column.type.value_type):
            values = table[column.name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1)
            bad += values.shape[1] - np.isfinite(values).sum(axis=1)
    return bad

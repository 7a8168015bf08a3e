"""Interface of the readers of imported features."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.errors import InputError
from schemas.fingerprints import sha256_of_file

_STORED_DTYPES = {"f2": "float16", "f4": "float32", "f8": "float32"}


@dataclass(frozen=True)
class FeatureFiles:
    """Open files with features, in the order of the files.

    Attributes:
        shape: shape of the stored feature of one image.
        image_ids: image id, or whole id of a caption, of each row; it may occur more than once.
        inputs: returns name, size and SHA-256 of each file.
        parameters: options that determine the rows, besides the bytes of the files.
        place: returns file and position of a row, for messages.
        columns: returns the values of rows by column, without the image id; vectors keep their shape.
        captions: key columns of each row, of captions; None for images.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    image_ids: Sequence[str]
    inputs: Callable[[], list[dict[str, Any]]]
    parameters: Mapping[str, Any]
    place: Callable[[int], str]
    columns: Callable[[Sequence[int]], dict[str, np.ndarray]]
    captions: pa.Table | None = None


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

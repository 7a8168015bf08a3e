"""Memory-mapped arrays, for data larger than memory or shared by processes."""

import math
import mmap
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from schemas.fingerprints import sha256_of_json
from schemas.storage.storage_errors import storage_errors
from schemas.writing.locks import exclusive_lock

_BLOCK = bytes(1 << 20)


def mapped_array(
    folder: str | os.PathLike[str],
    identity: object,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    fill: Callable[[np.ndarray], None],
) -> np.ndarray:
    """Memory-map an array from a file, which is written first if necessary.

    The file is written if it is missing, truncated or another array. A single process writes; others wait for it.

    ``identity`` holds JSON values that determine the contents, and the name of the file. ``fill`` writes the values.

    Returns:
        The array, read-only.

    Raises:
        DatasetError: the disk is full, or the folder is not writable.
    """
    content = [identity, list(shape), np.lib.format.dtype_to_descr(np.dtype(dtype))]
    path = Path(folder).expanduser() / f"{sha256_of_json(content)[:32]}.npy"
    with storage_errors(str(path)):
        array = _open_existing(path, shape, dtype)
        if array is not None:
            return array
        with exclusive_lock(path.with_name(f".{path.name}.lock")):
            array = _open_existing(path, shape, dtype)  # Another process may have written it in the meantime.
            if array is None:
                _create(path, shape, dtype, fill)
                array = np.lib.format.open_memmap(path, mode="r")
    return array


def release(array: np.ndarray) -> None:
    """Release the pages of a memory-mapped array, without losing data.

    They would count as memory of the process until memory is short. They remain in the page cache, which
    processes share. Other arrays are ignored.
    """
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def open_field(path: str, name: str) -> np.ndarray:
    """Memory-map a field of a structured array."""
    return np.lib.format.open_memmap(path, mode="r")[name]


def _open_existing(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray | None:
    """Memory-map an existing file; None if it is missing, truncated or another array."""
    header = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    offset = header.tell()
    size = offset + math.prod(shape) * np.dtype(dtype).itemsize
    try:
        with path.open("rb") as file:
            if file.read(offset) != header.getvalue() or path.stat().st_size != size:
                return None
    except FileNotFoundError:
        return None
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)


def _create(path: Path, shape: tuple[int, ...], dtype: DTypeLike, fill: Callable[[np.ndarray], None]) -> None:
    """Write a file atomically, over the partial file of a killed process."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # Written anew, never through a link of this name.
    try:
        array = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=shape)
        _reserve(part)
        fill(array)
        array.flush()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _reserve(path: Path) -> None:
    """Allocate a sparse file: a full disk kills a process that writes a mapped page."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        header = file.read(1 << 12)  # Written back unchanged; the remainder is zeros.
        file.seek(0)
        file.write(header)
        for start in range(len(header), size, len(_BLOCK)):
            file.write(_BLOCK[: size - start])

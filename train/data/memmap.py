"""Arrays that are mapped from files: for data that memory does not hold, or that several processes share."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from schemas.fingerprints import sha256_of_json
from schemas.storage.storage_errors import storage_errors
from schemas.writing.shard_writer import lock_file

_BLOCK = bytes(1 << 20)


def mapped_array(
    folder: str | os.PathLike[str],
    identity: object,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    fill: Callable[[np.ndarray], None],
) -> np.ndarray:
    """Map an array from a file in a folder; the file is made where it is missing, cut off or another array.

    Of several processes that want the same array one makes it, and the others wait. Other files in the folder are left alone.

    Args:
        folder: folder of the files.
        identity: everything that the values depend on, as JSON values; the file is named after it.
        shape: shape of the array.
        dtype: type of the array; may have fields.
        fill: writes the values into a new array.

    Returns:
        The array, read-only.

    Raises:
        DatasetError: the disk is full, or the folder cannot be written to.
    """
    content = [identity, list(shape), np.lib.format.dtype_to_descr(np.dtype(dtype))]
    path = Path(folder).expanduser() / f"{sha256_of_json(content)[:32]}.npy"
    with storage_errors(str(path)):
        array = _opened(path, shape, dtype)
        if array is not None:
            return array
        lock = path.with_name(f".{path.name}.lock")
        handle = lock_file(lock, patience=math.inf)
        try:
            array = _opened(path, shape, dtype)  # Another process may have made it meanwhile.
            if array is None:
                _make(path, shape, dtype, fill)
                array = np.lib.format.open_memmap(path, mode="r")
        finally:
            lock.unlink()
            os.close(handle)
    return array


def release(array: np.ndarray) -> None:
    """Let the pages of a mapped array go that this process holds; nothing is lost, also of what was just written.

    What was read once would stay until memory is short, and count as the memory of this process. The pages remain in the system's
    cache, which other processes share, and come back from there when they are needed.

    Args:
        array: the array, or a part of it. Nothing happens if it is not mapped from a file.
    """
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class MappedField:
    """Stands for a field of a mapped array where it is pickled, which would pickle all of its values."""

    path: str
    name: str

    def open(self) -> np.ndarray:
        """Map the array again."""
        return np.lib.format.open_memmap(self.path, mode="r")[self.name]


def _opened(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray | None:
    """Map a file that is there; None where it does not hold exactly such an array."""
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


def _make(path: Path, shape: tuple[int, ...], dtype: DTypeLike, fill: Callable[[np.ndarray], None]) -> None:
    """Write a file that appears only when it is complete; what a killed process left of it is written over."""
    part = path.with_name(f".{path.name}.part")
    try:
        array = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=shape)
        _reserve(part)
        fill(array)
        array.flush()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _reserve(path: Path) -> None:
    """Take the space of a file that has its size already: writing to a mapped page that finds no space kills the process."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        header = file.read(1 << 12)  # Written back: only what follows is zero.
        file.seek(0)
        file.write(header)
        for start in range(len(header), size, len(_BLOCK)):
            file.write(_BLOCK[: size - start])

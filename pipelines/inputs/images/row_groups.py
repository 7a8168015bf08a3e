"""Cache of Parquet row groups in a temporary file.

Any row costs its row group, and nearly every row group has rows of nearly every shard. The file is unnamed, so it vanishes with the
process, and takes at most half of the free disk space. Further row groups stay in memory, least recently used first to go.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import IO, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.storage.folder import Folder

CACHE_BYTES = 256 << 20
"""Bytes of row groups in memory; a larger row group is cached alone."""


class _InMemory:
    """The values of a row group, None for a null."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column
        self.nbytes: int = column.nbytes

    def value(self, row: int) -> bytes | None:
        value = self._column[row].as_py()
        return None if value is None else bytes(value)


class _OnDisk:
    """The values of a row group in a file, with eight bytes per row in memory."""

    def __init__(self, file: IO[bytes], column: pa.ChunkedArray) -> None:
        self._file = file  # Keeps it open.
        self._ends = array("q", [file.seek(0, os.SEEK_END)])
        self._nulls: set[int] = set()
        for row, scalar in enumerate(column):
            value = scalar.as_py()
            if value is None:
                self._nulls.add(row)
            self._ends.append(self._ends[-1] + len(value or b""))
            _write(file, memoryview(bytes(value or b"")))

    def value(self, row: int) -> bytes | None:
        start, end = self._ends[row], self._ends[row + 1]
        return None if row in self._nulls else os.pread(self._file.fileno(), end - start, start)


Values: TypeAlias = _InMemory | _OnDisk
"""The values of a row group. ``value(row)`` raises IndexError or OSError."""


class RowGroups:
    """Row groups of this process. Threads that need the same one read it once."""

    def __init__(self, memory: int = CACHE_BYTES) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._on_disk: dict[Any, _OnDisk] = {}
        self._in_memory: OrderedDict[Any, _InMemory] = OrderedDict()
        self._file: IO[bytes] | None = None
        self._room = 0

    def get(self, key: Any, load: Callable[[], pa.ChunkedArray]) -> Values:
        """Return the cached or loaded values of a row group; errors are not cached."""
        values: Values | None = self._on_disk.get(key)
        if values is not None:
            return values
        with self._lock:
            values = self._on_disk.get(key) or self._in_memory.get(key) or self._store(key, load())
            if isinstance(values, _InMemory):
                self._in_memory[key] = values
                self._in_memory.move_to_end(key)
                while len(self._in_memory) > 1 and sum(other.nbytes for other in self._in_memory.values()) > self._memory:
                    self._in_memory.popitem(last=False)
            return values

    def clear(self) -> None:
        """Drop all row groups, metadata, and the file once its last reader is done."""
        first_rows.cache_clear()
        read_metadata.cache_clear()
        with self._lock:
            self._in_memory.clear()
            self._on_disk.clear()
            self._file = None

    def _store(self, key: Any, column: pa.ChunkedArray) -> Values:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="imagepivot-", buffering=0)  # noqa: SIM115 -- stays open
                self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2
            if self._file.seek(0, os.SEEK_END) + column.nbytes > self._room:
                return _InMemory(column)
            values = _OnDisk(self._file, column)
        except OSError:  # The disk is full or read-only.
            self._room = 0
            return _InMemory(column)
        self._on_disk[key] = values
        return values


@lru_cache(maxsize=16)  # Few, since footers are large.
def read_metadata(folder: Folder, name: str, version: str) -> pq.FileMetaData:
    """Return the footer of a Parquet file; the version is part of the cache key."""
    with folder.open(name) as file:
        return pq.read_metadata(file)


@lru_cache(maxsize=4096)
def first_rows(folder: Folder, name: str, version: str) -> tuple[int, ...]:
    """Return the first row of each row group, followed by the number of rows."""
    metadata = read_metadata(folder, name, version)
    return tuple(accumulate((metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)), initial=0))


def no_image() -> OSError:
    """Return the error of a row without an image."""
    return OSError(errno.ENODATA, "the row holds no image")


def _write(file: IO[bytes], data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]

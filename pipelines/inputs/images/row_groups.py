"""Cache of Parquet row groups in temporary files.

Any row costs its row group, and nearly every row group has rows of nearly every shard. The files are mapped into memory and lose
their names, so that they vanish with the process. They take at most half of the free disk space. Further row groups stay in memory,
least recently used first to go.
"""

import errno
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.storage.folder import Folder

CACHE_BYTES = 256 << 20
"""Bytes of row groups in memory; a larger row group is cached alone."""


class RowGroups:
    """Row groups of this process. Threads that need the same one read it once."""

    def __init__(self, memory: int = CACHE_BYTES) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._on_disk: dict[Any, pa.ChunkedArray] = {}
        self._in_memory: OrderedDict[Any, pa.ChunkedArray] = OrderedDict()
        self._room: int | None = None

    def get(self, key: Any, load: Callable[[], pa.ChunkedArray]) -> pa.ChunkedArray:
        """Return the cached or loaded values of a row group; errors are not cached."""
        values = self._on_disk.get(key)
        if values is not None:
            return values
        with self._lock:
            if key in self._on_disk:
                return self._on_disk[key]
            if key not in self._in_memory:
                column = load()
                values = self._map(column)
                if values is not None:
                    self._on_disk[key] = values
                    return values
                self._in_memory[key] = column
            self._in_memory.move_to_end(key)
            while len(self._in_memory) > 1 and sum(other.nbytes for other in self._in_memory.values()) > self._memory:
                self._in_memory.popitem(last=False)
            return self._in_memory[key]

    def clear(self) -> None:
        """Drop all row groups and metadata; a file ends with its last reader."""
        first_rows.cache_clear()
        read_metadata.cache_clear()
        with self._lock:
            self._in_memory.clear()
            self._on_disk.clear()
            self._room = None

    def _map(self, column: pa.ChunkedArray) -> pa.ChunkedArray | None:
        """Write values to a file and map it into memory; None if the disk has no room."""
        try:
            if self._room is None:
                self._room = shutil.disk_usage(tempfile.gettempdir()).free // 2
            if column.nbytes > self._room:
                return None
            with tempfile.NamedTemporaryFile(prefix="imagepivot-") as file:
                table = pa.table({"values": column})
                with pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
                file.flush()
                with pa.memory_map(file.name) as mapped:
                    values = pa.ipc.open_file(mapped).read_all().column(0)
        except OSError:  # The disk is full or read-only.
            self._room = 0
            return None
        self._room -= column.nbytes
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

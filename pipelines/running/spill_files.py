"""Spill files: Arrow tables on disk, passed as path, offset and length.

The launcher of local workers holds what travels between them; a file range takes some hundred bytes.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa

from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors

FileRange: TypeAlias = tuple[str, int, int]
"""Path of a file, offset and length."""

Item = TypeVar("Item")
Key = TypeVar("Key")

# LZ4 writes a third of the bytes. Workers are processes, and threads are slower for 128 KiB.
_IPC = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READ = pa.ipc.IpcReadOptions(use_threads=False)


def to_ipc(table: pa.Table) -> bytes:
    """Serialize a table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=_IPC) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_ipc(content: bytes | FileRange) -> pa.Table:
    """Deserialize the result of `to_ipc`, or of the range of a file that holds one."""
    with pa.ipc.open_stream(read_range(content), options=_READ) as reader:
        return reader.read_all()


def read_range(content: bytes | FileRange) -> bytes:
    """Return bytes, or read those of the range of a file.

    Raises:
        DatasetError: the file cannot be read.
    """
    if isinstance(content, bytes):
        return content
    path, offset, length = content
    with storage_errors(path), Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(length)


def write_ranges(contents: Iterable[tuple[Key, bytes | FileRange]], path: Path) -> list[tuple[Key, FileRange]]:
    """Write contents to a new file, and return their ranges; ranges of others stay.

    Raises:
        DatasetError: the file cannot be written.
    """
    ranges: list[tuple[Key, FileRange]] = []
    with storage_errors(str(path)), path.open("xb") as file:
        for key, content in contents:
            ranges.append((key, (str(path), file.tell(), len(content)) if isinstance(content, bytes) else content))
            if isinstance(content, bytes):
                file.write(content)
    return ranges


def gather(items: Iterable[Item], size: int, size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield lists of consecutive items of at least a size; the last may be smaller."""
    gathered: list[Item] = []
    total = 0
    for item in items:
        gathered.append(item)
        total += size_of(item)
        if total >= size:
            yield gathered
            gathered, total = [], 0
    if gathered:
        yield gathered


@contextmanager
def spill_folder(folder: Folder) -> Iterator[str]:
    """Yield a local folder for spill files: the dataset's, or a temporary one.

    The next run for a local dataset deletes the files of a killed one. A temporary folder is of this user alone.
    """
    if folder.is_local:
        yield str(folder.local_path)
        return
    with tempfile.TemporaryDirectory(prefix="imagepivot-", ignore_cleanup_errors=True) as path:
        yield path

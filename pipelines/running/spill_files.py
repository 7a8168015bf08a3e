"""Tables on their way between workers: as bytes, or in files of which only the places travel.

The local runner holds everything that it shuffles in the launcher's memory; the place of a piece takes some hundred bytes, whatever
its size.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa

from schemas.fingerprints import sha256_of_bytes
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors
from schemas.writing.output import LOCK_NAME
from schemas.writing.shard_writer import lock_folder

Place: TypeAlias = tuple[str, int, int]
"""Path of a file, offset and length."""

Key = TypeVar("Key")

# A third of the bytes on disk, or through the runner's shuffle. Workers are processes: threads for 128 KiB only cost time.
_IPC = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READ = pa.ipc.IpcReadOptions(use_threads=False)


def to_ipc(table: pa.Table) -> bytes:
    """Return a table as the bytes of an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=_IPC) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_ipc(data: bytes) -> pa.Table:
    """Return the table whose bytes `to_ipc` made."""
    with pa.ipc.open_stream(data, options=_READ) as reader:
        return reader.read_all()


def write_places(contents: Iterable[tuple[Key, bytes]], path: Path) -> list[tuple[Key, Place]]:
    """Write contents into a new file one after the other, and return their places.

    Raises:
        DatasetError: the file cannot be written.
    """
    places: list[tuple[Key, Place]] = []
    with storage_errors(str(path)), path.open("xb") as file:
        for key, data in contents:
            places.append((key, (str(path), file.tell(), len(data))))
            file.write(data)
    return places


def read_place(place: Place) -> pa.Table:
    """Return the table whose bytes are in a file."""
    path, offset, length = place
    with storage_errors(path), Path(path).open("rb") as file:
        file.seek(offset)
        return from_ipc(file.read(length))


@contextmanager
def staging(folder: Folder) -> Iterator[str]:
    """Yield the local folder for what workers of a local run pass on: the dataset's own, or for one in a store a temporary one."""
    if folder.is_local:
        yield str(folder.local_path)
        return
    # Not a random name: so the next run for the same dataset finds what a killed one left.
    path = Path(tempfile.gettempdir()) / f"imagepivot-{os.getuid()}-{sha256_of_bytes(folder.location.encode())[:16]}"
    with lock_folder(Folder(str(path))):
        _clear(path)
        try:
            yield str(path)
        finally:
            _clear(path)
    with suppress(OSError):
        path.rmdir()  # Fails if another run has begun to use it.


def _clear(path: Path) -> None:
    for file in path.iterdir():
        if file.name != LOCK_NAME:
            file.unlink(missing_ok=True)

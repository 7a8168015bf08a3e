"""A folder of files on a local disk or in an object store, with atomic writes.

Local files are written beside their target and renamed; objects are written in the local temporary folder and
uploaded whole. `schemas.storage.object_store` reads, lists and writes objects.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import BinaryIO, Literal, TypeVar, cast

import pyarrow as pa

from schemas.errors import DatasetError
from schemas.reads import record_read
from schemas.storage import object_store
from schemas.storage.locations import (
    BucketAddress,
    absolute_location,
    check_location,
    check_regular,
    is_remote,
    local_path,
    plain_location,
    split_address,
)
from schemas.storage.object_store import ANY, CONNECTIONS, TEMPORARY_MARK, Bucket, FileInfo
from schemas.storage.storage_errors import RefusedError, StoreAccessError, client_errors, create_folder, storage_errors

_T = TypeVar("_T")
_R = TypeVar("_R")

_COPIED_BYTES = 16 << 20  # At a time.
_opening = Lock()  # Several threads would open several clients.


@dataclass(frozen=True)
class Folder:
    """A folder on a local disk or in an object store. Cheap to create and to pickle.

    File names are relative to the folder, with ``/`` between the parts.

    Attributes:
        location: local path, ``gs://...`` or ``s3://...``; ``file://...`` and ``~`` become plain paths.

    Examples:
        >>> folder = imagepivot.Folder("features")
        >>> [name for name in folder.names() if name.endswith(".parquet")]
        ['part-00000-of-00002.parquet', 'part-00001-of-00002.parquet']
    """

    location: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", plain_location(self.location))

    def __reduce__(self) -> tuple[type[Folder], tuple[str]]:
        # The process that unpickles it may have another working folder.
        return type(self), (absolute_location(self.location),)

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine."""
        return not is_remote(self.location)

    @property
    def local_path(self) -> Path:
        """Absolute path of a local folder."""
        check_location(self.location)
        return Path(self.location).absolute()

    def path_of(self, name: str) -> str:
        """Return the full location of a file, for messages and other tools."""
        return f"{self.location.rstrip('/')}/{name}"

    @contextmanager
    def _at(self, name: str = "") -> Iterator[tuple[Bucket | None, str]]:
        """Yield a file's bucket and key, or None and its path, and convert errors.

        An empty name is the folder: of a bucket, the prefix of all its keys.
        """
        with storage_errors(self.path_of(name) if name else self.location):
            if self.is_local:
                yield None, str(self.local_path / name)
                return
            check_location(self.location)
            address, prefix = split_address(self.location)
            with _opening:
                bucket = open_bucket(address)
            yield bucket, f"{prefix}/{name}" if prefix else name

    def list(self, on_link: Callable[[str], None] = lambda name: None) -> Iterator[FileInfo]:
        """Yield all files below the folder, in no particular order.

        Links to folders are not followed, since they may form cycles: ``on_link`` receives their names.
        """
        with self._at() as (bucket, path), suppress(FileNotFoundError):
            yield from object_store.list_objects(bucket, path) if bucket else _walk(path, "", on_link)

    def names(self) -> Sequence[str]:
        """Return the sorted names of all files below the folder; empty if missing."""
        return sorted(entry.name for entry in self.list())

    def children(self, below: str = "") -> Sequence[str]:
        """Return the sorted names directly in this folder or a subfolder.

        Those of folders end with ``/``.
        """
        with self._at(f"{below}/" if below else "") as (bucket, path), suppress(FileNotFoundError):
            if bucket is not None:
                pages = list(bucket.pages(path, by_folder=True))
                keys = [key for page in pages for key in (*page.folders, *(entry.name for entry in page.objects))]
                return sorted(key.removeprefix(path) for key in keys if key.removeprefix(path).strip("/"))
            # Pipes and sockets are listed, so that reading them fails with their name.
            present = [child for child in Path(path).iterdir() if child.exists()]
            return sorted(f"{child.name}/" if child.is_dir() else child.name for child in present)
        return []

    def kind(self) -> Literal["file", "folder", "nothing"]:
        """Return whether the location of the folder is a folder, a file or nothing.

        Raises:
            DatasetError: it is a pipe, a socket or a device.
        """
        with self._at() as (bucket, path), suppress(FileNotFoundError, NotADirectoryError):
            if bucket is None:
                check_regular(path)
                return "folder" if Path(path).is_dir() else "file"
            if path and bucket.head(path.removesuffix("/")):
                return "file"
            if next(bucket.pages(path)).objects or not path:
                return "folder"
        return "nothing"

    def stat(self, name: str) -> FileInfo | None:
        """Return size, modification time and tag of a file; None if it does not exist.

        The tag of a local file is its size, modification time and inode.
        """
        record_read(self.path_of(name))
        with self._at(name) as (bucket, path), suppress(FileNotFoundError, NotADirectoryError):
            if bucket is not None:
                entry = bucket.head(path)
                return entry and entry._replace(name=name)
            status = os.stat(path)  # noqa: PTH116
            if stat.S_ISREG(status.st_mode):
                tag = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
                return FileInfo(name, status.st_size, str(status.st_mtime_ns), tag)
        return None

    def open(self, name: str, *, is_mapped: bool = True) -> pa.NativeFile:
        """Open a file for random access.

        A local file is memory-mapped, unless it is read once from start to end (``is_mapped=False``). Each read of an object is a
        request: read large parts, or through a buffer.

        Raises:
            FileNotFoundError: the file does not exist.
            DatasetError: the file cannot be opened, or is a pipe, a socket or a device.
        """
        if not self.is_local:
            if (entry := self.stat(name)) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return pa.PythonFile(_ObjectFile(partial(self.read, name), entry.size), mode="r")
        record_read(self.path_of(name))
        with self._at(name) as (_, path):
            check_regular(path)
            # An empty file cannot be mapped.
            return pa.memory_map(path) if is_mapped and os.path.getsize(path) else pa.OSFile(path)  # noqa: PTH202

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Return the bytes of a file, or up to ``size`` of them from ``start``.

        A store gets one request.

        Raises:
            FileNotFoundError: the file does not exist; the error of a store has no path, since failures of images quote it.
            DatasetError: it cannot be read.
        """
        record_read(self.path_of(name))
        with self._at(name) as (bucket, path), suppress(EOFError):
            if bucket is not None:
                return b"" if size == 0 else bucket.read(path, start, size)
            with self.open(name) as file:
                return file.read() if size is None else file.read_at(size, start)
        return b""

    def put(self, name: str, data: bytes | Path, if_match: str | None = ANY) -> str | None:
        """Write a file atomically, and return the tag of an object.

        A path is a file opened by `temporary`, which becomes the file. The result is None if the tag of the object is not
        ``if_match``, which is None to write only a new object. Conditions need a store, see `schemas.storage.object_store`.
        """
        with self._at(name) as (bucket, path):
            if bucket is not None:
                return object_store.put(bucket, path, data, if_match)
            if isinstance(data, Path):
                data.replace(path)
                return ""
        with self.replace(name) as file:
            file.write(data)
        return ""

    @contextmanager
    def replace(self, name: str) -> Iterator[BinaryIO]:
        """Open a temporary file that becomes ``name`` if the block succeeds."""
        with self.temporary(name) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            self.put(name, Path(file.name))

    @contextmanager
    def temporary(self, name: str) -> Iterator[BinaryIO]:
        """Open a temporary file for `put`, which is deleted after the block."""
        with storage_errors(self.path_of(name)):
            if not self.is_local:
                with tempfile.NamedTemporaryFile(prefix="imagepivot-") as file:
                    yield cast("BinaryIO", file)
                return
            target = self._target(name)
            create_folder(target.parent)
            # Unique: several attempts may write the file, also on other machines that share the disk.
            temporary = target.with_name(f".{target.name}{TEMPORARY_MARK}{uuid.uuid4().int >> 64}")
            mode = 0o600 | 0o066 & self.local_path.stat().st_mode  # No more than the folder's, also for copies.
            try:
                with open(temporary, "w+b", opener=partial(os.open, mode=mode)) as file:
                    yield file
            finally:
                temporary.unlink(missing_ok=True)

    def copy(self, name: str, origin: Folder) -> None:
        """Copy a file from another folder, by the store if both are in one.

        Raises:
            FileNotFoundError: it does not exist.
        """
        with origin._at(name) as (source, source_key), self._at(name) as (bucket, key):
            if bucket is not None and source is not None and bucket.store == source.store:
                bucket.copy(key, source, source_key)
                return
        with origin.open(name) as file, self.replace(name) as copy:
            shutil.copyfileobj(file, copy, _COPIED_BYTES)

    def map(self, function: Callable[[_T], _R], values: Iterable[_T]) -> Sequence[_R]:
        """Return a function's results for values, in order; in parallel for a store."""
        if self.is_local:
            return [function(value) for value in values]
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="store") as pool:
            return list(pool.map(function, values))

    def check_writable(self) -> None:
        """Check permissions of a local folder or existence of a bucket, without writing.

        Raises:
            DatasetError: files cannot be written, or the store cannot be reached.
        """
        with self._at() as (bucket, path):
            if bucket is None:
                existing = next(parent for parent in (self.local_path, *self.local_path.parents) if parent.exists())
                with storage_errors(self.location, creates=True):
                    tempfile.TemporaryFile(dir=existing).close()  # It has no name.
                return
            with suppress(StoreAccessError):  # Permission to write objects does not imply permission to list them.
                next(bucket.pages(path))

    def delete(self, name: str, if_match: str = ANY) -> None:
        """Delete a file if it exists; an object only if it has the given tag."""
        with self._at(name) as (bucket, path), suppress(FileNotFoundError, NotADirectoryError, RefusedError):
            if bucket is None:
                self._target(name).unlink()
            else:
                bucket.delete(path, if_match)

    def _target(self, name: str) -> Path:
        """Return the local path of a file to write or delete.

        Raises:
            OSError: a subfolder is a link. In a folder of a stranger it may lead to any folder of the user.
        """
        for parent in list(PurePosixPath(name).parents)[:-1]:
            if (self.local_path / parent).is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path_of(str(parent)))
        return self.local_path / name


@lru_cache(maxsize=64)
def open_bucket(address: BucketAddress) -> Bucket:
    """Return the bucket at an address; a process has one client for each.

    Raises:
        DatasetError: the client of the store is not installed.
        StoreAccessError: the machine has no credentials.
    """
    try:
        with client_errors():
            if address.scheme == "s3":
                from schemas.storage.s3 import S3Bucket

                return S3Bucket(address)
            from schemas.storage.google_storage import GoogleBucket

            return GoogleBucket(address)
    except ImportError as error:
        raise DatasetError(
            f"cannot use the bucket {address.name!r}: {error.name} is missing, the client of the store: "
            "pip install 'imagepivot[stores]'"
        ) from error


class _ObjectFile(io.RawIOBase):
    """An object of a known size, for Arrow; each read is a request of a range."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._position = read, size, 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        data = self._read(self._position, min(size, left) if size >= 0 else left)
        self._position += len(data)
        return data


def _walk(folder: str, prefix: str, on_link: Callable[[str], None]) -> Iterator[FileInfo]:
    with storage_errors(folder), suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{name}/", on_link)
            elif entry.is_symlink() and os.path.isdir(entry.path):  # noqa: PTH112 -- False without permission
                on_link(name)
            else:
                info = FileInfo(name, -1)
                with suppress(OSError):  # A link to nothing, to itself, or without permission.
                    info = FileInfo(name, entry.stat().st_size, str(entry.stat().st_mtime_ns))
                yield info


def file_at(location: str) -> tuple[Folder, str]:
    """Return folder and name of a file; the folder gets the options of an address.

    Raises:
        UsageError: the location is impossible, see `check_location`.
    """
    check_location(location)
    if is_remote(location):
        address, options = cast("re.Match[str]", re.fullmatch(r"(.*?)(\?\w+=[^/?]*)?", location, re.DOTALL)).groups(default="")
        return object_at(address, options)
    path = local_path(location)
    return Folder(str(path.parent)), path.name


def object_at(address: str, options: str = "") -> tuple[Folder, str]:
    """Return folder and name of an object, whose key is literal.

    Slashes in front of the last part belong to the name, since those at the end of a folder's address have no meaning.

    >>> object_at("s3://bucket//a.png")
    (Folder(location='s3://bucket'), '/a.png')
    """
    folder, name = cast("re.Match[str]", re.fullmatch(r"(.*?)/(/*[^/]*)", address, re.DOTALL)).groups()
    return Folder(folder + options), name

"""A folder of files on a local disk or in an object store, with atomic writes.

Local files are written beside their target and renamed; objects are written in the local temporary folder and uploaded whole.
`schemas.storage.object_store` reads, lists and writes objects.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, BinaryIO, Literal, TypeVar, cast

import pyarrow as pa

from schemas.errors import DatasetError
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
from schemas.storage.object_store import ANY, TEMPORARY_MARK, Bucket, FileInfo
from schemas.storage.reads import record_read
from schemas.storage.storage_errors import NoSuchBucketError, StoreAccessError, create_folder, storage_errors

_T = TypeVar("_T")
_R = TypeVar("_R")

# Inside the class ``list`` is a method.
Names = list[str]
Results = list[_R]
PathKind = Literal["file", "folder", "nothing"]

_PARALLEL_READS = 32  # Threads that read objects wait for the network.
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

    def _path(self, name: str) -> str:
        """Return the local path of a file; an empty name is the folder."""
        return f"{str(self.local_path).rstrip('/')}/{name}" if name else str(self.local_path)

    def _object(self, name: str) -> tuple[Bucket, str]:
        """Return bucket and key of an object; an empty name is their prefix."""
        check_location(self.location)
        address, prefix = split_address(self.location)
        with _opening:
            bucket = open_bucket(address)
        return bucket, f"{prefix}/{name}" if prefix else name

    def list(self, on_link: Callable[[str], None] = lambda name: None) -> Iterator[FileInfo]:
        """Yield all files below the folder, in no particular order.

        Links to folders are not followed, since they may form cycles: ``on_link`` receives their names.
        """
        if self.is_local:
            yield from _walk(self._path(""), "", on_link)
            return
        with storage_errors(self.location), suppress(NoSuchBucketError):
            yield from object_store.list_objects(*self._object(""))

    def tagged(self) -> dict[str, FileInfo]:
        """Return all files below the folder by name, without modification times."""
        return {entry.name: entry._replace(version="") for entry in self.list()}

    def names(self) -> Names:
        """Return the sorted names of all files below the folder; empty if missing."""
        return sorted(entry.name for entry in self.list())

    def children(self, below: str = "") -> Names:
        """Return the sorted names of the files in this folder or a subfolder, not deeper."""
        return self._level(below)[0]

    def folders(self) -> Names:
        """Return the sorted names of the folders directly in this folder."""
        return self._level("")[1]

    def _level(self, below: str) -> tuple[Names, Names]:
        """Return the sorted names of files and folders, as `children` does."""
        names: Iterable[str] = ()
        with storage_errors(self.path_of(below)):
            if self.is_local:
                with suppress(FileNotFoundError), os.scandir(self._path(below)) as entries:
                    # Pipes and sockets are listed, so that reading them fails with their name.
                    present = [entry for entry in entries if os.path.exists(entry.path)]  # noqa: PTH110
                    names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in present]
            else:
                with suppress(NoSuchBucketError):
                    names = list(object_store.list_level(*self._object(f"{below}/" if below else "")))
        files = sorted(name for name in names if name and not name.endswith("/"))
        return files, sorted(name[:-1] for name in names if name.endswith("/") and name != "/")

    def kind(self) -> PathKind:
        """Return whether the location of the folder is a folder, a file or nothing.

        Raises:
            DatasetError: it is a pipe, a socket or a device.
        """
        with storage_errors(self.location):
            if self.is_local:
                try:
                    is_folder = stat.S_ISDIR(os.stat(self._path("")).st_mode)  # noqa: PTH116
                except (FileNotFoundError, NotADirectoryError):
                    return "nothing"
                if not is_folder:
                    check_regular(self._path(""))
                return "folder" if is_folder else "file"
            bucket, prefix = self._object("")
            with suppress(NoSuchBucketError):
                if not prefix:
                    return "folder" if bucket.exists() else "nothing"
                if bucket.head(prefix.removesuffix("/")) is not None:
                    return "file"
                page = bucket.page(prefix)
                return "folder" if page.objects else "nothing"
        return "nothing"

    def stat(self, name: str) -> FileInfo | None:
        """Return size, modification time and tag of a file; None if it does not exist.

        The tag of a local file is its size, modification time and inode.
        """
        record_read(self.path_of(name))
        with storage_errors(self.path_of(name)):
            if not self.is_local:
                bucket, key = self._object(name)
                head = bucket.head(key)
                return None if head is None else head._replace(name=name)
            try:
                status = os.stat(self._path(name))  # noqa: PTH116
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not stat.S_ISREG(status.st_mode):
            return None
        tag = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
        return FileInfo(name, status.st_size, str(status.st_mtime_ns), tag)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        entry = self.stat(name)
        return None if entry is None else entry.size

    def open(self, name: str, *, is_mapped: bool = True) -> pa.NativeFile:
        """Open a file for random access.

        A local file is memory-mapped, unless it is read once from start to end (``is_mapped=False``). Each read of an object is a
        request: read large parts, or through a buffer.

        Raises:
            FileNotFoundError: the file does not exist.
            DatasetError: the file cannot be opened, or is a pipe, a socket or a device.
        """
        if not self.is_local:
            if (size := self.size(name)) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return pa.PythonFile(_ObjectFile(partial(self.read_range, name), size), mode="r")
        record_read(self.path_of(name))
        path = self._path(name)
        with storage_errors(self.path_of(name)):
            check_regular(path)
            # An empty file cannot be mapped.
            return pa.memory_map(path) if is_mapped and os.path.getsize(path) else pa.OSFile(path)  # noqa: PTH202

    def read(self, name: str) -> bytes:
        """Return all bytes of a file, from a store in one request.

        Raises:
            FileNotFoundError: the file does not exist; the error of a store has no path, since failures of images quote it.
            DatasetError: it cannot be read.
        """
        if not self.is_local:
            return self._read_object(name)
        with storage_errors(self.path_of(name)), self.open(name) as file:
            return file.read()

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Return up to ``size`` bytes of a file from ``start``, fewer at its end.

        Errors are those of `read`.
        """
        if not self.is_local:
            return self._read_object(name, start, start + size) if size else b""
        with storage_errors(self.path_of(name)), self.open(name) as file:
            return bytes(file.read_at(size, start))

    def _read_object(self, name: str, *part: int) -> bytes:
        record_read(self.path_of(name))
        with storage_errors(self.path_of(name)):
            bucket, key = self._object(name)
            if (data := bucket.read(key, *part)) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return data

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Return content and tag of an object; None if it does not exist."""
        record_read(self.path_of(name))
        with storage_errors(self.path_of(name)):
            bucket, key = self._object(name)
            return bucket.read_tagged(key)

    def put(self, name: str, data: bytes | Path, if_match: str | None = ANY) -> str | None:
        """Write a file atomically, and return the tag of an object.

        A path is a file opened by `temporary`, which becomes the file. The result is None if the tag of the object is not
        ``if_match``, which is None to write only a new object. Conditions need a store, see `schemas.storage.object_store`.
        """
        if not self.is_local:
            with storage_errors(self.path_of(name)):
                bucket, key = self._object(name)
                return object_store.put(bucket, key, data, if_match)
        if isinstance(data, bytes):
            with self.replace(name) as file:
                file.write(data)
        else:
            with storage_errors(self.path_of(name)):
                data.replace(self.local_path / name)
        return ""

    @contextmanager
    def replace(self, name: str) -> Iterator[BinaryIO]:
        """Open a temporary file that becomes ``name`` if the block succeeds."""
        with storage_errors(self.path_of(name)), self.temporary(name) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            self.put(name, Path(file.name))

    @contextmanager
    def temporary(self, name: str) -> Iterator[BinaryIO]:
        """Open a temporary file for `put`, which is deleted after the block."""
        with storage_errors(self.path_of(name)):
            if self.is_local:
                target = self._target(name)
                create_folder(target.parent)
                # Unique: several attempts may write the file, also on other machines that share the disk.
                temporary = target.with_name(f".{target.name}{TEMPORARY_MARK}{uuid.uuid4().int >> 64}")
                mode = 0o600 | 0o066 & self.local_path.stat().st_mode  # No more than the folder's, also for copies.
            else:
                mode = 0o600
                handle, path = tempfile.mkstemp(prefix="imagepivot-")
                os.close(handle)
                temporary = Path(path)
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
        if not self.is_local and not origin.is_local:
            (bucket, key), (source, source_key) = self._object(name), origin._object(name)
            with storage_errors(origin.path_of(name)):
                if bucket.copy(key, source, source_key):
                    return
        with origin.open(name) as file, self.replace(name) as copy:
            shutil.copyfileobj(file, copy, _COPIED_BYTES)

    def map(self, function: Callable[[_T], _R], values: Iterable[_T]) -> Results[_R]:
        """Return a function's results for values, in order; in parallel for a store."""
        if self.is_local:
            return [function(value) for value in values]
        with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="store") as pool:
            return list(pool.map(function, values))

    def check_writable(self) -> None:
        """Check permissions of a local folder or existence of a bucket, without writing.

        Raises:
            DatasetError: files cannot be written, or the store cannot be reached.
        """
        with storage_errors(self.location):
            if self.is_local:
                _check_writable(self.local_path)
                return
            bucket, _ = self._object("")
            with suppress(StoreAccessError):  # Permission to write objects does not imply permission to query the bucket.
                if not bucket.exists():
                    name = split_address(self.location)[0].name
                    raise DatasetError(
                        f"cannot use {self.location!r}: there is no bucket {name!r}: check its name, or create it first"
                    )

    def delete(self, name: str, if_match: str = ANY) -> None:
        """Delete a file if it exists; an object only if it has the given tag."""
        with storage_errors(self.path_of(name)):
            if self.is_local:
                with suppress(FileNotFoundError, NotADirectoryError):
                    self._target(name).unlink()
            else:
                bucket, key = self._object(name)
                bucket.delete(key, if_match)

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
    """An object of a known size as a file; each read is a range request.

    Two adjacent reads of one size are a sequential reader, for which the next range is requested in advance.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read = read
        self._size = size
        self._position = 0
        self._last = (-1, 0)  # Stop and size of the last read.
        self._ahead: tuple[int, int, Future[bytes]] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        start, left = self._position, max(0, self._size - self._position)
        count = left if size is None or size < 0 else min(size, left)
        if not count:
            return b""
        ahead, self._ahead = self._ahead, None
        data = ahead[2].result() if ahead is not None and ahead[:2] == (start, count) else self._read(start, count)
        self._position += len(data)
        if self._last == (start, count) and (following := min(count, self._size - self._position)):
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="readahead")
            self._ahead = self._position, following, self._pool.submit(self._read, self._position, following)
        self._last = self._position, count
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()


def _check_writable(path: Path) -> None:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        code = errno.EROFS if os.statvfs(existing).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(existing))


def _walk(folder: str, prefix: str, on_link: Callable[[str], None]) -> Iterator[FileInfo]:
    try:
        with storage_errors(folder):
            entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/", on_link)
                continue
            try:
                status = None if entry.is_dir() else entry.stat()
            except OSError:  # A link to nothing, to itself, or without permission.
                yield FileInfo(prefix + entry.name, -1)
                continue
            if status is None:
                on_link(prefix + entry.name)
            else:
                yield FileInfo(prefix + entry.name, status.st_size, str(status.st_mtime_ns))


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

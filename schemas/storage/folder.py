"""A folder of files on a local disk or in an object store, with atomic writes.

Local files are written beside their target and renamed; objects are written in the local temporary folder and uploaded whole.
`schemas.storage.object_store` lists and writes objects if a client of the store is installed; ``pyarrow.fs`` does the rest.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, TypeVar, cast

import pyarrow as pa
from pyarrow import fs

from schemas.errors import DatasetError
from schemas.storage import object_store
from schemas.storage.filesystems import filesystem_of
from schemas.storage.locations import absolute_location, check_location, check_regular, is_remote, local_path, plain_location
from schemas.storage.object_store import ANY, PART_BYTES, TEMPORARY_MARK, Bucket, Entry
from schemas.storage.reads import record_read
from schemas.storage.storage_errors import (
    NoSuchBucketError,
    StoreAccessError,
    create_folder,
    storage_errors,
    store_error_of,
)

_T = TypeVar("_T")
_R = TypeVar("_R")

PathKind = Literal["file", "folder", "nothing"]

_PARALLEL_READS = 32  # Threads that read objects wait for the network.


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
    def has_tags(self) -> bool:
        """Whether conditional writes are possible; see `schemas.storage.object_store`."""
        return object_store.has_tags(self.location)

    @property
    def is_google(self) -> bool:
        """Whether the folder is in Google Cloud Storage."""
        return self.location.startswith(("gs://", "gcs://"))

    @property
    def _takes_ranges(self) -> bool:
        """Whether to read by range requests, since pyarrow does not retry cut responses."""
        return self.location.startswith("s3://") and self.has_tags

    @property
    def local_path(self) -> Path:
        """Absolute path of a local folder."""
        return Path(filesystem_of(self.location)[1])

    def _find(self, name: str) -> tuple[fs.FileSystem, str]:
        """Return the file system and the path of a file; an empty name is the folder."""
        filesystem, root = filesystem_of(self.location)
        return filesystem, f"{root.rstrip('/')}/{name}" if name else root

    @property
    def _bucket(self) -> Bucket:
        return _open_bucket(object_store.bucket_of(self.location))

    def _key(self, name: str) -> str:
        return f"{filesystem_of(self.location)[1]}/{name}".partition("/")[2]

    def _needs_client(self, name: str) -> bool:
        """Return whether only the client of the store can name a file, or the folder.

        Raises:
            DatasetError: it is not installed.
        """
        if self.is_local or object_store.is_plain(self._key(name).removesuffix("" if name else "/")):
            return False
        if not self.has_tags:
            raise DatasetError(
                f"cannot use {self.path_of(name)!r}: only the client of the store can name a key with an empty part, '.' or '..': "
                "install imagepivot[pipelines]"
            ) from OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return True

    def path_of(self, name: str) -> str:
        """Return the full location of a file, for messages and other tools."""
        return f"{self.location.rstrip('/')}/{name}"

    def names(self) -> list[str]:
        """Return the sorted names of all files below the folder; empty if missing."""
        return sorted(name for name, _ in self.files())

    def files(self) -> Iterator[tuple[str, int]]:
        """Yield name and size in bytes of all files below the folder; -1 for a dead link."""
        yield from ((entry.name, entry.size) for entry in self.entries())

    def entries(self, on_link: Callable[[str], None] = lambda name: None) -> Iterator[Entry]:
        """Yield all files below the folder, in no particular order.

        Links to folders are not followed, since they may form cycles: ``on_link`` receives their names.
        """
        filesystem, root = filesystem_of(self.location)
        if self.has_tags:
            with storage_errors(self.location), suppress(NoSuchBucketError):
                yield from object_store.list_objects(self._bucket, self._key(""))
        elif self.is_local:
            yield from _walk(root, "", on_link)
        else:
            with storage_errors(self.location):
                infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
            prefix = root.rstrip("/") + "/"
            yield from (_entry(info, info.path.removeprefix(prefix)) for info in infos if info.type == fs.FileType.File)

    def tagged(self) -> dict[str, Entry]:
        """Return all files below the folder by name, without modification times."""
        return {entry.name: entry._replace(version="") for entry in self.entries()}

    def children(self, below: str = "") -> list[str]:
        """Return the sorted names of the files in this folder or a subfolder, not deeper."""
        # Pipes and sockets (Unknown) are listed, so that reading them fails with their name.
        return self._children(below, fs.FileType.File, fs.FileType.Unknown)

    def folders(self) -> list[str]:
        """Return the sorted names of the folders directly in this folder."""
        return self._children("", fs.FileType.Directory)

    def _children(self, below: str, *types: fs.FileType) -> list[str]:
        if self._needs_client(below):
            with storage_errors(self.path_of(below)):
                names = list(object_store.list_level(self._bucket, self._key(f"{below}/" if below else "")))
            is_folder = fs.FileType.Directory in types
            return sorted(name.removesuffix("/") for name in names if name and name.endswith("/") == is_folder)
        filesystem, path = self._find(below)
        with storage_errors(self.path_of(below)):
            infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type in types)

    def kind(self) -> PathKind:
        """Return whether the location of the folder is a folder, a file or nothing.

        Raises:
            DatasetError: it is a pipe, a socket or a device.
        """
        filesystem, path = filesystem_of(self.location)
        with storage_errors(self.location):
            if self._needs_client(""):
                names = set(object_store.list_level(self._bucket, self._key("").removesuffix("/")))
                return "file" if "" in names else "folder" if "/" in names else "nothing"
            file_type = filesystem.get_file_info(path).type
            if file_type == fs.FileType.Unknown:
                check_regular(path)
        kinds: dict[fs.FileType, PathKind] = {fs.FileType.File: "file", fs.FileType.Directory: "folder"}
        return kinds.get(file_type, "nothing")

    def entry(self, name: str) -> Entry | None:
        """Return size and modification time of a file; None if it does not exist."""
        record_read(self.path_of(name))
        if self._needs_client(name):
            with storage_errors(self.path_of(name)):
                page = self._bucket.page(self._key(name), after="", by_folder=False)
            return next((stored._replace(name=name) for stored in page.objects if stored.name == self._key(name)), None)
        filesystem, path = self._find(name)
        with storage_errors(self.path_of(name)):
            info = filesystem.get_file_info(path)
        return _entry(info, name) if info.type == fs.FileType.File else None

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        entry = self.entry(name)
        return None if entry is None else entry.size

    def tag(self, name: str) -> str | None:
        """Return the tag of an object; None if it does not exist."""
        with storage_errors(self.path_of(name)):
            head = self._bucket.head(self._key(name))
        return None if head is None else head.tag

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Return content and tag of an object; None if it does not exist."""
        record_read(self.path_of(name))
        with storage_errors(self.path_of(name)):
            return self._bucket.get(self._key(name))

    def state(self, name: str) -> tuple[int, ...] | None:
        """Return size, time and, of a local file, inode; None if it does not exist."""
        if not self.is_local:
            entry = self.entry(name)
            return None if entry is None else (entry.size, int(entry.version or 0))
        with storage_errors(self.path_of(name)):
            try:
                status = os.stat(self._find(name)[1])  # noqa: PTH116
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size, status.st_mtime_ns, status.st_ino

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for random access; a local file is memory-mapped.

        Raises:
            FileNotFoundError: the file does not exist.
            DatasetError: the file cannot be opened, or is a pipe, a socket or a device.
        """
        record_read(self.path_of(name))
        if self._needs_client(name):
            return pa.PythonFile(self.stream(name), mode="r")
        filesystem, path = self._find(name)
        with storage_errors(self.path_of(name)):
            if self.is_local:
                check_regular(path)
                # An empty file cannot be mapped.
                return pa.memory_map(path) if os.path.getsize(path) else pa.OSFile(path)  # noqa: PTH202
            return filesystem.open_input_file(path)

    def open_ranges(self, name: str) -> pa.NativeFile:
        """Open a file as `open` does; in S3 each read is one range request with retries."""
        return pa.PythonFile(self.stream(name), mode="r") if self._takes_ranges else self.open(name)

    def stream(self, name: str) -> Any:
        """Open a file for sequential reading; errors are those of `open`."""
        record_read(self.path_of(name))
        if self._takes_ranges or self._needs_client(name):
            size = self.size(name)
            if size == 0:  # Perhaps a response with truncated headers, which reading detects.
                size = len(self.read_object(name))
            if size is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return _Ranges(self, name, size)
        filesystem, path = self._find(name)
        with storage_errors(self.path_of(name)):
            if self.is_local:
                check_regular(path)
            return filesystem.open_input_stream(path, compression=None)

    def read(self, name: str) -> bytes:
        """Return all bytes of a file."""
        # In S3 a stream takes a request per 256 KiB. In Google's store, files with random access are read by one thread at a time.
        with storage_errors(self.path_of(name)), (self.stream if self.is_google else self.open)(name) as file:
            return file.read()

    def read_object(self, name: str) -> bytes:
        """Return all bytes of a file, from a store in one request.

        Raises:
            FileNotFoundError: the file does not exist; the error of a store has no path, since failures of images quote it.
            DatasetError: it cannot be read.
        """
        try:
            content = self.read_tagged(name) if self._takes_ranges else (self.read(name), "")
        except FileNotFoundError:
            if self.is_local:
                raise
            content = None
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return content[0]

    def read_part(self, name: str, start: int, size: int) -> bytes:
        """Return up to ``size`` bytes of a file from ``start``; fewer at its end."""
        record_read(self.path_of(name))
        if size and self.has_tags:
            with storage_errors(self.path_of(name)):
                part = self._bucket.part(self._key(name), start, start + size)
            if part is None:
                raise FileNotFoundError(name)
            return part
        with storage_errors(self.path_of(name)), self.open(name) as file:
            return bytes(file.read_at(size, start))

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        with self.replace(name) as file:
            file.write(data)

    def swap(self, name: str, data: bytes | Path, replaces: str | None) -> str | None:
        """Write an object and return its tag, or None; see `object_store.put`."""
        with storage_errors(self.path_of(name)):
            return object_store.put(self._bucket, self._key(name), data, replaces)

    @contextmanager
    def replace(self, name: str) -> Iterator[BinaryIO]:
        """Open a temporary file that becomes ``name`` if the block succeeds."""
        with storage_errors(self.path_of(name)), self.temporary(name) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            self.rename(Path(file.name), name)

    def rename(self, temporary: Path, name: str) -> None:
        """Rename or upload a file opened by `temporary`."""
        with storage_errors(self.path_of(name)):
            if self.is_local:
                temporary.replace(self.local_path / name)
            elif self.has_tags:
                object_store.put(self._bucket, self._key(name), temporary)
            else:
                filesystem, path = self._find(name)
                fs.copy_files(str(temporary), path, fs.LocalFileSystem(), filesystem, chunk_size=PART_BYTES)

    @contextmanager
    def temporary(self, name: str) -> Iterator[BinaryIO]:
        """Open a temporary file for `rename`, which is deleted after the block."""
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
        (filesystem, path), (origins, source) = self._find(name), origin._find(name)
        is_in_store = not self.is_local and filesystem.equals(origins)
        if is_in_store and not (self._needs_client(name) or origin._needs_client(name)):
            with storage_errors(origin.path_of(name)):
                filesystem.copy_file(source, path)
            return
        with origin.open(name) as file, self.replace(name) as copy:
            shutil.copyfileobj(file, copy)

    def map(self, function: Callable[[_T], _R], values: Iterable[_T]) -> list[_R]:
        """Return a function's results for values, in order; in parallel for a store."""
        if self.is_local:
            return [function(value) for value in values]
        with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="store") as pool:
            return list(pool.map(function, values))

    def check_bucket(self) -> None:
        """Check that the bucket of the folder exists; nothing to check for a local folder.

        Raises:
            DatasetError: the bucket does not exist, or the store cannot be reached.
        """
        if self.is_local:
            return
        filesystem, root = filesystem_of(self.location)
        bucket = root.lstrip("/").partition("/")[0]
        with storage_errors(self.location):
            try:
                exists = (
                    self._bucket.exists() if self.has_tags else filesystem.get_file_info(bucket).type != fs.FileType.NotFound
                )
            except OSError as error:
                if store_error_of(error) is not StoreAccessError:
                    raise
                exists = True  # Permission to write objects does not imply permission to query the bucket.
        if not exists:
            raise DatasetError(
                f"cannot use {self.location!r}: there is no bucket {bucket!r}: check its name, or create it first"
            )

    def check_writable(self) -> None:
        """Check permissions of a local folder or existence of a bucket, without writing.

        Raises:
            DatasetError: files cannot be written.
        """
        if not self.is_local:
            self.check_bucket()
            return
        path = self.local_path
        with storage_errors(self.location):
            existing = next(parent for parent in (path, *path.parents) if parent.exists())
            if not existing.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
            if not os.access(existing, os.W_OK | os.X_OK):
                read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
                code = errno.EROFS if read_only else errno.EACCES
                raise OSError(code, os.strerror(code), str(existing))

    def delete(self, name: str, tag: str = ANY) -> None:
        """Delete a file if it exists, and has the given tag."""
        filesystem, path = self._find(name)
        with storage_errors(self.path_of(name)):
            if tag == ANY and self._needs_client(name):
                tag = self.tag(name) or ANY
            if tag != ANY:
                self._bucket.delete(self._key(name), tag)
            elif self.size(name) is not None:
                with suppress(FileNotFoundError):  # Another process has deleted it since.
                    filesystem.delete_file(str(self._target(name)) if self.is_local else path)

    def _target(self, name: str) -> Path:
        """Return the local path of a file to write or delete.

        Raises:
            OSError: a subfolder is a link. In a folder of a stranger it may lead to any folder of the user.
        """
        for parent in list(PurePosixPath(name).parents)[:-1]:
            if (self.local_path / parent).is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path_of(str(parent)))
        return self.local_path / name


class _Ranges(io.RawIOBase):
    """A file in S3 read by range requests."""

    def __init__(self, folder: Folder, name: str, size: int) -> None:
        self._folder = folder
        self._name = name
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._position)
        if count <= 0:
            return 0
        data = self._folder.read_part(self._name, self._position, count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@lru_cache(maxsize=64)
def _open_bucket(address: str) -> Bucket:
    if address.startswith("s3://"):
        from schemas.storage.s3 import S3Bucket

        return S3Bucket(address)
    from schemas.storage.google_storage import GoogleBucket

    return GoogleBucket(address)


def _entry(info: fs.FileInfo, name: str) -> Entry:
    return Entry(name, info.size, "" if info.mtime_ns is None else str(info.mtime_ns))


def _walk(folder: str, prefix: str, on_link: Callable[[str], None]) -> Iterator[Entry]:
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
                yield Entry(prefix + entry.name, -1)
                continue
            if status is None:
                on_link(prefix + entry.name)
            else:
                yield Entry(prefix + entry.name, status.st_size, str(status.st_mtime_ns))


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

"""A folder of files, local or in an object store, with writes that happen whole or not at all.

Local paths and ``gs://`` and ``s3://`` addresses are served by ``pyarrow.fs``. A file is always written to a temporary
name first: locally beside its target, renamed when complete; for an object store in the local temporary folder, uploaded whole.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pyarrow import fs

from schemas.errors import DatasetError, UsageError

__all__ = ["TEMPORARY_MARK", "Folder", "filesystem_of", "is_remote", "storage_errors"]

TEMPORARY_MARK = ".tmp-"
"""Part of the name of every file that is not complete."""

# Scheme, bucket (with what may stand before an "@"), key, options of pyarrow.
_STORE = re.compile(r"(s3|gs|gcs)://([^/?]+)(/.*?)?(\?\w+=[^/?]*)?", re.DOTALL)

_GCS_RETRY_SECONDS = 15  # Google's own limit is 15 minutes, also for an address that nobody answers.

_GOOGLE = "google::cloud::Status"
"""Begins the text of each error of Google's client, some of which pyarrow gives as other errors than OSError."""

_LOCAL_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and run the same command again, finished shards are kept",
    errno.EDQUOT: "the disk quota is used up: free some space and run the same command again",
    errno.EFBIG: "the file would be larger than the limit of this account or file system: see ulimit -f, or give more --shards",
    errno.EACCES: "permission denied: check who owns the folder, or choose another one",
    errno.EPERM: "permission denied: check who owns the folder, or choose another one",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "the path is a folder, expected a file",
}

_DENIED = (
    "ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE|EXPIRED|MISSING_AUTHENTICATION|PERMISSION_DENIED|"
    "UNAUTHENTICATED|[Cc]redential|OAuth2|access token|Permission denied"
)

# What pyarrow gives of a store's answer is its text; the first that is found in it counts.
_REMOTE_ADVICE = (
    ("NO_SUCH_BUCKET", "there is no such bucket: check its name, or make it first"),
    (_DENIED, "access denied: check the credentials of this machine and what they allow"),
    (
        "NETWORK_CONNECTION|CURL error|UNAVAILABLE|DEADLINE_EXCEEDED",
        "it cannot be reached: check the network, and AWS_ENDPOINT_URL or STORAGE_EMULATOR_HOST where they are set",
    ),
    ("No space left", "the disk for temporary files is full: free some space, or set TMPDIR"),
)


def is_remote(location: str) -> bool:
    """Whether a location is an address such as ``gs://bucket/name`` rather than a local path."""
    return "://" in location and not location.startswith("file://")


def filesystem_of(location: str) -> tuple[fs.FileSystem, str]:
    """The file system of a location, and the path within it.

    An address is a scheme, a bucket and a key, which is taken as it stands: nothing is quoted in it. Options of pyarrow such as
    ``?region=eu-west-1`` may stand at its end. Endpoints other than the clouds' own are given by the environment:
    ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``, ``STORAGE_EMULATOR_HOST`` (without credentials, as Google's clients take it).

    Raises:
        UsageError: the address is of a kind that is not known.
        DatasetError: its object store cannot be reached.
    """
    if "://" not in location:
        return fs.LocalFileSystem(), str(Path(location).expanduser().absolute())
    store = _STORE.fullmatch(location)
    scheme, bucket, key, options = store.groups(default="") if store else ("", "", "", "")
    try:
        with storage_errors(location):
            filesystem, root = _connect(f"{scheme}://{bucket}{options}" if store else location)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"cannot understand the location {location!r}: {error}. Give a local path, gs://BUCKET/PATH or s3://BUCKET/PATH"
        ) from error
    return filesystem, root.rstrip("/") + key.rstrip("/") if store else root


@lru_cache(maxsize=64)
def _connect(address: str) -> tuple[fs.FileSystem, str]:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if address.startswith(("gs://", "gcs://")):
        if emulator and "endpoint_override=" not in address:
            scheme, _, host = emulator.rstrip("/").rpartition("://")
            bucket = address.partition("://")[2].partition("?")[0].rpartition("@")[2]
            limit = timedelta(seconds=_GCS_RETRY_SECONDS)
            endpoint = {"scheme": scheme or "http", "endpoint_override": host}
            return fs.GcsFileSystem(anonymous=True, retry_time_limit=limit, **endpoint), bucket
        if "retry_limit_seconds=" not in address:
            address += f"{'&' if '?' in address else '?'}retry_limit_seconds={_GCS_RETRY_SECONDS}"
    return fs.FileSystem.from_uri(address)


@contextmanager
def storage_errors(location: str) -> Iterator[None]:
    """Turns errors of the operating system or the object store into a ``DatasetError`` that says what to do."""
    try:
        yield
    except (DatasetError, UsageError, FileNotFoundError):
        raise
    except (OSError, pa.ArrowException) as error:
        if not isinstance(error, OSError) and _GOOGLE not in str(error):
            raise  # About what is in a file.
        detail = f"{type(error).__name__}: {error}"
        if is_remote(location):
            advice = next((advice for sign, advice in _REMOTE_ADVICE if re.search(sign, str(error))), "")
            detail = f"{advice} ({detail})" if advice else detail
        else:
            detail = _LOCAL_ADVICE.get(getattr(error, "errno", None) or 0, detail)
        raise DatasetError(f"cannot use {location!r}: {detail}") from error


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Files below a local folder, one directory entry at a time; links to folders are not followed."""
    try:
        with storage_errors(folder):
            entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif not entry.is_dir():
                try:
                    yield prefix + entry.name, entry.stat().st_size
                except OSError:
                    yield prefix + entry.name, -1


@dataclass(frozen=True)
class Folder:
    """A folder; cheap to make and to pickle, nothing is opened before it is needed.

    Attributes:
        location: local path, ``gs://...`` or ``s3://...``.
    """

    location: str

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine."""
        return not is_remote(self.location)

    @property
    def local_path(self) -> Path:
        """The folder as an absolute path; only for a local one."""
        return Path(filesystem_of(self.location)[1])

    def path_of(self, name: str) -> str:
        """Location of a file of the folder, for people and other tools."""
        return f"{self.location.rstrip('/')}/{name}"

    def names(self) -> list[str]:
        """Names of all files below the folder, relative, with ``/``, sorted; empty where there is no folder."""
        return sorted(name for name, _ in self.files())

    def files(self) -> Iterator[tuple[str, int]]:
        """Name and size of every file below the folder, in no particular order; size -1 for a link that leads nowhere."""
        filesystem, root = filesystem_of(self.location)
        if self.is_local:
            yield from _walk(root, "")
            return
        with storage_errors(self.location):
            found = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        prefix = root.rstrip("/") + "/"
        yield from ((info.path.removeprefix(prefix), info.size) for info in found if info.type == fs.FileType.File)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes, or None where there is none."""
        filesystem, root = filesystem_of(self.location)
        with storage_errors(self.path_of(name)):
            info = filesystem.get_file_info(f"{root}/{name}")
        return int(info.size) if info.type == fs.FileType.File else None

    def open(self, name: str) -> pa.NativeFile:
        """Opens a file for random access; local ones are memory-mapped.

        Raises:
            FileNotFoundError: there is no such file.
        """
        filesystem, root = filesystem_of(self.location)
        with storage_errors(self.path_of(name)):
            if self.is_local:
                path = f"{root}/{name}"
                # An empty file cannot be mapped.
                return pa.memory_map(path) if os.path.getsize(path) else pa.OSFile(path)  # noqa: PTH202
            return filesystem.open_input_file(f"{root}/{name}")

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        with self.open(name) as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Writes a file whole or not at all."""
        with self.replace(name) as file:
            file.write(data)

    @contextmanager
    def replace(self, name: str) -> Iterator[BinaryIO]:
        """Gives a temporary file to write to, which becomes ``name`` when the block ends well and vanishes when it does not."""
        with storage_errors(self.path_of(name)):
            temporary = self._temporary_path(name)
            try:
                with temporary.open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                self._publish(temporary, name)
            finally:
                temporary.unlink(missing_ok=True)

    def check_bucket(self) -> None:
        """Refuses a bucket that is not there, before anything is made that could not be written to it.

        Raises:
            DatasetError: there is no such bucket, or the store cannot be reached.
        """
        if self.is_local:
            return
        filesystem, root = filesystem_of(self.location)
        bucket = root.lstrip("/").partition("/")[0]
        with storage_errors(self.location):
            try:
                found = filesystem.get_file_info(bucket).type != fs.FileType.NotFound
            except OSError as error:
                if re.search(_DENIED, str(error)) is None:
                    raise
                found = True  # The right to write objects does not bring along that to look at the bucket itself.
        if not found:
            raise DatasetError(f"cannot use {self.location!r}: there is no bucket {bucket!r}: check its name, or make it first")

    def delete(self, name: str) -> None:
        """Deletes a file if it is there."""
        filesystem, root = filesystem_of(self.location)
        with storage_errors(self.path_of(name)):
            if self.size(name) is not None:
                filesystem.delete_file(f"{root}/{name}")

    def _temporary_path(self, name: str) -> Path:
        if not self.is_local:
            handle, path = tempfile.mkstemp(prefix="imagepivot-")
            os.close(handle)
            return Path(path)
        target = self.local_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.with_name(f".{target.name}{TEMPORARY_MARK}{os.getpid()}")

    def _publish(self, temporary: Path, name: str) -> None:
        if self.is_local:
            temporary.replace(self.local_path / name)
            return
        filesystem, root = filesystem_of(self.location)
        fs.copy_files(str(temporary), f"{root}/{name}", fs.LocalFileSystem(), filesystem)

"""Object stores: buckets, parallel listings, range reads and conditional writes.

A store gives every object a tag that changes with its content: the ETag in S3, the generation in Google Cloud Storage. A
conditional write is a compare-and-swap: it names the tag of the object that it replaces, and exactly one of several concurrent
writers succeeds. Large files are uploaded in parts; the store checks the condition when it completes the upload.

Each store has one client, which also finds credentials and retries requests: botocore in `schemas.storage.s3`, and
google-cloud-storage in `schemas.storage.google_storage`. The extra ``stores`` has both.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from schemas.storage.locations import BucketAddress
from schemas.storage.storage_errors import RefusedError

ANY = ""
"""Matches any object or none, in place of the tag of a conditional write or deletion."""

PAGE_OBJECTS = 1000
"""Objects on a page of a listing, the maximum of the stores."""

PART_BYTES = 16 << 20
"""Size of a part of an upload."""

TEMPORARY_MARK = ".tmp-"
"""Part of the names of temporary files."""

WRITER = "imagepivot-writer"
"""Metadata key of the id of a write. A writer that loses the response finds its own id in the object."""

CONNECT_SECONDS, READ_SECONDS = 10, 60
"""Timeouts for a connection, and for the next bytes of a response."""

CONNECTIONS = 32
"""Connections that a client keeps, and threads of `Folder.map`, which wait for the network."""

_PARALLEL_LISTINGS = 8
_FEW_FOLDERS = 10  # A folder then has at least a hundred of the objects on a page.
_CONFLICT_SECONDS = 0.25


class FileInfo(NamedTuple):
    """A file in a listing.

    Attributes:
        name: path relative to the listed folder; the key of the object on a `Page`.
        size: size in bytes; -1 for a dangling link.
        version: modification time in nanoseconds; empty if unknown.
        tag: tag of the object, see `schemas.storage.object_store`; empty if unknown.
        writer: `WRITER` id of an object from `Bucket.head`; empty in listings, and for objects of other tools.
    """

    name: str
    size: int
    version: str = ""
    tag: str = ""
    writer: str = ""


class Page(NamedTuple):
    """A page of a listing.

    Attributes:
        folders: common prefixes of the keys up to the next ``/``, in a listing by folder.
        is_last: whether the listing ends with the page.
    """

    objects: list[FileInfo]
    folders: list[str]
    is_last: bool


class Bucket(Protocol):
    """A bucket, for use from several threads.

    The client retries failed requests, which finally raise a ``StoreError``. Missing objects raise a ``FileNotFoundError``.

    Attributes:
        name: name of the bucket.
        store: its address without the name.
    """

    name: str
    store: BucketAddress

    def pages(self, prefix: str, *, by_folder: bool = False) -> Iterator[Page]:
        """Yield the pages of a listing of the keys below a prefix, sorted by key.

        ``by_folder`` lists only objects without a further ``/``, and the folders beside them.
        """

    def head(self, key: str) -> FileInfo | None:
        """Return an object without its content; None if it or the bucket does not exist."""

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """Return the bytes of an object, or of a range in it.

        Raises:
            EOFError: the range begins behind the end of the object.
        """

    def write(self, key: str, file: pa.NativeFile, if_match: str | None, writer: str) -> str:
        """Write an object from a file, with a `WRITER` id, and return its tag.

        ``if_match`` is the tag of the object to replace: None to create a new object, `ANY` to replace any.

        Raises:
            RefusedError: the condition does not hold, or did not when the client repeated the request.
        """

    def copy(self, key: str, origin: Bucket, origin_key: str) -> None:
        """Copy an object from a bucket of the same ``store``."""

    def delete(self, key: str, if_match: str) -> None:
        """Delete an object with this tag or `ANY`; another tag raises a ``RefusedError``."""


def is_cut(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether the headers of a response are truncated."""
    return status in (200, 206, 308) and "content-length" not in headers and "transfer-encoding" not in headers


def object_info(key: str, size: int, modified: datetime, tag: str, writer: str = "") -> FileInfo:
    """Return an object modified at a time in UTC."""
    return FileInfo(key, size, str(round(modified.timestamp() * 10**6) * 1000), tag, writer)


def list_objects(bucket: Bucket, prefix: str) -> Iterator[FileInfo]:
    """Yield the objects below a prefix in any order, with names relative to it.

    Stores send the pages of one listing sequentially. If the first page is full and covers few folders, the
    folders are listed in parallel. Many small folders are not: each takes a request.
    """
    with ThreadPoolExecutor(_PARALLEL_LISTINGS, thread_name_prefix="listing") as pool:
        running = {pool.submit(_list_page, bucket, prefix)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for page, following in [future.result() for future in done]:
                running |= {pool.submit(_list_page, bucket, *part) for part in following}
                for entry in page.objects:
                    if not entry.name.endswith("/"):  # A placeholder that some tools write for a folder.
                        yield entry._replace(name=entry.name.removeprefix(prefix))


def _list_page(bucket: Bucket, prefix: str, rest: Iterator[Page] | None = None) -> tuple[Page, list[tuple[Any, ...]]]:
    """Return a page of a listing, and arguments for the pages that follow it."""
    pages = rest or bucket.pages(prefix)
    page = next(pages)
    if page.is_last:
        return page, []
    names = (entry.name.removeprefix(prefix) for entry in page.objects)
    if rest is None and 1 <= len({name.partition("/")[0] for name in names if "/" in name}) <= _FEW_FOLDERS:
        by_folder = next(bucket.pages(prefix, by_folder=True))
        if by_folder.is_last:
            return by_folder, [(folder,) for folder in by_folder.folders]
    return page, [(prefix, pages)]


def put(bucket: Bucket, key: str, data: bytes | Path, if_match: str | None = ANY) -> str | None:
    """Write an object and return its tag; None if its tag is not ``if_match``.

    If the object with this tag was deleted, a new one is written.
    """
    writer = uuid.uuid4().hex
    while True:
        try:
            with pa.BufferReader(data) if isinstance(data, bytes) else pa.OSFile(str(data)) as file:
                return bucket.write(key, file, if_match, writer)
        except RefusedError as error:
            if if_match == ANY and error.status != 404:
                raise
            # The store may have refused only the retry of a write after its response was lost.
            stored = bucket.head(key)
            if stored is not None and stored.writer == writer:
                return stored.tag
            if error.status == 409:
                time.sleep(_CONFLICT_SECONDS)
            elif error.status == 501:
                if_match = ANY  # An S3-compatible store without conditional writes.
            elif stored is None and if_match:
                if_match = None
            elif if_match == ANY or (stored is None and error.status == 404):
                raise
            else:
                return None  # The caller checks the object before a large file is uploaded again.

"""Object stores: buckets, retries, parallel listings and conditional writes.

``pyarrow.fs`` lacks the last two. A store gives every object a tag that changes with its content: the ETag in S3, the generation
in Google Cloud Storage. A conditional write is a compare-and-swap: it names the tag of the object that it replaces, and exactly
one of several concurrent writers succeeds. Large files are uploaded in parallel parts; the store checks the condition when it
completes the upload.

Tags need botocore and obstore, or google-cloud-storage (extra ``pipelines``); `schemas.storage.s3` and
`schemas.storage.google_storage` load them.
"""

from __future__ import annotations

import calendar
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from schemas.storage.locations import STORE

ANY = ""
"""Replaces any object, in place of the tag of a conditional write."""

PAGE_OBJECTS = 1000
"""Objects on a page of a listing, the maximum of the stores."""

PART_BYTES = 16 << 20
"""Minimum size of a part of an upload."""

TEMPORARY_MARK = ".tmp-"
"""Part of the names of temporary files."""

WRITER = "imagepivot-writer"
"""Metadata key of the id of a write. A writer that loses the response finds its own id in the object."""

# All clients retry requests that fail because of the network or a busy store, within these limits.
RETRY_SECONDS, MAX_ATTEMPTS = 15, 5
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0  # Seconds between attempts; each pause is twice as long as the one before.
CONNECT_SECONDS, READ_SECONDS = 10, 60  # Timeouts for a connection, and for the next bytes of a response.

_PARALLEL_PARTS = 4
_PARALLEL_LISTINGS = 8
_FEW_FOLDERS = 10  # A folder then has at least a hundred of the objects on a page.
_T = TypeVar("_T")


def repeat(request: Callable[[], _T], is_transient: Callable[[Exception], bool]) -> _T:
    """Send a request and retry transient errors, for clients without retries."""
    until, pause = time.monotonic() + RETRY_SECONDS, FIRST_PAUSE
    while True:
        try:
            return request()
        except Exception as error:
            if not is_transient(error) or time.monotonic() >= until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


class Entry(NamedTuple):
    """A file in a listing.

    Attributes:
        name: path relative to the listed folder; the key of the object on a `Page`.
        size: size in bytes; -1 for a dangling link.
        version: modification time in nanoseconds; empty if unknown.
        tag: tag of the object, see `schemas.storage.object_store`; empty if unknown.
    """

    name: str
    size: int
    version: str = ""
    tag: str = ""


class Page(NamedTuple):
    """A page of a listing.

    Attributes:
        folders: common prefixes of the keys up to the next ``/``, in a listing by folder.
        next: token of the next page; empty on the last page.
    """

    objects: list[Entry]
    folders: list[str]
    next: str


class Written(NamedTuple):
    """The tag of an object, and its `WRITER` id; empty for objects of other tools."""

    tag: str
    writer: str


class RefusedError(Exception):
    """A conditional write was refused.

    Args:
        status: HTTP status. 404: the object, or a part of the upload, does not exist. 409: another write is under way. 412: the
            object has another tag. 501: the store does not support conditional writes.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Bucket(ABC):
    """A bucket, for use from several threads.

    Failed requests are retried and finally raise a ``StoreError``.
    """

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the bucket exists."""

    @abstractmethod
    def page(self, prefix: str, *, after: str, by_folder: bool) -> Page:
        """List a page of the objects whose keys begin with a prefix, sorted by key.

        ``after`` is the `Page.next` of the previous page, or empty. ``by_folder`` lists only objects without a further ``/``, and
        the folders beside them.
        """

    @abstractmethod
    def head(self, key: str) -> Written | None:
        """Return tag and writer of an object; None if it does not exist."""

    @abstractmethod
    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return content and tag of an object; None if it does not exist."""

    @abstractmethod
    def part(self, key: str, start: int, stop: int) -> bytes | None:
        """Return the bytes of an object in a range; None if it does not exist."""

    @abstractmethod
    def write(self, key: str, data: bytes | Path, replaces: str | None, writer: str) -> str:
        """Write an object from bytes or a file, with a `WRITER` id, and return its tag.

        ``replaces`` is the tag of the object to replace: None to create a new object, `ANY` to replace any.

        Raises:
            RefusedError: the write was refused, perhaps by a retry after a response was lost.
        """

    @abstractmethod
    def delete(self, key: str, tag: str) -> None:
        """Delete an object if it has this tag."""


def size_of(data: bytes | Path) -> int:
    """Return the size of the content of an upload in bytes."""
    return len(data) if isinstance(data, bytes) else data.stat().st_size


def read_part(data: bytes | Path, start: int = 0, size: int = PART_BYTES) -> bytes:
    """Return a part of the content of an upload."""
    if isinstance(data, bytes):
        return data[start : start + size]
    with data.open("rb") as file:
        file.seek(start)
        return file.read(size)


def version_of(modified: datetime) -> str:
    """Return a modification time in UTC as nanoseconds."""
    return str((calendar.timegm(modified.utctimetuple()) * 10**6 + modified.microsecond) * 1000)


def upload_parts(data: bytes | Path, part_bytes: int, send: Callable[[int, bytes], _T]) -> list[_T]:
    """Send an upload in parallel parts, counted from 1; return the results in order."""
    starts = range(0, size_of(data), part_bytes)
    with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="upload") as pool:
        return list(pool.map(lambda part, start: send(part, read_part(data, start, part_bytes)), count(1), starts))


def is_plain(key: str) -> bool:
    """Return whether pyarrow and obstore can name a key.

    A key is not a path: ``/a``, ``a`` and ``./a`` are three objects. Clients that normalize paths read another one.
    """
    return not key or {"", ".", ".."}.isdisjoint(key.split("/"))


def list_level(bucket: Bucket, prefix: str) -> Iterator[str]:
    """Yield the names of objects, and of folders with ``/``, directly below a prefix."""
    after: str | None = ""
    while after is not None:
        page = bucket.page(prefix, after=after, by_folder=True)
        yield from (key.removeprefix(prefix) for key in (*page.folders, *(entry.name for entry in page.objects)))
        after = page.next or None


def has_tags(location: str) -> bool:
    """Return whether a location is in a store with an installed client."""
    if location.startswith("s3://"):
        return _is_installed("botocore") and _is_installed("obstore")
    return location.startswith(("gs://", "gcs://")) and _is_installed("google.cloud.storage")


@lru_cache(maxsize=8)
def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # The parent package is missing.
        return False


def bucket_of(location: str) -> str:
    """Return the address of the bucket of a location, with the options of the address."""
    scheme, bucket, _, options = cast("re.Match[str]", STORE.fullmatch(location)).groups(default="")
    return f"{scheme}://{bucket}{options}"


def list_objects(bucket: Bucket, prefix: str) -> Iterator[Entry]:
    """Yield the objects below a prefix in any order, with names relative to it.

    Stores send the pages of one listing sequentially. If the first page is full and covers few folders, the folders are listed
    in parallel. Many small folders are not: each takes a request.
    """
    todo, running = deque([(prefix, "")]), set[Future[tuple[Page, list[tuple[str, str]]]]]()
    with ThreadPoolExecutor(_PARALLEL_LISTINGS, thread_name_prefix="listing") as pool:
        while todo or running:
            while todo and len(running) < _PARALLEL_LISTINGS:
                running.add(pool.submit(_list_page, bucket, *todo.popleft()))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for page, following in [future.result() for future in done]:
                todo.extend(following)
                for entry in page.objects:
                    if not entry.name.endswith("/"):  # A placeholder that some tools write for a folder.
                        yield entry._replace(name=entry.name.removeprefix(prefix))


def _list_page(bucket: Bucket, prefix: str, after: str) -> tuple[Page, list[tuple[str, str]]]:
    """Return a page of a listing, and prefix and token of the pages that follow it."""
    page = bucket.page(prefix, after=after, by_folder=False)
    if not page.next:
        return page, []
    names = (entry.name.removeprefix(prefix) for entry in page.objects)
    if not after and 1 <= len({name.partition("/")[0] for name in names if "/" in name}) <= _FEW_FOLDERS:
        by_folder = bucket.page(prefix, after="", by_folder=True)
        if not by_folder.next:
            return by_folder, [(folder, "") for folder in by_folder.folders]
    return page, [(prefix, page.next)]


def put(bucket: Bucket, key: str, data: bytes | Path, replaces: str | None = ANY) -> str | None:
    """Write an object and return its tag; None if its tag is not ``replaces``.

    If the object with this tag was deleted, a new one is written.
    """
    writer = uuid.uuid4().hex
    while True:
        try:
            return bucket.write(key, data, replaces, writer)
        except RefusedError as error:
            status = error.status
        # The store may have refused only the retry of a write after its response was lost.
        stored = bucket.head(key)
        if stored is not None and stored.writer == writer:
            return stored.tag
        if status == 412 and (stored is not None or replaces is None):
            return None
        if status == 404 and stored is not None and replaces != ANY:
            return None  # The caller checks the object before a large file is uploaded again.
        if status == 501:
            replaces = ANY  # An S3-compatible store without conditional writes.
        elif status == 409:
            time.sleep(FIRST_PAUSE)
        elif replaces != ANY:
            replaces = None

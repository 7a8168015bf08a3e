"""Object stores: the interface of a bucket, the retry policy of all clients, listing and conditional writes.

``pyarrow.fs`` lacks the last two. A store gives every object a tag, which no other content gets: S3 its ETag, Google's store its
generation. A write may name the tag of the object that it replaces: of any number of concurrent writers that replace the same
object, or create it, exactly one succeeds. Large files are uploaded in parallel parts, and the condition is checked when the last
one has arrived.

Tags take botocore and obstore, or google-cloud-storage, which the extra ``pipelines`` installs; `schemas.storage.s3` and
`schemas.storage.google_storage` load them. Without them there are no tags.
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
"""In place of the tag of what a write replaces: whatever is there."""

PAGE_OBJECTS = 1000
"""Objects of a page of a listing: the most that stores send."""

PART_BYTES = 16 << 20
"""What one request of an upload holds at least."""

TEMPORARY_MARK = ".tmp-"
"""Marks the names of files that are not complete yet."""

WRITER = "imagepivot-writer"
"""Key of an object's metadata that says which write it is from: the answer to a write may be lost."""

_PARALLEL_PARTS = 4
_T = TypeVar("_T")


class RetryPolicy(NamedTuple):
    """The repetition of requests to stores while the network is cut or a store is busy.

    Attributes:
        seconds: a request that fails is repeated until so much time has passed.
        first_pause: pause before the first repetition, in seconds; each further one is twice as long.
        longest_pause: limit of the pauses, in seconds.
        attempts: limit for clients that count attempts, not seconds.
        connect_seconds: limit of the wait for a connection.
        read_seconds: limit of the wait for the next bytes of an answer.
    """

    seconds: int = 15
    first_pause: float = 0.25
    longest_pause: float = 4.0
    attempts: int = 5
    connect_seconds: int = 10
    read_seconds: int = 60

    def repeat(self, request: Callable[[], _T], is_transient: Callable[[Exception], bool]) -> _T:
        """Send a request, again while its error is transient, for clients that do not repeat by themselves."""
        until, pause = time.monotonic() + self.seconds, self.first_pause
        while True:
            try:
                return request()
            except Exception as error:
                if not is_transient(error) or time.monotonic() >= until:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, self.longest_pause)


RETRIES = RetryPolicy()
"""The policy that all clients are given."""


class Entry(NamedTuple):
    """A file as a listing describes it.

    Attributes:
        name: path relative to the folder that is listed; of a `Page` the key.
        size: size in bytes; -1 for a dangling link.
        version: modification time in nanoseconds; empty if it is not known.
        tag: see `schemas.storage.object_store`; empty where there are no tags.
    """

    name: str
    size: int
    version: str = ""
    tag: str = ""


class Page(NamedTuple):
    """A page of a listing.

    Attributes:
        objects: some of the objects.
        folders: what the keys of others begin with, up to the next ``/``, where that was asked for.
        next: what to ask for the next page with; empty for the last one.
    """

    objects: list[Entry]
    folders: list[str]
    next: str


class Written(NamedTuple):
    """What an object is: its tag, and the `WRITER` of its metadata; empty for what others have written."""

    tag: str
    writer: str


class RefusedError(Exception):
    """A write was refused.

    Args:
        status: the store's answer: 404 where nothing is there, or what was being sent is lost; 409 while another write is under
            way; 412 where something else is there than what was to be replaced; 501 where the store knows no conditions.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Bucket(ABC):
    """A bucket; any number of threads may ask it at once. What fails is tried again, up to a limit, and is then an OSError."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is such a bucket."""

    @abstractmethod
    def page(self, prefix: str, *, after: str, by_folder: bool) -> Page:
        """Return a page of the objects whose keys begin with a prefix.

        Args:
            prefix: the prefix; if it is not empty, it ends in ``/``.
            after: the `Page.next` of the page before; empty for the first one.
            by_folder: return what lies in deeper folders as these folders.
        """

    @abstractmethod
    def head(self, key: str) -> Written | None:
        """Return what an object is; None if there is none."""

    @abstractmethod
    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return content and tag of an object; None if there is none."""

    @abstractmethod
    def part(self, key: str, start: int, stop: int) -> bytes | None:
        """Return a range of the bytes of an object, which has some there; None if there is no object."""

    @abstractmethod
    def write(self, key: str, data: bytes | Path, replaces: str | None, writer: str) -> str:
        """Write an object, and return its tag.

        Args:
            key: the key.
            data: the content, or a file that holds it.
            replaces: tag of the object that is replaced; None to write a new one, `ANY` to replace whatever is there.
            writer: see `WRITER`.

        Raises:
            RefusedError: the object was not written, or the answer to that was lost.
        """

    @abstractmethod
    def delete(self, key: str, tag: str) -> None:
        """Delete an object if it still has a tag."""


def size_of(data: bytes | Path) -> int:
    """Return the size of what is to be written."""
    return len(data) if isinstance(data, bytes) else data.stat().st_size


def version_of(modified: datetime) -> str:
    """Return a modification time, in UTC, as nanoseconds."""
    return str((calendar.timegm(modified.utctimetuple()) * 10**6 + modified.microsecond) * 1000)


def in_parts(data: bytes | Path, part_bytes: int, send: Callable[[int, bytes], _T]) -> list[_T]:
    """Send what is to be written in parts, numbered from 1 and some at once, and return the results in order."""
    starts = range(0, size_of(data), part_bytes)
    with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="upload") as pool:
        return list(pool.map(lambda number, start: send(number, _read(data, start, part_bytes)), count(1), starts))


def _read(data: bytes | Path, start: int, size: int) -> bytes:
    if isinstance(data, bytes):
        return data[start : start + size]
    with data.open("rb") as file:
        file.seek(start)
        return file.read(size)


_PARALLEL_LISTINGS = 8
_FEW_FOLDERS = 10  # Of the thousand objects of a page, then, a folder holds a hundred or more.


def has_tags(location: str) -> bool:
    """Return whether objects of a store have tags here, and can be written under a condition."""
    if location.startswith("s3://"):
        return _is_installed("botocore") and _is_installed("obstore")
    return location.startswith(("gs://", "gcs://")) and _is_installed("google.cloud.storage")


@lru_cache(maxsize=8)
def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # A package that it is part of.
        return False


def bucket_of(location: str) -> str:
    """Return the address of the bucket of a location, with the options behind it."""
    scheme, bucket, _, options = cast("re.Match[str]", STORE.fullmatch(location)).groups(default="")
    return f"{scheme}://{bucket}{options}"


def list_objects(bucket: Bucket, prefix: str) -> Iterator[Entry]:
    """Yield the objects whose keys begin with a prefix, in no particular order, page by page; a few pages are in memory.

    The names of the entries lack the prefix. A store sends a page after the other. Where the first one is full, and what is in it
    lies in a few folders, the folders are listed side by side. Many small folders are not: each would take a request of its own.
    """
    todo, running = deque([(prefix, "")]), set[Future[tuple[Page, list[tuple[str, str]]]]]()
    with ThreadPoolExecutor(_PARALLEL_LISTINGS, thread_name_prefix="listing") as pool:
        while todo or running:
            while todo and len(running) < _PARALLEL_LISTINGS:
                running.add(pool.submit(_listed, bucket, *todo.popleft()))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            pages = [future.result() for future in done]
            for _, more in pages:
                todo.extend(more)
            for page, _ in pages:
                for found in page.objects:
                    if not found.name.endswith("/"):  # Which some tools write in place of a folder.
                        yield found._replace(name=found.name.removeprefix(prefix))


def _listed(bucket: Bucket, prefix: str, after: str) -> tuple[Page, list[tuple[str, str]]]:
    """Return a page of a listing, and where it goes on: in what prefixes, after what."""
    page = bucket.page(prefix, after=after, by_folder=False)
    if not page.next:
        return page, []
    seen = {
        found.name.removeprefix(prefix).partition("/")[0] for found in page.objects if "/" in found.name.removeprefix(prefix)
    }
    if not after and 1 <= len(seen) <= _FEW_FOLDERS:
        folders = bucket.page(prefix, after="", by_folder=True)
        if not folders.next:
            return folders, [(folder, "") for folder in folders.folders]
    return page, [(prefix, page.next)]


def put(bucket: Bucket, key: str, data: bytes | Path, replaces: str | None = ANY) -> str | None:
    """Write an object as `Bucket.write` does, and return its tag; None if another object than the one that it replaces is there.

    Where an object with the tag has been deleted, a new one is written.
    """
    writer = uuid.uuid4().hex
    while True:
        try:
            return bucket.write(key, data, replaces, writer)
        except RefusedError as error:
            status = error.status
        # The answer to a write of our own may have been lost, and its repetition refused.
        found = bucket.head(key)
        if found is not None and found.writer == writer:
            return found.tag
        if status == 412 and (found is not None or replaces is None):
            return None
        if status == 404 and found is not None and replaces != ANY:
            return None  # Large files are not sent again before somebody has looked at what is there.
        if status == 501:
            replaces = ANY  # A store of another maker, which knows no conditions.
        elif status == 409:
            time.sleep(RETRIES.first_pause)  # Another write was under way: its outcome decides.
        elif replaces != ANY:
            replaces = None

"""Listing and conditional writes of object stores, which ``pyarrow.fs`` lacks.

A store gives every object a tag, which no other content gets: S3 its ETag, Google's store its generation. A write may name the tag
of what it replaces: of any number of writers at once that replace the same object, or none, exactly one succeeds. Large files go
up in parts, side by side, and the condition counts for the moment when the last one is there.

This takes botocore and obstore, or google-cloud-storage, which the extra ``pipelines`` installs; `schemas.storage.s3` and
`schemas.storage.google_storage` load them. Without them there are no tags.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from schemas.storage.bucket import ANY, RETRIES, Bucket, Entry, Page, RefusedError
from schemas.storage.locations import STORE

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


def open_bucket(location: str) -> Bucket:
    """Return the bucket of a location."""
    return _open(bucket_of(location))


def bucket_of(location: str) -> str:
    """Return the address of the bucket of a location, with the options behind it."""
    scheme, bucket, _, options = cast("re.Match[str]", STORE.fullmatch(location)).groups(default="")
    return f"{scheme}://{bucket}{options}"


@lru_cache(maxsize=64)
def _open(address: str) -> Bucket:
    if address.startswith("s3://"):
        from schemas.storage.s3 import S3Bucket

        return S3Bucket(address)
    from schemas.storage.google_storage import GoogleBucket

    return GoogleBucket(address)


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
    """Write an object, if the one that it replaces is still there.

    Args:
        bucket: the bucket.
        key: key of the object.
        data: the content, or a file that holds it.
        replaces: tag of the object that is replaced; None to write a new one, `ANY` to replace whatever is there. Where an object
            with the tag has been deleted, a new one is written.

    Returns:
        The tag of what was written; None if something else is there.
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

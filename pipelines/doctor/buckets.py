"""What a bucket answers: whether it is there, may be listed and written to, and how fast. What is written is deleted again."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from pipelines.doctor.credentials import source_of
from pipelines.doctor.findings import Finding
from schemas import stores
from schemas.errors import ImagepivotError
from schemas.filesystems import storage_errors
from schemas.locations import check_location
from schemas.storage import TEMPORARY_MARK, Folder

__all__ = ["check_bucket"]

_GROUP = "storage"
_TRIES = 5
_SLOW_SECONDS = 0.5
_SLOW = 5e6
_NONE = "none were found"


def check_bucket(location: str, size: int) -> Iterator[Finding]:
    """Find out whether a run could write into a folder of an object store.

    Args:
        location: the folder, ``gs://...`` or ``s3://...``.
        size: bytes to write and read back, to measure the rates.

    Raises:
        ImagepivotError: the store cannot be reached, or refuses what a run needs.
    """
    check_location(location)
    folder = Folder(location)
    with storage_errors(location):
        source = source_of(location)
    advice = "" if source != _NONE else "log in, set the variables of the cloud's own tools, or use a machine with a role"
    values = {"location": location, "source": source}
    yield Finding(_GROUP, "credentials", "ok" if source != _NONE else "note", f"{location!r}: {source}", advice, values)
    started = time.perf_counter()
    folder.check_bucket()
    with storage_errors(location):
        if folder.has_tags:
            next(stores.objects(location), None)
        else:
            folder.children()
    words = f"{location!r} is there, and can be listed"
    yield Finding(
        _GROUP, "bucket", "ok", words, values={"location": location, "seconds": round(time.perf_counter() - started, 4)}
    )
    name = f".doctor{TEMPORARY_MARK}{uuid.uuid4().int >> 64}"
    try:
        yield from _check_conditions(folder, name)
        yield from _measure(folder, name, size)
    finally:
        with suppress(ImagepivotError):  # What counts is why the check failed.
            folder.delete(name)


def _check_conditions(folder: Folder, name: str) -> Iterator[Finding]:
    """Write an object twice, the second time only if it is not there."""
    if not folder.has_tags:
        folder.write(name, b"1")
        found = "an object can be written, but without the store's own client not under conditions"
        yield Finding(_GROUP, "writing", "note", found, "pip install 'imagepivot[pipelines]'", {"conditions": None})
        return
    first, second = folder.swap(name, b"1", None), folder.swap(name, b"2", None)
    if first is not None and second is None:
        found = "objects can be written, and only where nothing else lies: attempts of a shard never mix"
        yield Finding(_GROUP, "writing", "ok", found, values={"conditions": True})
    else:
        found = "objects can be written, but the store ignores conditions: two attempts of a shard may mix"
        yield Finding(_GROUP, "writing", "note", found, "let only one command at a time write there", {"conditions": False})


def _measure(folder: Folder, name: str, size: int) -> Iterator[Finding]:
    """Measure how long a request takes, and how fast bytes go up and down."""
    waits = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        folder.size(name)
        waits.append(time.perf_counter() - started)
    wait = statistics.median(waits)
    data = os.urandom(size)
    started = time.perf_counter()
    folder.write(name, data)
    written = time.perf_counter()
    came_back = folder.read(name) == data
    read = time.perf_counter()
    up, down = size / max(written - started, 1e-9), size / max(read - written, 1e-9)
    found = f"{1000 * wait:.0f} ms a request, {up / 1e6:,.1f} MB/s up, {down / 1e6:,.1f} MB/s down"
    values = {
        "seconds_of_request": round(wait, 4),
        "bytes_per_second_up": round(up),
        "bytes_per_second_down": round(down),
        "bytes": size,
    }
    if not came_back:
        found = "what is read is not what was written"
        advice = "the store, or something in between, keeps an old copy: turn off its cache for this bucket"
        yield Finding(_GROUP, "speed", "problem", found, advice, values)
    elif wait > _SLOW_SECONDS or min(up, down) < _SLOW:
        advice = "run in the region of the bucket; images in archives take fewer requests than files"
        yield Finding(_GROUP, "speed", "note", found, advice, values)
    else:
        yield Finding(_GROUP, "speed", "ok", found, values=values)

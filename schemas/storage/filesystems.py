"""File systems of pyarrow: local disks, ``gs://`` and ``s3://``."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from schemas.errors import UsageError
from schemas.storage import object_store
from schemas.storage.locations import STORE, check_location, is_remote, plain_location
from schemas.storage.storage_errors import storage_errors


def filesystem_of(location: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a location and the path within it.

    An address has a scheme, a bucket, a literal key (without percent-encoding) and perhaps pyarrow options such as
    ``?region=eu-west-1``. Environment variables override the endpoints: ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL`` and
    ``STORAGE_EMULATOR_HOST``, which is accessed without credentials.

    Raises:
        UsageError: the location is invalid, or the scheme of the address is unknown.
        DatasetError: the object store cannot be reached.
    """
    check_location(location)
    location = plain_location(location)
    if not is_remote(location):
        return fs.LocalFileSystem(), str(Path(location).absolute())
    store = STORE.fullmatch(location)
    scheme, bucket, key, options = store.groups(default="") if store else ("", "", "", "")
    try:
        with storage_errors(location):
            filesystem, root = _connect(f"{scheme}://{bucket}{options}" if store else location)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"cannot understand the location {location!r}: {error}. Give a local path, gs://BUCKET/PATH or s3://BUCKET/PATH"
        ) from error
    return filesystem, root.rstrip("/") + key.rstrip("/") if store else root


def store_settings(address: str) -> tuple[str, dict[str, Any]]:
    """Return the bucket name of an address, and pyarrow's connection settings."""
    filesystem, bucket = filesystem_of(address)
    return bucket.rstrip("/"), filesystem.__reduce__()[1][0]


@lru_cache(maxsize=64)
def _connect(address: str) -> tuple[fs.FileSystem, str]:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if address.startswith(("gs://", "gcs://")):
        if emulator and "endpoint_override=" not in address:
            scheme, _, host = emulator.rstrip("/").rpartition("://")
            bucket = address.partition("://")[2].partition("?")[0].rpartition("@")[2]
            limit = timedelta(seconds=object_store.RETRY_SECONDS)
            endpoint = {"scheme": scheme or "http", "endpoint_override": host}
            return fs.GcsFileSystem(anonymous=True, retry_time_limit=limit, **endpoint), bucket
        if "retry_limit_seconds=" not in address:
            address += f"{'&' if '?' in address else '?'}retry_limit_seconds={object_store.RETRY_SECONDS}"
    filesystem, root = fs.FileSystem.from_uri(address)
    if filesystem.type_name == "s3":
        rebuild, (settings,) = filesystem.__reduce__()
        if "allow_delayed_open" in settings:  # pyarrow 20: a small file takes one request instead of three.
            retries = fs.AwsStandardS3RetryStrategy(max_attempts=object_store.MAX_ATTEMPTS)
            filesystem = rebuild({**settings, "allow_delayed_open": True, "retry_strategy": retries})
    return filesystem, root

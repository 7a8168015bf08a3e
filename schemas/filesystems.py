"""The file systems behind locations, local disks, ``gs://`` and ``s3://``, all through ``pyarrow.fs``; what their errors mean."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from schemas.buckets import RETRIES
from schemas.errors import DatasetError, UsageError
from schemas.locations import STORE, check_location, is_remote, plain_location

__all__ = [
    "NoSuchBucketError",
    "StoreAccessError",
    "StoreBusyError",
    "StoreError",
    "StoreUnreachableError",
    "filesystem_of",
    "storage_errors",
    "store_error_of",
]

_LOCAL_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and run the same command again (train with --resume); finished work is kept",
    errno.EDQUOT: "the disk quota is used up: free some space and run the same command again (train with --resume)",
    errno.EEXIST: "the path is a file or a link to nothing, expected a folder: remove it, or choose another folder",
    errno.EFBIG: "the file would be larger than this account or file system allows: see ulimit -f; more shards make smaller files",
    errno.EACCES: "permission denied: check who owns the folder, or choose another one",
    errno.EPERM: "permission denied: check who owns the folder, or choose another one",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "the path is a folder, expected a file",
}


class StoreError(OSError):
    """A failure of an object store, raised where the exception of a client is caught."""

    advice = ""


class NoSuchBucketError(StoreError):
    """The bucket does not exist."""

    advice = "there is no such bucket: check its name, or create it first"


class StoreAccessError(StoreError):
    """The store refuses the credentials, or the client finds none."""

    advice = "access denied: check the credentials of this machine and what they allow"


class StoreBusyError(StoreError):
    """The store answers that it cannot serve the request now."""

    advice = "it is busy or down: run the same command again later"


class StoreUnreachableError(StoreError):
    """The store does not answer."""

    advice = "it cannot be reached: check the network, and AWS_ENDPOINT_URL or STORAGE_EMULATOR_HOST where they are set"


_REMOTE_ADVICE = {
    errno.EACCES: StoreAccessError.advice,  # Of a file of credentials.
    errno.ENOSPC: "the disk for temporary files is full: free some space, or set TMPDIR",
}

# pyarrow passes on only the text of a store's answer. The first pattern in it counts; every such text has the last one.
_ARROW_ERRORS: tuple[tuple[str, type[StoreError]], ...] = (
    ("NO_SUCH_BUCKET", NoSuchBucketError),
    (
        "ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE|EXPIRED|MISSING_AUTHENTICATION|PERMISSION_DENIED|"
        "UNAUTHENTICATED|[Cc]redential|OAuth2|access token|Permission denied",
        StoreAccessError,
    ),
    (r"HTTP status (code: )?(429|5\d\d)|SERVICE_UNAVAILABLE|SLOW_DOWN", StoreBusyError),
    ("NETWORK_CONNECTION|CURL error|UNAVAILABLE|DEADLINE_EXCEEDED", StoreUnreachableError),
    ("", StoreError),
)
_ARROW_STORE = re.compile(r"AWS Error|google::cloud::Status|\bcurl|HTTP status", re.IGNORECASE)


def filesystem_of(location: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a location, in any form that `plain_location` takes, and the path within it.

    An address consists of a scheme, a bucket and a key. The key is taken literally: nothing in it is unquoted. pyarrow options
    such as ``?region=eu-west-1`` may follow. Environment variables choose endpoints other than the clouds' own:
    ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``, and ``STORAGE_EMULATOR_HOST`` (used without credentials, as Google's
    clients do).

    Raises:
        UsageError: the location cannot exist, or the scheme of the address is unknown.
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


@lru_cache(maxsize=64)
def _connect(address: str) -> tuple[fs.FileSystem, str]:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if address.startswith(("gs://", "gcs://")):
        if emulator and "endpoint_override=" not in address:
            scheme, _, host = emulator.rstrip("/").rpartition("://")
            bucket = address.partition("://")[2].partition("?")[0].rpartition("@")[2]
            limit = timedelta(seconds=RETRIES.seconds)
            endpoint = {"scheme": scheme or "http", "endpoint_override": host}
            return fs.GcsFileSystem(anonymous=True, retry_time_limit=limit, **endpoint), bucket
        if "retry_limit_seconds=" not in address:
            address += f"{'&' if '?' in address else '?'}retry_limit_seconds={RETRIES.seconds}"
    filesystem, root = fs.FileSystem.from_uri(address)
    if filesystem.type_name == "s3":
        rebuild, (settings,) = filesystem.__reduce__()
        if "allow_delayed_open" in settings:  # pyarrow 20: a small file takes one request instead of three.
            filesystem = rebuild(
                {
                    **settings,
                    "allow_delayed_open": True,
                    "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=RETRIES.attempts),
                }
            )
    return filesystem, root


@contextmanager
def storage_errors(location: str) -> Iterator[None]:
    """Turn errors of the operating system or the object store into a ``DatasetError`` that says what to do."""
    try:
        yield
    except (DatasetError, UsageError, FileNotFoundError):
        raise
    except (OSError, pa.ArrowException) as error:
        store_error = store_error_of(error)
        if store_error is None and not isinstance(error, OSError):
            raise  # About the contents of a file.
        detail, code = f"{type(error).__name__}: {error}", getattr(error, "errno", None) or 0
        if is_remote(location):
            advice = store_error.advice if store_error else _REMOTE_ADVICE.get(code, "")
            detail = f"{advice} ({detail})" if advice else detail
        else:
            detail = _LOCAL_ADVICE.get(code, detail)
        raise DatasetError(f"cannot use {location!r}: {detail}") from error


def store_error_of(error: BaseException) -> type[StoreError] | None:
    """Return the class of a failure of an object store, of which pyarrow tells the text alone; None for any other error."""
    if isinstance(error, StoreError):
        return type(error)
    text = str(error)
    if not _ARROW_STORE.search(text):
        return None
    return next(store_error for pattern, store_error in _ARROW_ERRORS if re.search(pattern, text))

"""Errors of disks and object stores with their advice, and errors of damaged files."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from schemas.errors import DatasetError, UsageError
from schemas.storage.locations import is_remote

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
    """Return the class of a failure of an object store; None for any other error.

    Of pyarrow's errors only the text tells the class.
    """
    if isinstance(error, StoreError):
        return type(error)
    text = str(error)
    if not _ARROW_STORE.search(text):
        return None
    return next(store_error for pattern, store_error in _ARROW_ERRORS if re.search(pattern, text))


def damaged(path: str, problem: str) -> DatasetError:
    """Return the error about a damaged file of a dataset; the problem is a clause that follows its name."""
    return DatasetError(
        f"{path} {problem}: copy the whole folder again, or run the command that made it again with --verify, which makes only "
        "what is damaged"
    )


@contextmanager
def content_errors(path: str) -> Iterator[None]:
    """Turn whatever pyarrow and Python raise about the contents of a file into a ``DatasetError``.

    Nothing but reading and decoding may stand in the block: it cannot tell a damaged file from a mistake of ours.
    """
    try:
        yield
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        if store_error_of(error):
            with storage_errors(path):
                raise
        # Of a remote file it may be the connection that failed.
        verb = "cannot be read" if is_remote(path) and isinstance(error, OSError) else "is damaged"
        raise damaged(path, f"{verb} ({' '.join(str(error).split()) or type(error).__name__})") from error

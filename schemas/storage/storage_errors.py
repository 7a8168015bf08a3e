"""Errors of disks and object stores, with advice."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.errors import DatasetError
from schemas.storage.locations import is_remote

_LOCAL_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and run the same command again (train with --resume); finished work is kept",
    errno.EDQUOT: "the disk quota is used up: free some space and run the same command again (train with --resume)",
    errno.EEXIST: "the path is a file or a link to nothing, expected a folder: choose another folder",
    errno.ELOOP: "the path is a link that is not followed, or a loop of links: remove the link, or choose another folder",
    errno.ENAMETOOLONG: "a name in the path is too long, expected at most 255 bytes: choose a shorter one",
    errno.EFBIG: "the file would be larger than this account or file system allows: see ulimit -f; more shards make smaller files",
    errno.EACCES: "permission denied: check who owns the folder, or choose another one",
    errno.EPERM: "permission denied: check who owns the folder, or choose another one",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOENT: "its file system, such as /proc, does not allow it: choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another folder",
    errno.EISDIR: "the path is a folder, expected a file: give the path of a file",
}


class StoreError(OSError):
    """A failure of an object store, converted from an exception of its client.

    Attributes:
        status: HTTP status of the response; 0 without any.
        advice: likely cause, and what to do.
    """

    advice = ""

    def __init__(self, message: str, status: int = 0, advice: str = "") -> None:
        super().__init__(message)
        self.status, self.advice = status, advice or self.advice


class NoSuchBucketError(StoreError, FileNotFoundError):
    """The bucket does not exist."""

    advice = "there is no such bucket: check its name, or create it first"


class StoreAccessError(StoreError):
    """The store rejects the credentials, or the client finds none."""

    advice = "access denied: check the credentials of this machine and what they allow"


class RefusedError(StoreError):
    """A condition of a write does not hold.

    Status 404: the object, or a part of the upload, does not exist. 409: another write is under way. 412: the
    object has another tag. 501: the store does not support conditions.
    """


_UNREACHABLE = "it cannot be reached: check the network, and AWS_ENDPOINT_URL or STORAGE_EMULATOR_HOST where they are set"
_REMOTE_ADVICE = {
    errno.EACCES: StoreAccessError.advice,  # Reading a file of credentials.
    errno.ENOSPC: "the disk for temporary files is full: free some space, or set TMPDIR",
}

# Classes of botocore, of Google's client and of requests, by name: a client is imported only for addresses of its store.
_CLIENT_ERRORS = {
    "": "ClientError BotoCoreError GoogleAPICallError",
    StoreAccessError.advice: (
        "NoCredentialsError PartialCredentialsError CredentialRetrievalError SSOError TokenRetrievalError "
        "ProfileNotFound GoogleAuthError"
    ),
    _UNREACHABLE: "ConnectionError HTTPClientError ResponseParserError RequestException RetryError TransportError",
}
_BY_NAME = {name: advice for advice, names in _CLIENT_ERRORS.items() for name in names.split()}
_BY_STATUS = {401: StoreAccessError, 403: StoreAccessError, 409: RefusedError, 412: RefusedError, 501: RefusedError}


@contextmanager
def client_errors(missing: type[StoreError] | None = None) -> Iterator[None]:
    """Convert exceptions of a store's client.

    Raises:
        FileNotFoundError: the object does not exist; its message names no path. ``missing`` replaces it.
        EOFError: a range begins behind the end of the object.
        StoreError: any other failure.
    """
    try:
        yield
    except Exception as error:
        advice = next((_BY_NAME[base.__name__] for base in type(error).__mro__ if base.__name__ in _BY_NAME), None)
        if advice is None:
            raise
        status, code = _response_of(error)
        kind = StoreAccessError if advice == StoreAccessError.advice else _BY_STATUS.get(status, StoreError)
        if status == 416:
            raise EOFError from error
        if code == "NoSuchBucket":
            kind = NoSuchBucketError
        elif "Expired" in code or code == "InvalidAccessKeyId":  # Some stores answer 404.
            kind = StoreAccessError
        elif status == 404:
            if missing is None:
                # Failures of images quote the cause, which must not depend on the store.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
            kind = missing
        elif status == 429 or status >= 500:
            advice = "it is busy or down: run the same command again later"
        raise kind(str(error), status, advice if kind is StoreError else "") from error


def _response_of(error: Any) -> tuple[int, str]:
    """Return HTTP status and code of the store's response; 0 and empty without any."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # Of botocore.
        return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"].get("Code", "")
    last = getattr(error, "cause", error)  # The last failure that Google's client retried.
    return int(getattr(last, "code", None) or 0), ""


@contextmanager
def storage_errors(location: str, *, creates: bool = False) -> Iterator[None]:
    """Convert errors of the disk or the object store to a ``DatasetError``.

    A ``FileNotFoundError`` of a local file is converted only where the block ``creates`` the file.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not isinstance(error, StoreError) and not creates:
            raise
        detail, code = f"{type(error).__name__}: {error}", error.errno or 0
        if is_remote(location):
            advice = error.advice if isinstance(error, StoreError) else _REMOTE_ADVICE.get(code, "")
            detail = f"{advice} ({detail})" if advice else detail
        else:
            detail = _LOCAL_ADVICE.get(code, f"{detail}: check the disk, or choose another folder")
        raise DatasetError(f"cannot use {location!r}: {detail}") from error


def create_folder(path: Path) -> None:
    """Create a local folder with its parents, if it does not exist.

    Raises:
        DatasetError: the folder cannot be created.
    """
    with storage_errors(str(path), creates=True):
        path.mkdir(parents=True, exist_ok=True)

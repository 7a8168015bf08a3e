"""Whole objects of stores, in one request each, by many threads at once.

``pyarrow.fs`` streams an object of Google Cloud Storage in one request. Of S3 it asks for the size first, so ``obstore`` reads
there; pyarrow still says which endpoint and region an address means, and botocore finds the credentials as the cloud's own tools
do.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from schemas.buckets import RETRIES
from schemas.filesystems import StoreAccessError, StoreUnreachableError, filesystem_of, storage_errors
from schemas.s3 import settings_of
from schemas.storage import Folder
from schemas.stores import bucket_of

__all__ = ["open_ranges", "read_object"]

_CREDENTIALS_SECONDS = 300  # botocore renews its own; it is asked again after this time.


def read_object(folder: Folder, name: str) -> bytes:
    """Return all bytes of a file, local or in a store; of a store in one request.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: it cannot be read.
    """
    if folder.is_local:
        return folder.read(name)
    try:
        return _read_s3(folder, name) if folder.location.startswith("s3://") else folder.read(name)
    except FileNotFoundError as error:  # Without the name: messages become rows of failures, wherever the images lie.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error


def open_ranges(folder: Folder, name: str) -> io.RawIOBase:
    """Open a file in S3 for reading, each read by a request of its own: one that breaks off is made again, alone.

    pyarrow's own file gives up where an answer breaks off in its middle.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetError: the store cannot be read.
    """
    size = folder.size(name)
    if size is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return _Ranges(folder, name, size)


class _Ranges(io.RawIOBase):
    def __init__(self, folder: Folder, name: str, size: int) -> None:
        self._folder = folder
        self._name = name
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._position)
        if count <= 0:
            return 0
        data = self._folder.read_part(self._name, self._position, count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _read_s3(folder: Folder, name: str) -> bytes:
    from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

    with storage_errors(folder.path_of(name)):
        try:
            key = f"{filesystem_of(folder.location)[1]}/{name}".partition("/")[2]
            return _get(_s3_store(bucket_of(folder.location)), key)
        except ValueError:  # obstore takes no control characters in keys.
            return folder.read(name)
        except (NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(name) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreAccessError(errno.EACCES, os.strerror(errno.EACCES)) from error
        except BaseError as error:
            raise StoreUnreachableError(errno.EIO, "NETWORK_CONNECTION: the store does not answer") from error


def _get(store: Any, key: str) -> bytes:
    """Return the bytes of an object; obstore itself does not ask again where an answer breaks off."""
    from obstore.exceptions import GenericError

    return RETRIES.repeat(lambda: bytes(store.get(key).bytes()), lambda error: isinstance(error, GenericError))


@lru_cache(maxsize=64)
def _s3_store(address: str) -> Any:
    """Return a store that reads a bucket with the settings that pyarrow finds for its address."""
    from obstore.store import S3Store

    settings = settings_of(address)
    options: dict[str, Any] = {"endpoint": settings.endpoint} if settings.endpoint else {}
    if settings.anonymous:
        options["skip_signature"] = True
    elif settings.keys:
        options |= dict(zip(("access_key_id", "secret_access_key"), settings.keys, strict=True))
    else:
        options["credential_provider"] = _credentials()
    return S3Store(
        settings.bucket,
        region=settings.region,
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=RETRIES.connect_seconds),
            "timeout": timedelta(seconds=RETRIES.read_seconds),
        },
        retry_config={
            "max_retries": RETRIES.attempts - 1,
            "retry_timeout": timedelta(seconds=RETRIES.seconds),
            "backoff": {
                "init_backoff": timedelta(seconds=RETRIES.first_pause),
                "max_backoff": timedelta(seconds=RETRIES.longest_pause),
                "base": 2,
            },
        },
        **options,
    )


def _credentials() -> Callable[[], Any]:
    from botocore.session import get_session

    found = get_session().get_credentials()
    if found is None:
        raise StoreAccessError(errno.EACCES, os.strerror(errno.EACCES))

    def provide() -> dict[str, Any]:
        keys = found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_SECONDS),
        }

    return provide

"""Locations as people give them: local paths, ``file://`` addresses, addresses of stores and servers. Loads nothing."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes

from schemas.errors import DatasetError, UsageError

_FILE_ADDRESS = re.compile(r"file://([^/]*)(/.*)?", re.DOTALL | re.IGNORECASE)

STORE = re.compile(r"(s3|gs|gcs)://([^/?]+)(/.*?)?(\?\w+=[^/?]*)?", re.DOTALL)
"""An address of a store: scheme, bucket (perhaps with credentials and "@" in front), key, pyarrow options."""

_SPECIAL = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_remote(location: str) -> bool:
    """Return whether a location is an address such as ``gs://bucket/name`` rather than a local path."""
    return "://" in location and _FILE_ADDRESS.match(location) is None


def check_location(location: str) -> None:
    """Check that something can be at a location at all.

    Raises:
        UsageError: it is empty, names no bucket, or holds what no path holds.
    """
    fault = ""
    if not location:
        fault = "it is empty"
    elif "\0" in location:
        fault = "it holds a NUL character"
    elif re.match(r"(s3|gs|gcs):/+", location) and not STORE.fullmatch(location):
        fault = "it names no bucket"
    elif location != location.encode("utf-8", "ignore").decode():
        fault = "it is not UTF-8; if its name is, set PYTHONUTF8=1"
    if fault:
        raise UsageError(
            f"cannot use the location {location!r}: {fault}. Give a local path, gs://BUCKET/PATH or s3://BUCKET/PATH"
        )


def plain_location(location: str | os.PathLike[str]) -> str:
    """Return a location as everything below expects it: a local path as such, an address of a store unchanged.

    ``file:///a%20b`` and ``file://localhost/a%20b`` mean the path ``/a b``; ``~`` and ``~user`` at the start of a path mean a home
    folder, if there is such a user.

    Raises:
        UsageError: a ``file://`` address names another machine, or no path.

    Example:
        >>> plain_location("file:///photos/a%20b.jpg")
        '/photos/a b.jpg'
    """
    text = os.fspath(location)
    address = _FILE_ADDRESS.fullmatch(text)
    if address is None:
        return text if "://" in text else os.path.expanduser(text)  # noqa: PTH111 -- a path that is unknown stays as it is
    host, path = address.groups(default="")
    if host.lower() not in ("", "localhost") or not path or "%00" in path:
        raise UsageError(
            f"cannot understand the location {text!r}: a file address names an absolute path on this machine, such as "
            "file:///data/photos"
        )
    return os.fsdecode(unquote_to_bytes(path))


def absolute_location(location: str | os.PathLike[str]) -> str:
    """Return a location as it means the same in every folder: an absolute path, or an address unchanged."""
    text = plain_location(location)
    # Not `Path.resolve`: messages should show the path that the user knows, not the target of a link.
    return text if is_remote(text) else os.path.abspath(text)  # noqa: PTH100


def local_path(location: str | os.PathLike[str]) -> Path:
    """Return the path that a local location means, see `plain_location`."""
    return Path(plain_location(location))


def target_path(location: str) -> Path:
    """Return the path of a location that must be on this machine, for what cannot be written elsewhere.

    Raises:
        UsageError: it is an address elsewhere, or cannot exist.
    """
    check_location(location)
    if is_remote(location):
        raise UsageError(f"cannot write to {location!r}: give a local folder, and copy it where you want it")
    return local_path(location)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check that a local path is not a pipe, a socket or a device, which could keep a reader waiting for ever.

    Raises:
        DatasetError: it is one of these; its cause is an OSError, as for everything that cannot be read.
        OSError: there is no such file.
    """
    mode = os.stat(path).st_mode  # noqa: PTH116
    kind = next((kind for is_kind, kind in _SPECIAL if is_kind(mode)), None)
    if kind is not None:
        raise DatasetError(
            f"cannot use {os.fspath(path)!r}: it is {kind}, expected a file; save in a file what can be read from it"
        ) from OSError(errno.EINVAL, f"{kind}, not a file")

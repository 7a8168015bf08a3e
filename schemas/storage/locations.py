"""Storage locations: local paths, and URLs of files, object stores and servers."""

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

from schemas.errors import DatasetError, UsageError

_FILE_ADDRESS = re.compile(r"file://([^/]*)(/.*)?", re.DOTALL | re.IGNORECASE)

STORE = re.compile(r"(s3|gs|gcs)://([^/?]+)(/.*?)?(\?\w+=[^/?]*)?", re.DOTALL)
"""An address of a store: scheme, bucket (perhaps after credentials and "@"), key, options."""

_OPTIONS = {
    "s3": ("region", "scheme", "endpoint_override", "tls_ca_file_path", "tls_verify_certificates"),
    "gs": ("scheme", "endpoint_override", "project_id", "retry_limit_seconds"),
}

# By the first letter of `stat.filemode`.
_SPECIAL = {"p": "a named pipe", "s": "a socket", "c": "a device", "b": "a device"}


def is_remote(location: str) -> bool:
    """Return whether a location is an address such as ``gs://bucket/name``."""
    return "://" in location and _FILE_ADDRESS.match(location) is None


def is_web_address(location: str) -> bool:
    """Return whether a location is an ``http://`` or ``https://`` address."""
    return location[:8].lower().startswith(("http://", "https://"))


def check_location(location: str) -> None:
    """Check that a location is a possible path or address.

    Raises:
        UsageError: it is empty, has no bucket, or has characters that paths cannot have.
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


class BucketAddress(NamedTuple):
    """The bucket of an address, and how to reach it.

    Attributes:
        scheme: ``s3`` or ``gs``.
        user: access key of S3, or ``anonymous`` for requests without credentials; empty for those of the machine.
        password: secret key of S3.
        options: options of the address by name, see `endpoint_of`.
    """

    scheme: str
    name: str
    user: str
    password: str
    options: tuple[tuple[str, str], ...]


def split_address(location: str) -> tuple[BucketAddress, str]:
    """Return bucket and key of an address; slashes at its end have no meaning.

    The key is literal. Credentials and the values of options are percent-encoded.

    Raises:
        UsageError: the address has another scheme, or options that its store does not know.
    """
    fault, store = "", STORE.fullmatch(location)
    if store is None:
        raise UsageError(
            f"cannot understand the location {location!r}: expected a path or an address of a store. Give a "
            "local path, gs://BUCKET/PATH or s3://BUCKET/PATH"
        )
    scheme, bucket, key, query = store.groups(default="")
    credentials, _, name = bucket.rpartition("@")
    user, _, password = credentials.partition(":")
    scheme, options = scheme.replace("gcs", "gs"), tuple(parse_qsl(query[1:], keep_blank_values=True))
    unknown = [option for option, _ in options if option not in _OPTIONS[scheme]]
    if not re.fullmatch(r"[\w.-]+", name):
        fault = "its bucket has other characters than letters, digits, '.', '-' and '_': write / in a key as %2F"
    elif unknown:
        fault = f"its option {unknown[0]!r} is unknown, expected {', '.join(_OPTIONS[scheme])}"
    elif user not in ("", "anonymous") and (scheme == "gs" or not password):
        fault = "before '@' there is " + ("no anonymous" if scheme == "gs" else "neither ACCESS_KEY:SECRET_KEY nor anonymous")
    if fault:
        raise UsageError(f"cannot understand the location {location!r}: {fault}")
    return BucketAddress(scheme, name, unquote(user), unquote(password), options), key.rstrip("/")[1:]


def endpoint_of(options: Mapping[str, str]) -> str:
    """Return the endpoint in an address; empty for the cloud's own."""
    endpoint = options.get("endpoint_override", "")
    return endpoint if not endpoint or "://" in endpoint else f"{options.get('scheme', 'https')}://{endpoint}"


def plain_location(location: str | os.PathLike[str]) -> str:
    """Convert ``file://`` addresses and ``~`` to plain paths.

    ``file:///a%20b`` and ``file://localhost/a%20b`` are the path ``/a b``. ``~`` and ``~user`` at the start
    of a path are home folders, if the user exists.

    Raises:
        UsageError: a ``file://`` address has another host, or no path.

    Example:
        >>> plain_location("file:///photos/a%20b.jpg")
        '/photos/a b.jpg'
    """
    text = os.fspath(location)
    address = _FILE_ADDRESS.fullmatch(text)
    if address is None:
        return text if "://" in text else os.path.expanduser(text)  # noqa: PTH111 -- pathlib fails for unknown users
    host, path = address.groups(default="")
    if host.lower() not in ("", "localhost") or not path or "%00" in path:
        raise UsageError(
            f"cannot understand the location {text!r}: a file address names an absolute path on this "
            "machine, such as file:///data/photos"
        )
    return os.fsdecode(unquote_to_bytes(path))


def absolute_location(location: str | os.PathLike[str]) -> str:
    """Convert a location to an absolute path; addresses stay unchanged."""
    text = plain_location(location)
    # Not `Path.resolve`: messages show the user's path, not the target of a link.
    return text if is_remote(text) else os.path.abspath(text)  # noqa: PTH100


def local_path(location: str | os.PathLike[str]) -> Path:
    """Return the path of a local location, see `plain_location`."""
    return Path(plain_location(location))


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check that a local path is not a pipe, socket or device.

    Raises:
        DatasetError: it is a pipe, socket or device; caused by an OSError, like all read errors.
        OSError: the file does not exist.
    """
    kind = _SPECIAL.get(stat.filemode(os.stat(path).st_mode)[0])  # noqa: PTH116
    if kind is not None:
        raise DatasetError(
            f"cannot use {os.fspath(path)!r}: it is {kind}, expected a file: write its content to a file first"
        ) from OSError(errno.EINVAL, f"{kind}, not a file")

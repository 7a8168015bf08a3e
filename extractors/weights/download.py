"""Download of weights from object stores and web servers to a local cache.

The cached file's name begins with a digest of the address and the object's version (generation, ETag, modification time). A
replaced object becomes another file. Files appear atomically. A lock file ensures that one process per machine downloads.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

from schemas.errors import InputError
from schemas.storage.folder import TEMPORARY_MARK, file_at
from schemas.storage.locations import is_remote, is_web_address, local_path
from schemas.storage.storage_errors import storage_errors

_TIMEOUT_SECONDS = 60.0
_ATTEMPTS = 3
_MAX_NAME_LENGTH = 100


class _Object(NamedTuple):
    """Open remote object.

    Attributes:
        version: generation, ETag or modification time; empty if unknown.
        size: size in bytes; -1 if unknown.
    """

    name: str
    version: str
    size: int
    stream: BinaryIO


def split_choice(weights: str) -> tuple[str, str]:
    """Split ``PATH#NAME`` into a file or address and a (possibly empty) set name.

    A ``#`` in the name of an existing file, or before an extension in an address, does not split.

    Example:
        >>> split_choice("model.pth.tar#model_ema")
        ('model.pth.tar', 'model_ema')
    """
    file, mark, name = weights.rpartition("#")
    is_file = "." in name if is_remote(weights) else os.path.lexists(weights)
    return (file, name) if mark and name and not is_file else (weights, "")


def weights_cache_folder() -> Path:
    """Return torch's folder of downloaded weights; ``TORCH_HOME`` moves it.

    Raises:
        InputError: the user has no home folder, and no variable names another one.
    """
    import torch

    folder = Path(torch.hub.get_dir())
    if folder.parts[:1] == ("~",):
        raise InputError(
            "this user has no home folder for the weights: set TORCH_HOME to a folder, or pass a file with --weights PATH"
        )
    return folder / "checkpoints"


def fetch_weights_file(location: str) -> Path:
    """Return the local path of weights; download remote ones that are not cached.

    Args:
        location: a local path, unchecked, or an address ``gs://``, ``s3://``, ``http://`` or ``https://``.

    Raises:
        InputError: the object is missing, its server fails, or the cache is not writable.
        DatasetError: the object store is unreachable, or denies access.
        UsageError: the address is invalid.
    """
    if not is_remote(location):
        return local_path(location)
    with _open_location(location) as source:
        path = _cache_path(location, source)
    if path is not None and path.exists():
        return path
    folder = weights_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, location):
            return _fetch(location, folder)
    except OSError as error:
        raise InputError(
            f"cannot store the weights {location!r} in {str(folder)!r} ({error.strerror or error}): free "
            "some space there, or set TORCH_HOME to another folder"
        ) from error


def _cache_path(location: str, source: _Object) -> Path | None:
    """Return the cache path of an object's version; None if the version is unknown."""
    if not source.version:
        return None
    return weights_cache_folder() / _file_name(f"{location}\n{source.version}\n{source.size}", source.name)


def _file_name(identity: str, name: str) -> str:
    readable = re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII)[-_MAX_NAME_LENGTH:]
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{readable}"


@contextlib.contextmanager
def _lock(folder: Path, location: str) -> Iterator[None]:
    """Lock the download of an address against other processes."""
    with (folder / f".{_file_name(location, 'lock')}").open("w") as lock:
        with contextlib.suppress(OSError):  # Without locks of the file system, several processes may download.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(location: str, folder: Path) -> Path:
    for _ in range(_ATTEMPTS):
        with _open_location(location) as source, tempfile.TemporaryDirectory(prefix=TEMPORARY_MARK, dir=folder) as temporary:
            path = _cache_path(location, source)
            if path is not None and path.exists():  # Downloaded by another process.
                return path
            file = Path(temporary, "weights")
            content = _download(location, source, file)
            path = path or folder / _file_name(f"{location}\n{content}", source.name)
            if _is_current(location, source):
                return file.replace(path)
    raise InputError(f"the weights {location!r} change while they are read: wait until they are written, and run again")


def _download(location: str, source: _Object, path: Path) -> str:
    """Download to a file, and return the digest of its bytes."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        while data := _read_chunk(location, source.stream):
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    if source.size not in (-1, size):
        raise InputError(f"the download of {location!r} broke off after {size:,} of {source.size:,} bytes: run again")
    return digest.hexdigest()


def _read_chunk(location: str, stream: BinaryIO) -> bytes:
    with storage_errors(location):  # Distinguishes errors of the server from those of the local disk.
        try:
            return stream.read(1 << 20)
        except HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


def _is_current(location: str, source: _Object) -> bool:
    """Return whether a store still has the opened version; True for web servers."""
    if is_web_address(location):
        return True
    with _open_location(location) as now:
        return (now.version, now.size) == (source.version, source.size)


def _open_location(location: str) -> contextlib.AbstractContextManager[_Object]:
    return _open_page(location) if is_web_address(location) else _open_object(location)


@contextlib.contextmanager
def _open_object(location: str) -> Iterator[_Object]:
    folder, name = file_at(location)
    try:
        entry = folder.stat(name)
        if entry is None:
            raise FileNotFoundError(location)
        stream = folder.open(name, is_mapped=False)
    except FileNotFoundError as error:
        raise InputError(f"there are no weights {location!r}: check the bucket and the key") from error
    with stream:
        yield _Object(name, entry.tag, entry.size, stream)


@contextlib.contextmanager
def _open_page(location: str) -> Iterator[_Object]:
    try:
        response = urllib.request.urlopen(_request(location), timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(f"there are no weights at {location!r}: the server answers {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise InputError(
            f"cannot download the weights {location!r} ({error}): check the address and the network, or "
            "download the file elsewhere and pass it with --weights PATH"
        ) from error
    with response:
        version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        size = int(response.headers.get("Content-Length") or -1)
        yield _Object(unquote(urlsplit(location).path).rpartition("/")[2], version, size, response)


def _request(location: str) -> urllib.request.Request:
    """Return a request with user and password as a header, which redirects do not get.

    urllib would look up ``user:password@host`` as the name of the host.
    """
    parts = urlsplit(location)
    if parts.username is None:
        return urllib.request.Request(location)
    request = urllib.request.Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    request.add_unredirected_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
    return request

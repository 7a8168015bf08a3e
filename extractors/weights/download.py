"""Weights by address: an object of a store or a page of a web server becomes a file in the cache of this machine.

The name of the file begins with a digest of the address and of what the server calls this version of the object (generation, ETag,
time of the last change): an object that is replaced becomes another file, and whoever has loaded the old one keeps it. A file is
complete or not there. Processes of one machine that want the same address take turns, so that one of them fetches it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

from schemas.errors import InputError
from schemas.storage.folder import TEMPORARY_MARK, file_at
from schemas.storage.locations import is_remote, local_path
from schemas.storage.storage_errors import storage_errors

_SECONDS = 60.0  # that a web server may keep silent
_ATTEMPTS = 3
_LONGEST_NAME = 100


class _Object(NamedTuple):
    """The opened object behind an address.

    Attributes:
        name: last part of its name.
        version: what the server calls this version of it; empty if it says nothing.
        size: in bytes; -1 if it is not known.
    """

    name: str
    version: str
    size: int
    stream: BinaryIO


def split_choice(weights: str) -> tuple[str, str]:
    """Return the file or address of ``PATH#NAME`` and the name of the set of weights in it, which may be empty.

    A file whose own name has a ``#`` stays a file, and so does an address with an extension behind it.

    Example:
        >>> split_choice("model.pth.tar#model_ema")
        ('model.pth.tar', 'model_ema')
    """
    file, mark, name = weights.rpartition("#")
    is_file = "." in name if is_remote(weights) else os.path.lexists(weights)
    return (file, name) if mark and name and not is_file else (weights, "")


def cache_folder() -> Path:
    """Return the folder of weights that were fetched, which is torch's own: ``TORCH_HOME`` moves it."""
    import torch

    return Path(torch.hub.get_dir()) / "checkpoints"


def local_file(location: str) -> Path:
    """Return the path of a file of weights on this machine, after fetching it if it is elsewhere and not in the cache yet.

    Args:
        location: a local path, whose file need not exist, or ``gs://``, ``s3://``, ``http://`` or ``https://``.

    Raises:
        InputError: there is nothing behind the address, its server fails, or the cache cannot be written.
        DatasetError: the object store cannot be reached, or refuses.
        UsageError: the address cannot be understood.
    """
    if not is_remote(location):
        return local_path(location)
    with _opened(location) as found:
        path = _path_of(location, found)
    if path is not None and path.exists():
        return path
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder, location):
            return _fetch(location, folder)
    except OSError as error:
        raise InputError(
            f"cannot keep the weights {location!r} in {str(folder)!r} ({error.strerror or error}): free some space there, or set "
            "TORCH_HOME to another folder"
        ) from error


def _path_of(location: str, found: _Object) -> Path | None:
    """Return where a version of an object is kept; None if the server does not tell versions apart."""
    if not found.version:
        return None
    return cache_folder() / _file_name(f"{location}\n{found.version}\n{found.size}", found.name)


def _file_name(identity: str, name: str) -> str:
    readable = re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII)[-_LONGEST_NAME:]
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{readable}"


@contextlib.contextmanager
def _turn(folder: Path, location: str) -> Iterator[None]:
    """Wait until no other process fetches the address. The lock is the system's and ends with the process."""
    with (folder / f".{_file_name(location, 'lock')}").open("w") as lock:
        with contextlib.suppress(OSError):  # A file system without locks: several may fetch, and each file is whole.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(location: str, folder: Path) -> Path:
    for _ in range(_ATTEMPTS):
        with _opened(location) as found:
            path = _path_of(location, found)
            if path is not None and path.exists():  # Another process has fetched it meanwhile.
                return path
            temporary, content = _download(location, found, folder)
        try:
            path = path or folder / _file_name(f"{location}\n{content}", found.name)
            if _is_current(location, found):
                temporary.replace(path)
                return path
        finally:
            temporary.unlink(missing_ok=True)
    raise InputError(f"the weights {location!r} change while they are read: wait until they are written, and run again")


def _download(location: str, found: _Object, folder: Path) -> tuple[Path, str]:
    """Write an object to a temporary file; return its path and the digest of its bytes."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_MARK, dir=folder)
    digest = hashlib.sha256()
    try:
        with os.fdopen(handle, "wb") as file:
            while data := _read(location, found.stream):
                digest.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if found.size not in (-1, size):
            raise InputError(f"the weights {location!r} broke off after {size:,} of {found.size:,} bytes: run again")
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name), digest.hexdigest()


def _read(location: str, stream: BinaryIO) -> bytes:
    """Read on; what fails is the other side, not our disk."""
    with storage_errors(location):
        try:
            return stream.read(1 << 20)
        except HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


def _is_current(location: str, found: _Object) -> bool:
    """Return whether an object is still the version that was opened. A web server says so in the answer that has the bytes."""
    if _is_web(location):
        return True
    with _opened(location) as now:
        return (now.version, now.size) == (found.version, found.size)


def _is_web(location: str) -> bool:
    return location[:8].lower().startswith(("http://", "https://"))


def _opened(location: str) -> contextlib.AbstractContextManager[_Object]:
    return _opened_page(location) if _is_web(location) else _opened_object(location)


@contextlib.contextmanager
def _opened_object(location: str) -> Iterator[_Object]:
    folder, name = file_at(location)
    try:
        entry = folder.entry(name)
        if entry is None:
            raise FileNotFoundError(location)
        version = (folder.tag(name) if folder.has_tags else "") or entry.version
        stream = folder.stream(name)
    except FileNotFoundError as error:
        raise InputError(f"there are no weights {location!r}: check the bucket and the key") from error
    with stream:
        yield _Object(name, version, entry.size, stream)


@contextlib.contextmanager
def _opened_page(location: str) -> Iterator[_Object]:
    try:
        answer = urllib.request.urlopen(location, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(f"there are no weights at {location!r}: the server answers {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise InputError(
            f"cannot fetch the weights {location!r} ({error}): check the address and the network, or fetch the file elsewhere and "
            "pass it with --weights PATH"
        ) from error
    with answer:
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        size = int(answer.headers.get("Content-Length") or -1)
        yield _Object(unquote(urlsplit(location).path).rpartition("/")[2], version, size, answer)

"""Cache of extractor descriptions, read without torch and without hashing weights.

A cache entry is a JSON file. Its key is the SHA-256 of

- the request: extractor, weights, options,
- the host name,
- the versions of `_LIBRARIES`, and for text models those of transformers,
- the stamps (size, times) of our own source files,
- for text models the stamps of the files in the model's folder.

The entry of a weights file also stores the file's stamp, and is valid while the stamp is unchanged. Features do not depend on the
cache: loading hashes the weights, and fails if they differ from the planned ones.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from extractors.base import Description
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_bytes

_LIBRARIES = ("imagepivot", "torch", "torchvision", "timm")
_PACKAGES = ("extractors", "schemas")


class FileStamp(NamedTuple):
    """Identity of a file's content; resetting ``mtime`` changes ``ctime``."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(path: Path) -> FileStamp | None:
        """Return the current stamp of a file, or None if the file is missing."""
        try:
            status = path.stat()
        except (OSError, ValueError):
            return None
        return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def cached_description(
    request: Mapping[str, Any], describe: Callable[[], tuple[Description, Path | None, FileStamp | None]]
) -> Description:
    """Return the description of an extractor, from a valid cache entry if possible.

    Args:
        request: JSON values; the weights must not be remote.
        describe: computes the description; also returns the weights file, if any, and its stamp.
    """
    key = {"request": request, "made by": source_stamps()}
    with suppress(KeyError, TypeError, DatasetError):
        cached = load_json("descriptions", key)
        if cached["path"] is None or FileStamp.of(Path(cached["path"])) == FileStamp(*cached["stamp"]):
            stored = cached["description"]
            return Description(**{**stored, "spec": FeatureSpec.from_json(stored["spec"])})
    description, path, stamp = describe()
    if path is None or stamp is not None:  # The file may be gone, such as one from a pipe.
        path_text = None if path is None else str(path.absolute())
        stored = asdict(description) | {"spec": description.spec.to_json()}
        store_json("descriptions", key, {"path": path_text, "stamp": stamp, "description": stored})
    return description


def cached_folder_description(
    request: Mapping[str, Any], folder: Path, describe: Callable[[], Description], *, libraries: tuple[str, ...] = ()
) -> Description:
    """Return the description of a model in a folder, from the cache if possible.

    ``request`` is JSON values, ``libraries`` are the distributions that read the model.
    """
    key = {
        **request,
        "folder": str(folder.absolute()),
        # Before `describe` reads the files: later changes then invalidate the entry.
        "files": [[str(path.relative_to(folder)), FileStamp.of(path)] for path in sorted(folder.rglob("*")) if path.is_file()],
        "libraries": list(_versions(libraries)),
    }
    return cached_description(key, lambda: (describe(), None, None))


def load_json(kind: str, key: Mapping[str, Any]) -> Any:
    """Return a JSON value from the cache, or None if it is missing or unreadable.

    The key consists of JSON values; the versions of `_LIBRARIES` are added.
    """
    with suppress(OSError, ValueError):
        return json.loads(_cache_file(kind, key).read_bytes())
    return None


def store_json(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Store a JSON value in the cache, atomically; ignore an unwritable cache."""
    with suppress(OSError):
        file = _cache_file(kind, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(_ascii_json(value))
        Path(new.name).replace(file)


def cache_folder(kind: str) -> Path:
    """Return the cache folder of a kind; it may not exist.

    Raises:
        FileNotFoundError: no variable names the cache, and the user has no home folder.
    """
    if folder := os.environ.get("IMAGEPIVOT_CACHE"):
        return Path(folder) / kind
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagepivot" / kind
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "no home folder") from error


def _cache_file(kind: str, key: Mapping[str, Any]) -> Path:
    return cache_folder(kind) / f"{sha256_of_bytes(_ascii_json([key, *_versions()]))}.json"


def _versions(libraries: tuple[str, ...] = _LIBRARIES) -> Iterator[str]:
    for name in libraries:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def source_stamps(libraries: tuple[str, ...] = ()) -> list[str]:
    """Return host name, versions of libraries, and stamps of our sources, for a key."""
    return [platform.node(), *_versions(libraries), *_sources()]


def _sources() -> Iterator[str]:
    root = Path(__file__).parents[1]
    paths = (path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return (f"{path} {FileStamp.of(path)}" for path in sorted(paths))


def _ascii_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode("ascii")  # Escaped: paths may hold invalid UTF-8.

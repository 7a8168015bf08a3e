"""Descriptions of extractors that this machine has made before, so that a run which finds nothing to do loads no network.

To describe an extractor, its weights are read, checked and hashed, for which torch is loaded: seconds, each time. The description
is cached, a small file for each request, and holds until something changes that it was made from: the file of the weights, our
own code, a library. No feature depends on it: loading hashes the weights, and fails if they are not those that were planned with.
"""

from __future__ import annotations

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
    """Device, inode, bytes and times of the last changes of a file, which differ once it is replaced or written to.

    Setting the time of the last change of the content (``mtime``) back changes that of the last change of all (``ctime``).
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(path: Path) -> FileStamp | None:
        """Return the stamp of a file as it is now, or None if it cannot be found."""
        try:
            status = path.stat()
        except (OSError, ValueError):
            return None
        return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def cached_description(
    request: Mapping[str, Any], describe: Callable[[], tuple[Description, Path | None, FileStamp | None]]
) -> Description:
    """Return the description of an extractor, from the cache if it is there and holds.

    Args:
        request: what is asked for, as JSON values; no weights that are fetched.
        describe: makes the description; also returns the file of the weights, if they are from one, and its stamp.

    Raises:
        ImagepivotError: as `describe` raises it.
    """
    key = {"request": request, "made by": [platform.node(), *_sources()]}
    with suppress(KeyError, TypeError, DatasetError):
        found = load_json("descriptions", key)
        if found["path"] is None or FileStamp.of(Path(found["path"])) == FileStamp(*found["stamp"]):
            return _described(found["description"])
    description, path, stamp = describe()
    if path is None or stamp is not None:  # Weights of a file that cannot be found again are described each time.
        path_text = None if path is None else str(path.absolute())
        store_json("descriptions", key, {"path": path_text, "stamp": stamp, "description": _stored(description)})
    return description


def cached_folder_description(
    request: Mapping[str, Any], folder: Path, describe: Callable[[], Description], *, libraries: tuple[str, ...] = ()
) -> Description:
    """Return the description of a model that is read from the files of a folder, from the cache if it is there and holds.

    Args:
        request: what is asked for, as JSON values.
        folder: the folder; folders in it are not read.
        describe: makes the description.
        libraries: distributions that read the model.

    Raises:
        ImagepivotError: as `describe` raises it.
    """
    key = {
        "request": request,
        "folder": str(folder.absolute()),
        # From before they are read: what changes in the meantime has another stamp next time.
        "files": [[path.name, FileStamp.of(path)] for path in sorted(folder.iterdir()) if path.is_file()],
        "made by": [platform.node(), *_versions(libraries), *_sources()],
    }
    with suppress(KeyError, TypeError, DatasetError):
        return _described(load_json("descriptions", key))
    description = describe()
    store_json("descriptions", key, _stored(description))
    return description


def load_json(kind: str, key: Mapping[str, Any]) -> Any:
    """Return the JSON value that `store_json` has put into the cache; None if it is not there or cannot be read.

    Args:
        kind: name of a folder of the cache.
        key: what the value depends on besides the versions of the libraries, as JSON values.
    """
    with suppress(OSError, ValueError):
        return json.loads(_file(kind, key).read_bytes())
    return None


def store_json(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Put a JSON value into the cache, whole or not at all, if it can be written; see `load_json`."""
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(_json(value))
        Path(new.name).replace(file)


def cache_folder(kind: str) -> Path:
    """Return the folder of what is kept of one kind from run to run; it may not be there."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("IMAGEPIVOT_CACHE") or users / "imagepivot") / kind


def _file(kind: str, key: Mapping[str, Any]) -> Path:
    return cache_folder(kind) / f"{sha256_of_bytes(_json([key, *_versions()]))}.json"


def _versions(libraries: tuple[str, ...] = _LIBRARIES) -> Iterator[str]:
    for name in libraries:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _sources() -> Iterator[str]:
    root = Path(__file__).parents[1]
    paths = (path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return (f"{path} {FileStamp.of(path)}" for path in sorted(paths))


def _stored(description: Description) -> dict[str, Any]:
    return asdict(description) | {"spec": description.spec.to_json()}


def _described(stored: Mapping[str, Any]) -> Description:
    return Description(**{**stored, "spec": FeatureSpec.from_json(stored["spec"])})


def _json(value: Any) -> bytes:
    """Return JSON of ASCII characters alone: paths may hold bytes that are no text."""
    return json.dumps(value, sort_keys=True).encode("ascii")

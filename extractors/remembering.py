"""Descriptions of extractors that this machine has made before, so that a run which finds nothing to do loads no network.

To describe an extractor, its weights are read, checked and hashed, for which torch is loaded: seconds, each time. What came of it
is kept in a cache, a small file for each request, and holds until something changes that it was made from: the file of
the weights, our own code, a library. No feature depends on it: whoever loads the weights hashes them, and makes nothing if they are
not those that were planned with.
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
from typing import TYPE_CHECKING, Any

from extractors.base import Description
from extractors.weights.stamps import FileStamp
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_bytes

if TYPE_CHECKING:
    from extractors.weights.finding import Weights

_LIBRARIES = ("imagepivot", "torch", "torchvision", "timm")
_PACKAGES = ("extractors", "schemas")


def remembered(request: Mapping[str, Any], describe: Callable[[], tuple[Description, Weights]]) -> Description:
    """Return the description of an extractor, from the cache if it is there and holds.

    Args:
        request: what is asked for, as JSON values; no weights that are fetched.
        describe: makes the description, and finds the weights for it.

    Raises:
        ImagepivotError: as `describe` raises it.
    """
    file = (
        cache_folder("descriptions") / f"{sha256_of_bytes(_json([request, platform.node(), *_versions(), *_sources()]))}.json"
    )
    if (found := _read(file)) is not None:
        return found
    description, weights = describe()
    _write(file, description, weights)
    return description


def remembered_of_folder(
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
        # From before they are read: what changes meanwhile has another stamp next time.
        "files": [[path.name, FileStamp.of(path)] for path in sorted(folder.iterdir()) if path.is_file()],
        "made by": [platform.node(), *_versions(libraries), *_sources()],
    }
    with suppress(KeyError, TypeError, DatasetError):
        return _described(kept("descriptions", key))
    description = describe()
    keep("descriptions", key, _stored(description))
    return description


def kept(kind: str, key: Mapping[str, Any]) -> Any:
    """Return the JSON value that `keep` has put into the cache; None if it is not there or cannot be read.

    Args:
        kind: name of a folder of the cache.
        key: what the value depends on besides the versions of the libraries, as JSON values.
    """
    with suppress(OSError, ValueError):
        return json.loads(_file(kind, key).read_bytes())
    return None


def keep(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Put a JSON value into the cache, if it can be written; see `kept`."""
    _replace(_file(kind, key), value)


def _file(kind: str, key: Mapping[str, Any]) -> Path:
    return cache_folder(kind) / f"{sha256_of_bytes(_json([key, *_versions()]))}.json"


def cache_folder(kind: str) -> Path:
    """Return the folder of what is kept of one kind from run to run; it may not be there."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("IMAGEPIVOT_CACHE") or users / "imagepivot") / kind


def _versions(libraries: tuple[str, ...] = _LIBRARIES) -> Iterator[str]:
    for name in libraries:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _sources() -> Iterator[str]:
    root = Path(__file__).parents[1]
    paths = (path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return (f"{path} {FileStamp.of(path)}" for path in sorted(paths))


def _read(file: Path) -> Description | None:
    """Return the description in a file; None if there is none that can be read, or the weights have changed since."""
    with suppress(OSError, ValueError, KeyError, TypeError, DatasetError):
        found = json.loads(file.read_bytes())
        if found["path"] is not None and FileStamp.of(Path(found["path"])) != FileStamp(*found["stamp"]):
            return None
        return _described(found["description"])
    return None


def _stored(description: Description) -> dict[str, Any]:
    return asdict(description) | {"spec": description.spec.to_json()}


def _described(stored: Mapping[str, Any]) -> Description:
    return Description(**{**stored, "spec": FeatureSpec.from_json(stored["spec"])})


def _write(file: Path, description: Description, weights: Weights) -> None:
    """Keep a description, if the cache can be written and the weights are those of a file that can be found again."""
    if weights.path is not None and weights.stamp is None:
        return
    path = None if weights.path is None else str(weights.path.absolute())
    _replace(file, {"path": path, "stamp": weights.stamp, "description": _stored(description)})


def _replace(file: Path, value: Any) -> None:
    """Write JSON to a file of the cache, if that is possible: whole or not at all."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(_json(value))
        Path(new.name).replace(file)


def _json(value: Any) -> bytes:
    """Return JSON of ASCII characters alone: paths may hold bytes that are no text."""
    return json.dumps(value, sort_keys=True).encode("ascii")

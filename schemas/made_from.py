"""Provenance of exports and figures: command, options and input digests.

``_made_from.json`` stores it, so that an unchanged command is skipped. It has no locations and no times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.fingerprints import sha256_of_file, sha256_of_json
from schemas.manifest import MANIFEST_NAMES, Manifest
from schemas.storage.folder import Folder, file_at
from schemas.storage.locations import check_location
from schemas.storage.storage_errors import storage_errors

MADE_FROM_NAME = "_made_from.json"

_WEIGHTS = "best.pt"  # File of a training run that determines its results.


def made_from(
    command: str, options: Mapping[str, Any], inputs: Mapping[str, Sequence[str]], *, images: str = ""
) -> dict[str, Any]:
    """Describe a command by its options and the digests of its inputs.

    The options are those that change the result. The inputs are locations of datasets, runs, files and folders by option; empty
    locations are skipped. Images are described by names and sizes only.

    Raises:
        DatasetError: an input is a damaged dataset, or cannot be read.
        UsageError: a location is invalid.
    """
    contents = {name: [_content(location) for location in locations if location] for name, locations in inputs.items()}
    if images:
        contents["images"] = [_listing(images)]
    described = {"command": command, "options": options, "inputs": {name: found for name, found in contents.items() if found}}
    stored: dict[str, Any] = json.loads(json.dumps(described))
    return stored


def read_made_from(folder: Folder) -> dict[str, Any]:
    """Read a description from ``_made_from.json``; empty if invalid."""
    try:
        content = json.loads(folder.read(MADE_FROM_NAME))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and "command" in content else {}


def is_current(folder: Folder, now: Mapping[str, Any]) -> bool:
    """Return whether a folder has the output of this description, by file sizes."""
    stored = read_made_from(folder)
    files = stored.pop("files", None)
    return stored == now and isinstance(files, dict) and all(folder.size(name) == size for name, size in files.items())


def write_made_from(folder: Folder, now: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Write ``_made_from.json``: a description, and file sizes in bytes by name."""
    folder.write(MADE_FROM_NAME, (json.dumps({**now, "files": sizes}, indent=1, ensure_ascii=False) + "\n").encode())


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between two descriptions, e.g. ``l2: was False, now True``."""
    if stored["command"] != now["command"]:
        return [f"command: was {stored['command']}, now {now['command']}"]
    before, after = stored.get("options", {}), now["options"]
    names = [name for name in dict.fromkeys((*after, *before)) if before.get(name) != after.get(name)]
    found = [f"{name}: was {before.get(name)!r}, now {after.get(name)!r}" for name in names]
    before, after = stored.get("inputs", {}), now["inputs"]
    return found + [f"{name} changed" for name in dict.fromkeys((*after, *before)) if before.get(name) != after.get(name)]


def _content(location: str) -> Any:
    """Describe a dataset, run, file or folder by digests; None if it does not exist."""
    check_location(location)
    (beside, name), folder = file_at(location), Folder(location)
    if name and beside.size(name) is not None:
        return _digest(beside, name)
    if any(folder.size(name) is not None for name in MANIFEST_NAMES):
        manifest = Manifest.read(folder)
        return {"fingerprint": manifest.fingerprint, "content_sha256": manifest.content_sha256}
    if folder.size(_WEIGHTS) is not None:
        return {_WEIGHTS: _digest(folder, _WEIGHTS)}
    return {name: _digest(folder, name) for name in folder.names()} or None


def _listing(location: str) -> Any:
    """Describe images by names and sizes, since reading them may take hours."""
    check_location(location)
    beside, name = file_at(location)
    size = beside.size(name) if name else None
    return sha256_of_json(sorted(Folder(location).files())) if size is None else size


def _digest(folder: Folder, name: str) -> str:
    with storage_errors(folder.path_of(name)), folder.open(name) as file:
        return sha256_of_file(file)

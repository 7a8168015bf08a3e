"""Provenance of exports and figures: command, options and input digests.

``_made_from.json`` stores it, so that an unchanged command is skipped. It has no locations and no times. ``read`` holds the digests
of further files that the command read or looked for below its inputs or beside them, e.g. gold scores beside sentences.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from schemas.fingerprints import sha256_of_file, sha256_of_json
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.reads import Reads
from schemas.storage.folder import Folder, file_at
from schemas.storage.locations import absolute_location
from schemas.storage.storage_errors import storage_errors
from schemas.user_code import user_code

MADE_FROM_NAME = "_made_from.json"

_WEIGHTS = "best.pt"  # File of a training run that determines its results.


class MadeFrom(dict[str, Any]):
    """Description of a command, its inputs, and the files read from now on.

    Attributes:
        folders: folders of each option's inputs, with an empty name; of a file, its parent and its name.
    """

    def __init__(self, content: Mapping[str, Any], folders: Mapping[str, Sequence[tuple[Folder, str]]]) -> None:
        super().__init__(content)
        self.folders, self._reads = folders, Reads()

    def files_read(self, output: Folder) -> dict[str, list[dict[str, str | None]]]:
        """Return digests of the files read below each input; None for a missing file.

        Left out are the output, and what the description covers: files given as inputs, and shards, manifests and checkpoints.
        """
        result = f"{absolute_location(output.location)}/"
        reads = [read for read in map(absolute_location, self._reads.locations) if not read.startswith(result)]
        files = {option: [_digests_below(*place, reads) for place in places] for option, places in self.folders.items()}
        return {option: digests for option, digests in files.items() if any(digests)}


def made_from(command: str, options: Mapping[str, Any], inputs: Mapping[str, Sequence[str]], *, images: str = "") -> MadeFrom:
    """Describe a command by its options, digests of inputs, and modules of users.

    The options are those that change the result. The inputs are locations of datasets, runs, files and folders by option; empty
    locations are skipped. Images are described by names and sizes only, since reading them may take hours.

    Raises:
        DatasetError: an input is a damaged dataset, or cannot be read.
        UsageError: a location is invalid.
    """
    folders = {name: [_locate(location) for location in locations if location] for name, locations in inputs.items()}
    contents: dict[str, list[Any]] = {name: [_content(*place) for place in places] for name, places in folders.items()}
    if images:
        folder, file = _locate(images)
        files = sorted((entry.name, entry.size) for entry in ([] if file else folder.list()))
        contents["images"] = [*sizes_of(folder, [file]).values()] if file else [sha256_of_json(files)]
    described = {"command": command, "options": options, "inputs": {name: found for name, found in contents.items() if found}}
    if modules := user_code():
        described["modules"] = modules
    return MadeFrom(json.loads(json.dumps(described)), folders)


def read_made_from(folder: Folder) -> dict[str, Any]:
    """Read a description from ``_made_from.json``; empty if invalid."""
    try:
        content = json.loads(folder.read(MADE_FROM_NAME))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and "command" in content else {}


def is_current(folder: Folder, now: MadeFrom) -> bool:
    """Return whether a folder has the output of a description, from unchanged files."""
    stored = read_made_from(folder)
    files, read = stored.pop("files", None), stored.pop("read", {})
    if stored != now:
        return False
    try:
        places = [place for name, digests in read.items() for place in zip(now.folders[name], digests, strict=True)]
        digests_by_file = [(folder, *item) for (folder, _), digests in places for item in digests.items()]
    except (AttributeError, KeyError, TypeError, ValueError):  # Damaged, or of an earlier version.
        return False
    if any(_digest_or_none(folder, name) != digest for folder, name, digest in digests_by_file):
        return False
    return isinstance(files, dict) and files == sizes_of(folder, files)


def sizes_of(folder: Folder, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of existing files by name."""
    return {entry.name: entry.size for entry in map(folder.stat, names) if entry is not None}


def write_made_from(folder: Folder, now: MadeFrom, sizes: Mapping[str, int]) -> None:
    """Write ``_made_from.json``: a description, files read, and sizes of outputs."""
    read = now.files_read(folder)
    content = {**now, **({"read": read} if read else {}), "files": sizes}
    folder.put(MADE_FROM_NAME, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differences between two descriptions, e.g. ``l2: was False, now True``."""
    if stored["command"] != now["command"]:
        return [f"command: was {stored['command']}, now {now['command']}"]
    before, after = stored.get("options", {}), now["options"]
    names = [name for name in dict.fromkeys((*after, *before)) if before.get(name) != after.get(name)]
    found = [f"{name}: was {before.get(name)!r}, now {after.get(name)!r}" for name in names]
    for section in ("inputs", "modules"):
        before, after = stored.get(section, {}), now.get(section, {})
        found += [f"{name} changed" for name in dict.fromkeys((*after, *before)) if before.get(name) != after.get(name)]
    return found


def _locate(location: str) -> tuple[Folder, str]:
    """Return a folder with an empty name; of a file, its parent and its name."""
    folder, name = file_at(location)
    return (folder, name) if name and folder.stat(name) is not None else (Folder(location), "")


def _content(folder: Folder, file: str) -> Any:
    """Describe a dataset, run, file or folder by digests; None if it does not exist."""
    if file:
        return _file_digest(folder, file)
    if folder.stat(MANIFEST_NAME) is not None:
        manifest = Manifest.read(folder)
        return {"fingerprint": manifest.fingerprint, "content_sha256": manifest.content_sha256}
    if folder.stat(_WEIGHTS) is not None:
        return {_WEIGHTS: _file_digest(folder, _WEIGHTS)}
    return {name: _file_digest(folder, name) for name in folder.names()} or None


def _digests_below(folder: Folder, given: str, reads: Sequence[str]) -> dict[str, str | None]:
    """Return digests of the files read below a folder, or beside a file in it."""
    prefix = absolute_location(folder.location).rstrip("/") + "/"
    names = sorted(read.removeprefix(prefix) for read in reads if read.startswith(prefix))
    names = [name for name in names if "/" not in name and name != given] if given else names
    counted = (MANIFEST_NAME, _WEIGHTS)  # The digest of their dataset or run covers them, as it covers shards.
    names = [name for name in names if PurePosixPath(name).name not in counted and not name.endswith(".parquet")]
    return {name: _digest_or_none(folder, name) for name in names}


def _digest_or_none(folder: Folder, name: str) -> str | None:
    return None if folder.stat(name) is None else _file_digest(folder, name)


def _file_digest(folder: Folder, name: str) -> str:
    with storage_errors(folder.path_of(name)), folder.open(name) as file:
        return sha256_of_file(file)

"""What lies at a location: its state, which is quick to tell, and its digest, which is the same on another machine.

The state is that of a listing: names, sizes and modification times (in a store ETags). The digest is of content; of images, which
may be many, of names and sizes; of a dataset, of its fingerprint and the digests of its files. Content is read again only where the
state differs from one whose digest is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import DatasetError
from schemas.filesystems import storage_errors
from schemas.fingerprints import sha256_of_file, sha256_of_json
from schemas.listings import Entry
from schemas.locations import is_remote
from schemas.manifest import MANIFEST_NAMES, Manifest
from schemas.storage import Folder

__all__ = ["Found", "Result", "dataset_result", "files_result", "find"]

# Of folders whose other files tell of the machine and the time: all that count, and how many there are at least.
_COUNTED = {"run": (r"best\.pt|config\.toml", 2), "results": (r"results/.+/seed-\d+\.json|[^/]+\.(md|json)", 1)}


@dataclass(frozen=True)
class Found:
    """What is at a location.

    Attributes:
        state: digest of the listing.
        digest: digest of the content.
        is_listed: whether the content was not read, so that another state may mean another content.
    """

    state: str
    digest: str
    is_listed: bool = False

    def differs(self, other: Found) -> bool:
        """Whether the content differs, or may differ."""
        return self.digest != other.digest or (self.is_listed and self.state != other.state)


@dataclass(frozen=True)
class Result:
    """What a step has made.

    Attributes:
        kind: kind of the dataset; ``run``, ``results``, ``files``, ``file`` or ``report`` for others.
        fingerprint: fingerprint of the dataset; empty for others.
        content: digest of the content.
        state: digest of the listing.
        rows: rows of the dataset; None for others.
        bytes: size of all files.
        weights: the extractor's weights, as the parameters name them.
        libraries: versions of the libraries that made the dataset.
        unread: inputs that could not be read, as after a store did not answer; an update tries them again.
    """

    kind: str
    fingerprint: str
    content: str
    state: str
    rows: int | None
    bytes: int
    weights: Mapping[str, Any]
    libraries: Mapping[str, str]
    unread: int = 0


def find(location: str, *, images: bool, known: Found | None = None) -> Found | None:
    """Look at an input; None if nothing is there.

    Args:
        location: a file, a folder, or of images a pattern.
        images: whether it holds images, whose content is not read.
        known: what an earlier look has found.

    Raises:
        DatasetError: it cannot be read, or is a damaged dataset.
    """
    if location.startswith(("http://", "https://")):
        return Found("", sha256_of_json(location))
    folder, entries = _listed(location)
    if not entries:
        return None
    state = _state(entries)
    if known is not None and known.state == state and state:
        return known
    if any(entry.name in MANIFEST_NAMES for entry in entries):
        return Found(state, _content_of(Manifest.read(folder)))
    if images:
        return Found(state, sha256_of_json(sorted((entry.name, entry.size) for entry in entries)), is_listed=True)
    return Found(state, _digest(folder, [entry.name for entry in entries]))


def dataset_result(location: str) -> Result | None:
    """Return what is known of a committed dataset whose files have their sizes; None if there is none."""
    folder = Folder(location)
    try:
        manifest = Manifest.read(folder)
    except DatasetError:
        return None
    sizes = {name: stored.size for name, stored in folder.tagged().items()}
    entries = (*manifest.shards, *manifest.failures, *manifest.files)
    if any(sizes.get(entry.path) != entry.bytes for entry in entries):
        return None
    weights = {name: value for name, value in manifest.parameters.items() if name.startswith("weights")}
    return Result(
        manifest.kind,
        manifest.fingerprint,
        _content_of(manifest),
        sha256_of_json(sorted((entry.path, entry.bytes) for entry in entries)),
        manifest.rows,
        sum(entry.bytes for entry in entries),
        weights,
        manifest.libraries,
        manifest.failure_reasons.get("unreadable", 0),
    )


def files_result(location: str, kind: str, known: Result | None) -> Result | None:
    """Return what is known of files, or of a run, whose model and configuration count, or of results; None if there is nothing.

    Args:
        location: a file or a folder.
        kind: ``run``, ``results``, ``files``, ``file`` or ``report``.
        known: what an earlier look has found.
    """
    folder, entries = _listed(location)
    pattern, least = _COUNTED.get(kind, (".*", 1))
    entries = [entry for entry in entries if re.fullmatch(pattern, entry.name, re.DOTALL)]
    if len(entries) < least:
        return None
    state = _state(entries)
    content = known.content if known is not None and known.state == state else _digest(folder, [name for name, *_ in entries])
    return Result(kind, "", content, state, None, sum(entry.size for entry in entries), {}, {})


def _content_of(manifest: Manifest) -> str:
    files = [(entry.path, entry.sha256) for entry in (*manifest.shards, *manifest.failures, *manifest.files)]
    return sha256_of_json({"fingerprint": manifest.fingerprint, "files": sorted(files)})


def _listed(location: str) -> tuple[Folder, list[Entry]]:
    """Return a folder and what is in it: all files below a folder but hidden ones, or one file, or those of a pattern."""
    parent, _, name = location.rpartition("/")
    beside = Folder(parent or "/")
    if not is_remote(location) and os.path.isdir(location):  # noqa: PTH112 -- false, too, where nothing can be
        return Folder(location), _visible(Folder(location).entries())
    if (state := beside.state(name)) is not None:
        return beside, [Entry(name, state[0], str(state[1]))]
    if re.search(r"[*?\[]", location):
        from pipelines.inputs.images.opening import split_pattern

        root, pattern = split_pattern(location)
        return Folder(root), [entry for entry in _visible(Folder(root).entries()) if re.fullmatch(pattern, entry.name)]
    return Folder(location), _visible(Folder(location).entries())


def _visible(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if not any(part.startswith(".") for part in entry.name.split("/"))]


def _state(entries: Iterable[Entry]) -> str:
    return sha256_of_json(sorted(entries))


def _digest(folder: Folder, names: Iterable[str]) -> str:
    """Return the digest of some files of a folder, whatever a file that stands alone is called."""
    digests = []
    for name in sorted(names):
        with storage_errors(folder.path_of(name)), folder.open(name) as file:
            digests.append((name, sha256_of_file(file)))
    return digests[0][1] if len(digests) == 1 else sha256_of_json(digests)

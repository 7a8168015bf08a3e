"""A run's hold on the folder that it writes: what may be written, what an earlier run finished, and the commit.

The order of a run: ``Output.begin`` (refuses a folder that must not be written, takes the lock), shards one by one in any
order and process, ``commit`` (every shard read again, manifest last). A run that is killed at any moment leaves finished shards
and no manifest; the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from schemas.errors import DatasetError
from schemas.fingerprints import Identity, canonical_json, sha256_of_bytes
from schemas.keys import shard_name
from schemas.manifest import MANIFEST_NAME, FileEntry, Manifest, ShardEntry
from schemas.shards import Footer, failures_name, finished_shard, is_foreign, read_footer, shard_entry
from schemas.storage import TEMPORARY_MARK, Folder, storage_errors

__all__ = ["Output", "commit", "hold"]

LOCK_NAME = ".lock"
_OTHER_FILES = re.compile(r"vocabulary\.txt|names/(classes|attributes)\.txt|truecaser/[A-Za-z0-9-]+\.model")
_OURS = re.compile(
    rf"(failures/)?part-\d{{5}}-of-\d{{5}}\.parquet|manifest\.json|{_OTHER_FILES.pattern}|\.lock|"
    rf"(.*/)?\.[^/]+{re.escape(TEMPORARY_MARK)}\d+"
)


@dataclass(frozen=True)
class Output:
    """A folder that a run may write to.

    Attributes:
        folder: where the dataset goes.
        identity: what will lie there.
        listings: for a kind whose inputs may grow, a digest of what each shard is to be made of. A shard counts as finished only
            where the statistics in its footer name the same ``listing``.
        files: content of other files that are known before the run, by name. They do not count for the identity: a dataset that is
            complete but for them gets them, and its shards stay.
    """

    folder: Folder
    identity: Identity
    listings: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Names of all shards, by number."""
        return [shard_name(shard, self.identity.shards) for shard in range(self.identity.shards)]

    def finished(self) -> frozenset[int]:
        """Numbers of the shards that an earlier run of the same identity finished."""
        return frozenset(number for number in range(self.identity.shards) if self._is_finished(number))

    def _is_finished(self, number: int) -> bool:
        footer = finished_shard(self.folder, shard_name(number, self.identity.shards), self.identity)
        return footer is not None and (self.listings is None or footer.statistics.get("listing") == self.listings[number])

    def complete(self) -> Manifest | None:
        """The manifest, where an earlier run of the same identity committed and every shard is still as listed."""
        if self.folder.size(MANIFEST_NAME) is None:
            return None
        try:
            manifest = Manifest.read(self.folder)
        except DatasetError:
            return None  # `prepare` says what is wrong with it, or overwrites it.
        if manifest.fingerprint != self.identity.fingerprint:
            return None
        entries = (*manifest.shards, *manifest.failures, *manifest.files)
        whole = all(self.folder.size(entry.path) == entry.bytes for entry in entries)
        digests = {entry.path: entry.sha256 for entry in manifest.files}
        whole = whole and all(digests.get(name) == sha256_of_bytes(data) for name, data in self.files.items())
        return manifest if whole and len(self.finished()) == self.identity.shards else None

    def prepare(self, *, overwrite: bool, update: bool = False) -> None:
        """Makes the folder ready: refuses what must not be lost, deletes what a killed run left behind.

        Args:
            overwrite: replace a dataset of another fingerprint.
            update: keep shards of the same fingerprint whose inputs have changed since, to be added to.

        Raises:
            DatasetError: the folder holds foreign files; or a dataset (whole or begun) of another fingerprint or of other
                inputs, and neither ``overwrite`` nor ``update`` says what to do with it.
        """
        names = self.folder.names()
        foreign = [name for name in names if not _OURS.fullmatch(name) or (_is_shard(name) and is_foreign(self.folder, name))]
        if foreign:
            raise DatasetError(
                f"{self.folder.location!r} holds files that are no dataset's, e.g. {foreign[0]!r}: nothing was written. "
                "Choose a new or empty folder"
            )
        if not overwrite:
            self._refuse_other(names, update=update)
        kept = {
            name
            for number, name in enumerate(self.names())
            if (finished_shard(self.folder, name, self.identity) if update else self._is_finished(number))
        }
        # The manifest goes first: from here on the folder is no dataset until the run commits.
        self.folder.delete(MANIFEST_NAME)
        for name in names:
            shard = name.removeprefix("failures/")
            if (_is_shard(name) and shard not in kept) or TEMPORARY_MARK in name:
                self.folder.delete(name)
        for name, data in self.files.items():
            self.folder.write(name, data)

    def _refuse_other(self, names: list[str], *, update: bool) -> None:
        for name in names:
            found: Manifest | Footer | None = None
            if name == MANIFEST_NAME:
                found = Manifest.read(self.folder)
            elif name.startswith("part-"):
                found = read_footer(self.folder, name)
            if found is not None and found.fingerprint != self.identity.fingerprint:
                raise DatasetError(
                    f"{self.folder.location!r} holds another dataset ({difference(found, self.identity)}): nothing was "
                    "written. Choose another folder, or give --overwrite to replace it"
                )
        there = {name for name in self.names() if finished_shard(self.folder, name, self.identity) is not None}
        changed = len(there) - len(self.finished())
        if changed and not update:
            raise DatasetError(
                f"{self.folder.location!r} was made from other images: the list of images differs in {changed} of "
                f"{self.identity.shards} shards; nothing was written. Give --update to add the images that are new, --overwrite to "
                "make it again, or choose another folder"
            )


def _is_shard(name: str) -> bool:
    return name.removeprefix("failures/").startswith("part-")


def difference(found: Manifest | Footer, identity: Identity) -> str:
    """Says in a few words how what lies in a folder differs from what a run would write."""
    if found.kind != identity.kind:
        return f"kind {found.kind!r} instead of {identity.kind!r}"
    parts = []
    for key in {**identity.parameters, **found.parameters}:  # What a user chose comes first.
        before, after = found.parameters.get(key), identity.parameters.get(key)
        if canonical_json(before) != canonical_json(after):  # What was read holds lists where the other has tuples.
            parts.append(f"{key}: there {_short(before)}, now {_short(after)}")
    return "; ".join(parts[:3]) or "made from other inputs, or with another number of shards"


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def hold(folder: Folder) -> Iterator[None]:
    """Holds a local folder for one run; the hold ends with the process, however it ends.

    A folder in an object store is not held: it would take a write that fails where an object is there already, which
    ``pyarrow.fs`` does not offer.

    Raises:
        DatasetError: another run holds it, or the folder cannot be made.
    """
    if not folder.is_local:
        folder.check_bucket()
        yield
        return
    path = folder.local_path
    with storage_errors(folder.location):
        made = [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
        handle = _lock(path / LOCK_NAME, folder.location)
    try:
        yield
    finally:
        # Deleted while it is still held, so that nobody else's lock is deleted.
        folder.delete(LOCK_NAME)
        os.close(handle)
        with contextlib.suppress(OSError):
            for empty in made:
                empty.rmdir()  # Only empty folders go: a refused run leaves nothing behind.


def _lock(path: Path, location: str) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except BlockingIOError:
            os.close(handle)
            raise DatasetError(
                f"{location!r} is in use: another run is writing it. Wait for it to end, or choose another folder"
            ) from None
        except FileNotFoundError:
            pass
        os.close(handle)  # Another run ended and deleted the file between our two calls: try again.


def commit(
    output: Output,
    *,
    statistics: Callable[[list[Footer]], Mapping[str, Any]],
    libraries: tuple[str, ...],
    files: tuple[str, ...] = (),
) -> Manifest:
    """Reads every shard again and writes the manifest, last.

    Args:
        output: the folder, with all its shards.
        statistics: makes the manifest's statistics from the footers of all shards.
        libraries: distributions whose versions matter to the content.
        files: paths of other files that belong to the dataset, besides those that the output knows.

    Raises:
        DatasetError: a shard is missing.
    """
    folder, files = output.folder, (*files, *output.files)
    shards: list[ShardEntry] = []
    failures: list[ShardEntry] = []
    footers: list[Footer] = []
    reasons: dict[str, int] = {}
    for name in output.names():
        footer = finished_shard(folder, name, output.identity)
        if footer is None:
            raise DatasetError(f"{folder.path_of(name)} is missing after the run: run the same command again")
        footers.append(footer)
        shards.append(shard_entry(folder, name, footer))
        failed = finished_shard(folder, failures_name(name), output.identity)
        if failed is not None:
            failures.append(shard_entry(folder, failures_name(name), failed))
            for reason, rows in failed.statistics["reasons"].items():
                reasons[reason] = reasons.get(reason, 0) + rows
    identity = output.identity
    manifest = Manifest(
        kind=identity.kind,
        fingerprint=identity.fingerprint,
        parameters=identity.parameters,
        inputs=tuple(identity.inputs),
        libraries={name: metadata.version(name) for name in ("imagepivot", "numpy", "pyarrow", *libraries)},
        shards=tuple(shards),
        failures=tuple(failures),
        failure_reasons=reasons,
        files=tuple(_file_entry(folder, name) for name in sorted(files)),
        statistics=statistics(footers),
    )
    for name in folder.names():
        if _OTHER_FILES.fullmatch(name) and name not in files:
            folder.delete(name)  # Of a dataset that was overwritten.
    folder.write(MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def _file_entry(folder: Folder, name: str) -> FileEntry:
    data = folder.read(name)
    return FileEntry(path=name, bytes=len(data), sha256=sha256_of_bytes(data))

"""Publication of shards and manifests: the first of several attempts wins.

A runner may attempt a shard twice, one after the other or in parallel, and an attempt that was given up may still run. Attempts
may differ: GPU results are not bit-identical, and some reads fail. A shard consists of three files (Parquet, failures, record)
that name each other's digests. Files of two attempts must not mix, and committed files must not change.

Publishing on a local disk:

1. The attempt notes size, time and inode of the shard, its tag, when it begins.
2. It takes the lock file ``.publishing``, and fails if a manifest exists or the shard has changed since.
3. It writes the failures, deletes the old record, and renames shard and record.

Publishing in a store (see `schemas.storage.object_store`), where every write is a compare-and-swap of tags:

1. The attempt notes tag and content of the record when it begins.
2. It replaces that record, or none, by a claim. If the record has changed, another attempt has won.
3. It fails if a manifest exists.
4. It uploads the shard, then the failures. Before a replacement it checks that its claim is still the record.
5. It replaces its claim by the new record. An attempt that is stopped may be overtaken, and then finds another claim.

A commit in a store takes no shard with a claim:

1. It lists the folder and checks all shards.
2. It writes the manifest, if the folder has none.
3. It lists the folder again, and deletes the manifest if a file has changed. An attempt checks for a manifest after its claim:
   one of them sees the other.
"""

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from schemas.errors import CommittedError, DatasetError
from schemas.failures import failures_name
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.storage.folder import FileInfo, Folder
from schemas.writing.locks import publishing
from schemas.writing.records import Record, record_name


def publish_manifest(folder: Folder, manifest: Manifest, stored: Mapping[str, FileInfo]) -> None:
    """Write the manifest of a dataset inside `publishing`.

    ``stored`` is the listing that the manifest describes.

    Raises:
        DatasetError: an attempt has replaced a shard since the listing, or another run has committed another result.
    """
    with folder.temporary(MANIFEST_NAME) as file:
        file.writelines(part.encode() for part in manifest.json_parts())
        file.flush()
        os.fsync(file.fileno())
        tag = folder.put(MANIFEST_NAME, Path(file.name), if_match=None)
    if folder.is_local:
        return
    if tag is None:
        other = b""
        with contextlib.suppress(FileNotFoundError):
            other = folder.read(MANIFEST_NAME)
        if other.decode() != manifest.to_json():
            raise DatasetError(f"{folder.location!r} was committed by another run: run the same command again")
    present = {entry.name: entry for entry in folder.list()}
    shards = manifest.shards.column("path")
    for name in chain(shards, manifest.failures.column("path"), map(record_name, shards)):
        if stored.get(name) != present.get(name):
            if tag is not None:
                folder.delete(MANIFEST_NAME, tag)
            raise DatasetError(f"{folder.path_of(name)} was replaced during the commit: run the same command again")


def tag_of(folder: Folder, name: str) -> str | None:
    """Return the tag of a file; None if it does not exist."""
    entry = folder.stat(name)
    return None if entry is None else entry.tag


class LostRaceError(Exception):
    """Another attempt has published the shard."""


class Attempt:
    """An attempt to write a shard, created when it begins.

    Raises:
        CommittedError: the dataset is committed.
    """

    def __init__(self, folder: Folder, shard: str) -> None:
        self._folder = folder
        self._shard = shard
        self._check_not_committed()
        self._before = tag_of(folder, shard if folder.is_local else record_name(shard))
        self._record_before: bytes | None = None
        if not folder.is_local and self._before is not None:
            with contextlib.suppress(FileNotFoundError):  # If the record was replaced since, the claim fails.
                self._record_before = folder.read(record_name(shard))

    def publish(self, file: BinaryIO, record: Record, failures: bytes) -> None:
        """Publish shard (a temporary file), failures (perhaps empty) and record.

        Raises:
            LostRaceError: another attempt has published the shard.
            CommittedError: the dataset was committed since the attempt began.
        """
        if not self._folder.is_local:
            try:
                self._publish_tagged(Path(file.name), record, failures)
            except LostRaceError:
                self._check_not_committed()
                raise
            return
        folder, shard = self._folder, self._shard
        with contextlib.ExitStack() as lock, folder.replace(record_name(shard)) as beside:
            beside.write(record.to_json_lines().encode())
            for written in (file, beside):  # Before the lock: a full disk fails here, and others wait for the lock.
                written.flush()
                os.fsync(written.fileno())
            lock.enter_context(publishing(folder))  # Until both are renamed.
            self._check_not_committed()
            present = tag_of(folder, shard)
            if present is not None and present != self._before:  # None: another run has deleted a damaged shard.
                raise LostRaceError
            if failures:
                folder.put(failures_name(shard), failures)
            else:
                folder.delete(failures_name(shard))
            folder.delete(record_name(shard))
            folder.put(shard, Path(file.name))

    def _publish_tagged(self, path: Path, record: Record, failures: bytes) -> None:
        folder, beside = self._folder, record_name(self._shard)
        claim = folder.put(beside, f"claimed by {uuid.uuid4()}\n".encode(), self._before)
        if claim is None:
            raise LostRaceError
        tags: dict[str, str] = {}
        try:
            self._check_not_committed()
            tags[self._shard] = self._write_claimed(self._shard, path, claim)
            name = failures_name(self._shard)
            if failures:
                tags[name] = self._write_claimed(name, failures, claim)
            elif self._before is not None and (old := self._tag_claimed(name, claim)) is not None:
                folder.delete(name, old)
            if folder.put(beside, replace(record, tags=tags).to_json_lines().encode(), claim) is None:
                raise LostRaceError
        except BaseException:
            with contextlib.suppress(DatasetError):  # The claim remains, and the shard counts as unfinished.
                self._withdraw(tags, claim)
            raise

    def _write_claimed(self, name: str, data: bytes | Path, claim: str) -> str:
        """Write a file while the claim is the record, and return its tag."""
        # A new shard needs no first check: the write fails if another attempt has written the file.
        current = None if self._before is None else self._tag_claimed(name, claim)
        while (tag := self._folder.put(name, data, current)) is None:
            current = self._tag_claimed(name, claim)
        return tag

    def _tag_claimed(self, name: str, claim: str) -> str | None:
        """Return the tag of a file, read before the check that the claim still holds."""
        tag = tag_of(self._folder, name)
        if tag_of(self._folder, record_name(self._shard)) != claim:
            raise LostRaceError
        return tag

    def _withdraw(self, tags: Mapping[str, str], claim: str) -> None:
        """Restore the record, or delete our failures if another attempt has published."""
        folder, beside, failures = self._folder, record_name(self._shard), failures_name(self._shard)
        if self._shard not in tags:
            if self._record_before is None:
                folder.delete(beside, claim)
            else:
                folder.put(beside, self._record_before, claim)
        elif failures in tags and tag_of(folder, beside) != claim:
            folder.delete(failures, tags[failures])

    def committed(self) -> CommittedError:
        """Return the error of an attempt after a commit of its dataset."""
        return CommittedError(
            f"{self._folder.location!r} is committed: {self._shard} was not written. Give write_dataset or "
            "complete_dataset ReusePolicy(overwrite=True) to write the dataset again"
        )

    def _check_not_committed(self) -> None:
        if tag_of(self._folder, MANIFEST_NAME) is not None:
            raise self.committed()

"""Repairing a dataset: what is damaged is derived from the rest, or deleted so that the command that made it makes it again."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import DatasetError
from schemas.failures import failures_name
from schemas.fingerprints import FORMAT_VERSION
from schemas.keys import SHARD_NAME
from schemas.manifest import MANIFEST_NAME, FileEntry, Manifest
from schemas.storage.folder import Folder
from schemas.vocabulary import TEXT_NAMES, Vocabulary
from schemas.writing.output import is_like_shard, is_own, is_temporary
from schemas.writing.output_state import ShardState, Status, matches, state_of
from schemas.writing.records import Record, record_name, write_record
from schemas.writing.shard_writer import lock_folder


@dataclass(frozen=True)
class Repair:
    """What a repair has done.

    Attributes:
        mended: names of files that were damaged or missing and are whole again.
        deleted: names of files that were deleted because they were damaged, or belong to a shard that was.
        missing: names of files that have to be made again; with any, the folder is not a dataset until the command that made it
            has run again.
        left_alone: names of files of other tools, and of shards of other datasets, which stay.
    """

    mended: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()


def repair(path: str | os.PathLike[str]) -> Repair:
    """Mend what is damaged in a dataset, as far as the dataset itself says how.

    Sizes and digests are compared with the manifest, or where that is damaged, too, with what is on record beside each shard.
    Records and the plain text of a vocabulary are written anew. Damaged shards are deleted together with the manifest: the same
    command as before then makes them again, and only them.

    Raises:
        DatasetError: the folder holds nothing of a dataset, is in use, or holds a damaged dataset in version 1 of the format.
    """
    folder = Folder(os.fspath(path))
    manifest = _read_manifest(folder)
    with lock_folder(folder):
        return _Repairer(folder, manifest).run()


def _read_manifest(folder: Folder) -> Manifest | None:
    """Read the manifest; None if it is damaged or missing, and shards are there."""
    try:
        return Manifest.read(folder)
    except DatasetError:
        if not any(SHARD_NAME.fullmatch(name) for name in folder.names()):
            raise
        return None


class _Repairer:
    def __init__(self, folder: Folder, manifest: Manifest | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._entries = folder.tagged()
        self._mended: list[str] = []
        self._deleted: list[str] = []
        self._missing: list[str] = []

    def run(self) -> Repair:
        files = self._manifest.files if self._manifest is not None else ()
        listed = {entry.path for entry in files}
        others = [name for name in sorted(self._entries) if name not in listed and not is_own(name) and not is_like_shard(name)]
        for name in sorted(self._entries):
            if is_temporary(name):
                self._delete(name)
        shards = self._folder.map(self._look, self._shards())
        version = FORMAT_VERSION if self._manifest is None else self._manifest.version
        if version != FORMAT_VERSION and not all(shard.is_whole for shard in shards):
            raise DatasetError(
                f"{self._folder.location!r} is damaged and has version {version} of the format, which cannot be continued: make it "
                "again in another folder"
            )
        for shard in shards:
            if shard.status in (Status.OTHER, Status.FOREIGN):
                others.append(shard.name)
            elif not shard.is_whole:
                self._missing.append(shard.name)
            if shard.status in (Status.MISSING, Status.DAMAGED):
                for part in (shard.name, failures_name(shard.name), record_name(shard.name)):
                    self._delete(part)
        whole = [shard for shard in shards if shard.is_whole]
        for entry in files:
            if matches(self._folder, self._entries, entry, "the manifest", digest=True) and not self._mend_text(entry, whole):
                self._delete(entry.path)
                self._missing.append(entry.path)
        for shard in whole:
            self._mend_record(shard)
        if self._manifest is None or self._missing:
            self._missing.append(MANIFEST_NAME)
            self._delete(MANIFEST_NAME)
        return Repair(tuple(self._mended), tuple(self._deleted), tuple(self._missing), tuple(others))

    def _shards(self) -> list[str]:
        if self._manifest is not None:
            return [shard.path for shard in self._manifest.shards]
        return sorted(name for name in self._entries if SHARD_NAME.fullmatch(name))

    def _look(self, name: str) -> ShardState:
        fingerprint = None if self._manifest is None else self._manifest.fingerprint
        return state_of(self._folder, name, self._entries, self._manifest, fingerprint=fingerprint, read_all=True)

    def _mend_text(self, entry: FileEntry, whole: list[ShardState]) -> bool:
        """Write the plain text of a vocabulary from its shard."""
        if entry.path not in TEXT_NAMES or not whole:
            return False
        try:
            with self._folder.open(whole[0].name) as file:
                text = Vocabulary.from_table(pq.ParquetFile(file).read()).to_text()
        except (ValueError, KeyError, OSError, pa.ArrowException):
            return False
        self._folder.write(entry.path, text.encode())
        self._mended.append(entry.path)
        return True

    def _mend_record(self, shard: ShardState) -> None:
        """Put the digest of a whole shard on record again, where the record is missing or damaged."""
        entry, footer = shard.entry, shard.footer
        if shard.record is None and entry is not None and footer is not None and footer.version == FORMAT_VERSION:
            write_record(self._folder, shard.name, Record.of(entry, footer))
            self._mended.append(record_name(shard.name))

    def _delete(self, name: str) -> None:
        if self._entries.pop(name, None) is not None:
            self._folder.delete(name)
            self._deleted.append(name)

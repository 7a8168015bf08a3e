"""Repairing a dataset: what is damaged is derived from the rest, or deleted so that the command that made it makes it again."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import DatasetError
from schemas.failures import failures_name
from schemas.fingerprints import FORMAT_VERSION, sha256_of_file
from schemas.manifest import MANIFEST_NAME, FileEntry, Manifest
from schemas.shards import read_footer, shard_entry
from schemas.storage.folder import Folder
from schemas.vocabulary import TEXT_NAMES, Vocabulary
from schemas.writing.output import hold
from schemas.writing.own_names import is_like_shard, is_own, is_temporary
from schemas.writing.records import Record, read_record, read_sources, record_name, write_record

__all__ = ["Repair", "repair"]

_SHARD = re.compile(r"part-\d{5}-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class Repair:
    """What a repair has done.

    Attributes:
        mended: names of files that were damaged or missing and are whole again.
        deleted: names of files that were deleted because they were damaged, or belong to a shard that was.
        missing: names of files that have to be made again; with any, the folder is not a dataset until the command that made it
            has run again.
        left_alone: names of files of other tools, which stay.
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

    Args:
        path: the dataset's folder.

    Raises:
        DatasetError: the folder holds nothing of a dataset, is in use, or holds a damaged dataset in version 1 of the format.
    """
    folder = Folder(os.fspath(path))
    manifest = _read_manifest(folder)
    with hold(folder):
        return _Repairer(folder, manifest).run()


def _read_manifest(folder: Folder) -> Manifest | None:
    """Read the manifest; None if it is damaged or missing, and shards are there."""
    try:
        return Manifest.read(folder)
    except DatasetError:
        if not any(_SHARD.fullmatch(name) for name in folder.names()):
            raise
        return None


class _Repairer:
    def __init__(self, folder: Folder, manifest: Manifest | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._sizes = dict(folder.files())
        self._mended: list[str] = []
        self._deleted: list[str] = []
        self._missing: list[str] = []

    def run(self) -> Repair:
        listed = [entry.path for entry in self._manifest.files] if self._manifest is not None else []
        others = [name for name in sorted(self._sizes) if name not in listed and not is_own(name) and not is_like_shard(name)]
        for name in sorted(self._sizes):
            if is_temporary(name):
                self._delete(name)
        shards = self._shards()
        whole = [name for name in shards if self._is_whole(name)]
        if self._manifest is not None and self._manifest.version != FORMAT_VERSION and len(whole) < len(shards):
            raise DatasetError(
                f"{self._folder.location!r} is damaged and has version {self._manifest.version} of the format, which cannot be "
                "continued: make it again in another folder"
            )
        for name in shards:
            if name not in whole:
                self._missing.append(name)
                for part in (name, failures_name(name), record_name(name)):
                    self._delete(part)
        for entry in self._manifest.files if self._manifest is not None else ():
            if not self._matches(entry) and not self._mend_text(entry, whole):
                self._delete(entry.path)
                self._missing.append(entry.path)
        for name in whole:
            self._mend_record(name)
        if self._manifest is None or self._missing:
            self._missing.append(MANIFEST_NAME)
            self._delete(MANIFEST_NAME)
        return Repair(tuple(self._mended), tuple(self._deleted), tuple(self._missing), tuple(others))

    def _shards(self) -> list[str]:
        if self._manifest is not None:
            return [shard.path for shard in self._manifest.shards]
        return sorted(name for name in self._sizes if _SHARD.fullmatch(name))

    def _is_whole(self, name: str) -> bool:
        """Whether a shard and its failures have the sizes and digests that are on record."""
        if self._manifest is not None:
            entries = (*self._manifest.shards, *self._manifest.failures)
            names = (name, failures_name(name, self._manifest.version))
            return all(self._matches(entry) for entry in entries if entry.path in names)
        footer, record = read_footer(self._folder, name), read_record(self._folder, name)
        if footer is None or record is None or not self._matches(FileEntry(name, record.bytes, record.sha256)):
            return False
        failures = footer.failures
        return not failures.rows or self._matches(FileEntry(failures_name(name), failures.bytes, failures.sha256))

    def _matches(self, entry: FileEntry) -> bool:
        if self._sizes.get(entry.path) != entry.bytes:
            return False
        with self._folder.open(entry.path) as file:
            return sha256_of_file(file) == entry.sha256

    def _mend_text(self, entry: FileEntry, whole: list[str]) -> bool:
        """Write the plain text of a vocabulary from its shard."""
        if entry.path not in TEXT_NAMES or not whole:
            return False
        try:
            with self._folder.open(whole[0]) as file:
                text = Vocabulary.from_table(pq.ParquetFile(file).read()).to_text()
        except (ValueError, KeyError, OSError, pa.ArrowException):
            return False
        self._folder.write(entry.path, text.encode())
        self._mended.append(entry.path)
        return True

    def _mend_record(self, name: str) -> None:
        """Put the digest of a whole shard on record again, where the record is damaged."""
        footer = read_footer(self._folder, name)
        if footer is None or footer.version != FORMAT_VERSION:
            return
        whole = read_sources(self._folder, name)
        shards = self._manifest.shards if self._manifest is not None else ()
        entry = next((shard for shard in shards if shard.path == name), None) or shard_entry(self._folder, name, footer.rows)
        record = Record.of(entry, footer)
        if whole is None or not whole[0].agrees(record):
            write_record(self._folder, name, record)
            self._mended.append(record_name(name))

    def _delete(self, name: str) -> None:
        if self._sizes.pop(name, None) is not None:
            self._folder.delete(name)
            self._deleted.append(name)

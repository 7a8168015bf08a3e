"""Repair of a dataset: derived files are rewritten, damaged shards deleted."""

import os
from dataclasses import dataclass

from schemas.dataset import Dataset
from schemas.errors import DatasetError
from schemas.failures import failures_name
from schemas.keys import SHARD_NAME
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.storage.folder import Folder
from schemas.vocabulary import TEXT_NAME
from schemas.writing.file_names import is_like_shard, is_own, is_temporary
from schemas.writing.locks import lock_folder
from schemas.writing.output_state import Status, file_problem, state_of
from schemas.writing.records import Record, record_name, write_record


@dataclass(frozen=True)
class Repair:
    """Result of a repair, as file names.

    Attributes:
        mended: damaged or missing files that were rewritten.
        deleted: files deleted because they, or the shard they belong to, were damaged.
        missing: files to write again; with any, the folder is not a dataset until its command has run again.
        left_alone: files of other tools and shards of other datasets, which stay.
    """

    mended: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()


def repair(path: str | os.PathLike[str]) -> Repair:
    """Repair a dataset from its own redundancy.

    Sizes and digests are compared with the manifest, or with the records if the manifest is damaged, too. Records and the text of
    a vocabulary are rewritten. Damaged shards are deleted together with the manifest: the same command then rewrites only them.

    Raises:
        DatasetError: the folder has no dataset, is in use, or has another version of the format.
    """
    folder = Folder(os.fspath(path))
    try:
        manifest: Manifest | None = Manifest.read(folder)
    except DatasetError:
        if not any(SHARD_NAME.fullmatch(name) for name in folder.names()):
            raise
        manifest = None
    with lock_folder(folder):
        return _repair_locked(folder, manifest)


def _repair_locked(folder: Folder, manifest: Manifest | None) -> Repair:
    entries = {entry.name: entry for entry in folder.list()}
    mended, deleted, missing = list[str](), list[str](), list[str]()

    def delete(name: str) -> None:
        if entries.pop(name, None) is not None:
            folder.delete(name)
            deleted.append(name)

    files = () if manifest is None else manifest.files
    listed = {entry.path for entry in files}
    others = [name for name in sorted(entries) if name not in listed and not is_own(name) and not is_like_shard(name)]
    for name in filter(is_temporary, sorted(entries)):
        delete(name)
    names = sorted(filter(SHARD_NAME.fullmatch, entries)) if manifest is None else [shard.path for shard in manifest.shards]
    shards = folder.map(lambda name: state_of(folder, name, entries, manifest, read_all=True), names)
    intact = [shard for shard in shards if shard.is_intact]
    for shard in shards:
        if shard.status in (Status.OTHER, Status.FOREIGN):
            others.append(shard.name)
        elif not shard.is_intact:
            missing.append(shard.name)
        if shard.status in (Status.MISSING, Status.DAMAGED):
            for part in (shard.name, failures_name(shard.name), record_name(shard.name)):
                delete(part)
    for entry in files:
        if file_problem(folder, entries, entry, "the manifest", digest=True):
            text = _vocabulary_text(folder, manifest) if manifest is not None and entry.path == TEXT_NAME else None
            if text is not None:
                folder.put(entry.path, text.encode())
                mended.append(entry.path)
            else:
                delete(entry.path)
                missing.append(entry.path)
    for shard in intact:
        if shard.record is None and shard.entry is not None and shard.footer is not None:
            outputs = () if manifest is None else manifest.sample_outputs
            write_record(folder, shard.name, Record.of(shard.entry, shard.footer, sample_outputs=outputs))
            mended.append(record_name(shard.name))
    if manifest is None or missing:
        missing.append(MANIFEST_NAME)
        delete(MANIFEST_NAME)
    return Repair(tuple(mended), tuple(deleted), tuple(missing), tuple(others))


def _vocabulary_text(folder: Folder, manifest: Manifest) -> str | None:
    """Return the text of a vocabulary from its shard; None if unreadable."""
    try:
        return Dataset(folder, manifest).vocabulary().to_text()
    except DatasetError:
        return None

"""Atomic writing of one shard: locks, publishing protocol and Parquet file.

A runner may attempt a shard twice, one after the other or in parallel, and an attempt that was given up may still run. Attempts
may differ: GPU results are not bit-identical, and some reads fail. A shard consists of three files (Parquet, failures, record)
that name each other's digests. Files of two attempts must not mix, and committed files must not change. The first attempt to
publish wins.

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

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import CommittedError, DatasetError
from schemas.failures import FailuresEntry, failures_content, failures_name
from schemas.footers import Footer, footer_metadata, shard_entry
from schemas.kinds import group_rows, holds_vectors, is_vector
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.sample_outputs import SampleOutputs
from schemas.storage.folder import FileInfo, Folder
from schemas.storage.storage_errors import create_folder, storage_errors
from schemas.writing.output import LOCK_NAME, PUBLISHING_NAME, OutputDataset
from schemas.writing.records import Record, Source, record_name

_SHARED_PATIENCE = 2.0  # Seconds: the last of several tasks locks the folder exclusively for a moment to delete the lock file.
_RETRY_SECONDS = 0.02


@contextlib.contextmanager
def lock_folder(folder: Folder, *, shared: bool = False) -> Iterator[None]:
    """Lock a local folder for one run, or ``shared`` for several array tasks.

    The lock ends with the process. A missing folder is created. A folder in an object store is not locked: a lock object of a
    killed run would block its successor. The publishing protocol is safe without the lock.

    Raises:
        DatasetError: another run holds the lock, or the folder cannot be created.
    """
    if not folder.is_local:
        folder.check_writable()
        yield
        return
    path = folder.local_path
    with storage_errors(folder.location):
        created = [parent for parent in (path, *path.parents) if not parent.exists()]
        try:
            handle = lock_file(path / LOCK_NAME, shared=shared, patience=_SHARED_PATIENCE if shared else 0.0)
        except BlockingIOError:
            raise DatasetError(
                f"{folder.location!r} is in use: another run is writing it. Wait for it to end, or choose another folder"
            ) from None
    try:
        yield
    finally:
        # Deleted under an exclusive lock, so that no other run's lock file is deleted.
        if not shared or _is_last(handle, path / LOCK_NAME):
            _delete_publishing(folder)
            folder.delete(LOCK_NAME)
        os.close(handle)
        if created:  # A run that fails early leaves no empty folders.
            for empty in (*path.glob("*/"), *created):
                with contextlib.suppress(OSError):
                    empty.rmdir()


def _delete_publishing(folder: Folder) -> None:
    """Delete the lock file of a killed publisher, unless a worker still holds it."""
    if folder.stat(PUBLISHING_NAME) is not None:
        with contextlib.suppress(BlockingIOError), exclusive_lock(folder.local_path / PUBLISHING_NAME, patience=0.0):
            pass


def lock_file(path: Path, *, shared: bool = False, patience: float = 0.0) -> int:
    """Lock a file, created if missing, until the returned descriptor is closed.

    ``shared`` allows other shared locks. ``patience`` is the time limit for other processes and threads in seconds.

    Raises:
        BlockingIOError: another process or thread holds the lock.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + patience
    while True:
        create_folder(path.parent)
        try:
            with storage_errors(str(path)):  # A link, which a stranger's folder may hold, is not followed.
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue  # Another run has deleted the empty folder.
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(handle)
                raise
            time.sleep(_RETRY_SECONDS)
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # Another run deleted the file between `open` and `flock`: retry.


def _is_last(handle: int, path: Path) -> bool:
    """Return whether the lock is now exclusive; otherwise it may be lost."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(handle).st_ino == path.stat().st_ino
    except OSError:
        return False


@contextlib.contextmanager
def exclusive_lock(path: Path, *, patience: float = math.inf) -> Iterator[None]:
    """Lock a file inside the block as `lock_file` does, and delete it at the end."""
    handle = lock_file(path, patience=patience)
    try:
        yield
    finally:
        with storage_errors(str(path)):
            path.unlink(missing_ok=True)  # Under the lock, so that no other lock file is deleted.
        os.close(handle)


def publishing(folder: Folder) -> contextlib.AbstractContextManager[None]:
    """Exclude other processes from publishing shards or committing in the block.

    An object store has no lock.
    """
    return exclusive_lock(folder.local_path / PUBLISHING_NAME) if folder.is_local else contextlib.nullcontext()


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
            with contextlib.suppress(FileNotFoundError):  # Of another tag if it was replaced since: then the claim fails.
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
            f"{self._folder.location!r} is committed: {self._shard} was not written. Give write_dataset or complete_dataset "
            "ReusePolicy(overwrite=True) to write the dataset again"
        )

    def _check_not_committed(self) -> None:
        if tag_of(self._folder, MANIFEST_NAME) is not None:
            raise self.committed()


_TEXT_ROW_GROUP_ROWS = 65_536


class ShardWriter:
    """A writer of the rows of one shard, created by `open_shard`.

    Row groups do not depend on the sizes of the tables.

    Attributes:
        rows: number of rows so far.
        statistics: statistics of the rows for the footer, set before the block ends.
        failures: failures so far, rows of kind ``failures``.
        sources: source of each row and failure, if later runs should detect changes.
        state: digest of the sources, see `Record`.
        sample_outputs: sample outputs of the model of the rows, see `schemas.sample_outputs`.

    Examples:
        >>> parameters = {"feature": imagepivot.FeatureSpec("zeros", (3,)).to_json()}
        >>> output = imagepivot.OutputDataset(imagepivot.Folder("build/shard"), "features", parameters)
        >>> with imagepivot.open_shard(output, 0) as shard:
        ...     shard.write(pa.Table.from_pylist([{"image_id": "img-00", "feature": [0, 0, 0]}], schema=output.schema))
        ...     shard.statistics = {"images": shard.rows}
    """

    def __init__(self, writer: pq.ParquetWriter, output: OutputDataset, group_rows: int) -> None:
        self.rows = 0
        self.statistics: Mapping[str, Any] = {}
        self.failures: list[Mapping[str, str]] = []
        self.sources: Sequence[Source] = ()
        self.version_digest = ""
        self.sample_outputs: SampleOutputs = ()
        self._writer = writer
        self._output = output
        self._group_rows = group_rows
        self._pending: list[pa.Table] = []
        self._written_rows = 0

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows, sorted by key and after the rows so far."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        table = table.cast(self._output.schema) if table.schema != self._output.schema else table
        self._pending.append(table)
        self.rows += table.num_rows
        while self.rows - self._written_rows >= self._group_rows:
            merged = pa.concat_tables(self._pending)
            self._write_group(merged.slice(0, self._group_rows))
            self._pending = [merged.slice(self._group_rows)]

    def add_failures(self, failures: Iterable[Mapping[str, str]]) -> None:
        """Append rows of kind ``failures``, in any order."""
        self.failures += failures

    def _finish(self, failures: FailuresEntry) -> Footer:
        """Write the last row group and the footer, and return the footer."""
        if self.rows > self._written_rows:
            self._write_group(pa.concat_tables(self._pending))
        output = self._output
        footer = Footer(output.kind, output.fingerprint, output.parameters, self.statistics, self.rows, failures)
        self._writer.add_key_value_metadata(footer_metadata(footer))
        self._writer.close()
        return footer

    def _write_group(self, group: pa.Table) -> None:
        # One chunk per column, and dictionaries in the order of first use: bytes do not depend on the input tables.
        for column, field in enumerate(group.schema):
            if pa.types.is_dictionary(field.type):
                plain = group.column(column).cast(field.type.value_type).combine_chunks()
                group = group.set_column(column, field, plain.dictionary_encode())
        self._writer.write_table(group.combine_chunks(), row_group_size=self._group_rows)
        self._written_rows += group.num_rows


@contextlib.contextmanager
def open_shard(output: OutputDataset, index: int) -> Iterator[ShardWriter]:
    """Write one shard atomically when the block succeeds.

    If another attempt has published the shard since the block began, that one stays; see this module.

    Raises:
        DatasetError: the dataset is committed, or the folder cannot be written.

    Examples:
        >>> rows = imagepivot.open_dataset("features").shard(0)
        >>> parameters = {"feature": imagepivot.FeatureSpec("copy", (2048,)).to_json()}
        >>> output = imagepivot.OutputDataset(imagepivot.Folder("build/copy"), "features", parameters)
        >>> with imagepivot.open_shard(output, 0) as shard:
        ...     shard.write(rows)
    """
    folder, name = output.folder, output.name(index)
    schema, rows = output.schema, _TEXT_ROW_GROUP_ROWS
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": True, "write_statistics": True}
    if holds_vectors(schema):
        # Compression would halve the reading speed for a third of the bytes, see tests/benchmarks/bench_reading.py.
        keys = [field.name for field in schema if not is_vector(field.type)]
        options, rows = {"compression": "none", "use_dictionary": False, "write_statistics": keys}, group_rows(schema)
    attempt = Attempt(folder, name)
    with contextlib.suppress(LostRaceError), folder.temporary(name) as file:
        with pq.ParquetWriter(file, schema, version="2.6", **options) as parquet:
            shard = ShardWriter(parquet, output, rows)
            if output.listings is None and output.version_digests is not None:
                shard.version_digest = output.version_digests[index]
            yield shard
            failures, failures_entry = failures_content(shard.failures)
            footer = shard._finish(failures_entry)
        file.flush()
        try:
            with pa.memory_map(file.name) as written:
                entry = shard_entry(written, name, shard.rows)
            record = Record.of(entry, footer, shard.version_digest, shard.sources, shard.sample_outputs)
            attempt.publish(file, record, failures)
        except FileNotFoundError as error:  # A commit deletes temporary files, also of running attempts.
            raise attempt.committed() from error

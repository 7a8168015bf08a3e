"""Write one shard, and publish it whole or not at all: the locks of a folder, attempts, and the Parquet file.

A runner may try a shard twice, one attempt after the other or both at once, and an attempt that was given up may still run when
the next one has ended. On GPUs two attempts need not agree in every bit, and a read that fails in one succeeds in the other. A
shard is three files, which name each other's digests: those of two attempts must not mix, and what is committed must not change.
So an attempt notes what lies there when it begins, and publishes only if that still lies there when it ends: the first one wins.

On a disk whoever publishes holds a lock. A store has none, but writes that fail where something else lies than was seen; see
`schemas.storage.object_store`. There an attempt first claims the shard: a claim takes the place of the record that was there when
it began, or of none, and at the end its own record that of the claim. What it writes between, it writes only as long as the claim
is there, in place of what it saw there meanwhile. Whoever comes to a stop in between may be overtaken, and then finds another
claim or record. A commit takes no shard with a claim beside it. It lists the folder again after writing the manifest, and an
attempt looks for a manifest after writing its claim: one of them sees the other.
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
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import CommittedError, DatasetError
from schemas.failures import FailuresEntry, failures_content, failures_name
from schemas.footers import Footer, entry_of, footer_metadata
from schemas.kinds import group_rows, holds_vectors, is_vector
from schemas.manifest import MANIFEST_NAME, MANIFEST_NAMES, Manifest
from schemas.process.shutdown import critical_section
from schemas.storage.folder import Entry, Folder
from schemas.storage.storage_errors import storage_errors
from schemas.writing.output import LOCK_NAME, PUBLISHING_NAME, OutputDataset
from schemas.writing.records import Record, Source, record_name

# One of those who share a lock holds it alone for a moment while it deletes it: that must not turn away another who comes then.
_SHARED_PATIENCE = 2.0

_RETRY_SECONDS = 0.02


@contextlib.contextmanager
def lock_folder(folder: Folder, *, shared: bool = False) -> Iterator[None]:
    """Hold a local folder for one run; the hold ends with the process, however it ends.

    A folder in an object store is not held: what a killed run leaves there would keep out the one that continues it, or
    expire while its owner is only slow. Shards and manifest are safe from others without it; see this module.
    A local folder that does not exist is made. Those who share it hold it at the same time, and keep out everybody else.

    Raises:
        DatasetError: another run holds it, or the folder cannot be made.
    """
    if not folder.is_local:
        folder.check_bucket()
        yield
        return
    with critical_section(), _locked(folder, shared=shared):
        yield


@contextlib.contextmanager
def _locked(folder: Folder, *, shared: bool) -> Iterator[None]:
    path = folder.local_path
    with storage_errors(folder.location):
        made = [parent for parent in (path, *path.parents) if not parent.exists()]
        try:
            handle = lock_file(path / LOCK_NAME, shared=shared, patience=_SHARED_PATIENCE if shared else 0.0)
        except BlockingIOError:
            raise DatasetError(
                f"{folder.location!r} is in use: another run is writing it. Wait for it to end, or choose another folder"
            ) from None
    try:
        yield
    finally:
        # Deleted while it is held alone, so that no other run's lock is deleted.
        if not shared or _is_last(handle, path / LOCK_NAME):
            _delete_publishing(folder)
            folder.delete(LOCK_NAME)
        os.close(handle)
        if made:  # A run that is refused or fails early leaves nothing behind: only empty folders can be removed.
            for empty in (*path.glob("*/"), *made):
                with contextlib.suppress(OSError):
                    empty.rmdir()


def _delete_publishing(folder: Folder) -> None:
    """Delete the lock of a publisher that was killed; that of a worker of a job that goes on is held."""
    if folder.size(PUBLISHING_NAME) is not None:
        with contextlib.suppress(BlockingIOError):
            handle = lock_file(folder.local_path / PUBLISHING_NAME)
            folder.delete(PUBLISHING_NAME)
            os.close(handle)


def lock_file(path: Path, *, shared: bool = False, patience: float = 0.0) -> int:
    """Lock a file, which is made if it is missing, until the descriptor that is returned is closed; its holder may delete it.

    Args:
        path: the file, on a file system that has ``flock``.
        shared: let others who share it in at the same time.
        patience: seconds to wait while another process or thread holds it; may be infinite.

    Raises:
        BlockingIOError: another one holds it.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # A run that was refused has deleted the folder that it had made.
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
        os.close(handle)  # Another run ended and deleted the file between our two calls: try again.


def _is_last(handle: int, path: Path) -> bool:
    """Whether nobody else shares a lock, which is then held alone; otherwise it may be lost."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(handle).st_ino == path.stat().st_ino
    except OSError:
        return False


@contextlib.contextmanager
def publishing(folder: Folder) -> Iterator[None]:
    """Let nobody else publish a shard of this folder, or commit, while the block runs.

    An object store cannot be locked. Where it has no tags here either (see `schemas.storage.object_store`), shard and record of two
    attempts that end within the same moment may still mix.
    """
    if not folder.is_local:
        yield
        return
    handle = lock_file(folder.local_path / PUBLISHING_NAME, patience=math.inf)
    try:
        yield
    finally:
        folder.delete(PUBLISHING_NAME)  # Deleted while it is still held, so that nobody else's lock is deleted.
        os.close(handle)


def publish_manifest(folder: Folder, manifest: Manifest, stored: Mapping[str, Entry]) -> None:
    """Write the manifest of a dataset, last, while `publishing`; the folder held ``stored`` when the manifest was made.

    Raises:
        DatasetError: another attempt has begun to write a shard meanwhile, or another commit has come first with another result.
    """
    content = manifest.to_json().encode()
    if not folder.has_tags:
        folder.write(MANIFEST_NAME, content)
        return
    tag = folder.swap(MANIFEST_NAME, content, None)
    if tag is None:
        other = folder.read_tagged(MANIFEST_NAME)
        if other is None or other[0] != content:
            raise DatasetError(f"{folder.location!r} was committed by another run meanwhile: run the same command again")
    now, names = folder.tagged(), [entry.path for entry in (*manifest.shards, *manifest.failures)]
    for name in (*names, *(record_name(entry.path) for entry in manifest.shards)):
        if stored.get(name) != now.get(name):
            if tag is not None:
                folder.delete(MANIFEST_NAME, tag)
            raise DatasetError(f"{folder.path_of(name)} was replaced during the commit: run the same command again")


class LostRaceError(Exception):
    """Another attempt has published the shard."""


class Attempt:
    """An attempt to make a shard, from its beginning.

    Raises:
        CommittedError: the dataset is committed.
    """

    def __init__(self, folder: Folder, shard: str) -> None:
        self._folder = folder
        self._shard = shard
        self._refuse_committed()
        self._before = None if folder.has_tags else folder.state(shard)
        self._before_tagged = folder.read_tagged(record_name(shard)) if folder.has_tags else None

    def publish(self, file: BinaryIO, record: Record, failures: bytes) -> None:
        """Publish what was made.

        Failures are published before the shard, which names their digest, and the record after it: no record lies beside a shard
        that it does not describe. Where there are tags, a claim stands for it meanwhile.
        The shard is in a temporary file of its folder; ``failures`` is the content of their file, empty without any.

        Raises:
            LostRaceError: another attempt has published the shard.
            CommittedError: the dataset was committed meanwhile.
        """
        if self._folder.has_tags:
            try:
                self._publish_tagged(Path(file.name), record, failures)
            except LostRaceError:
                self._refuse_committed()
                raise
            return
        folder, shard = self._folder, self._shard
        with contextlib.ExitStack() as lock, folder.replace(record_name(shard)) as beside:
            beside.write(record.to_json_lines().encode())
            for made in (file, beside):  # Both or none on a full disk; and while one attempt publishes, others wait.
                made.flush()
                os.fsync(made.fileno())
            lock.enter_context(publishing(folder))  # Until both have their names.
            self._refuse_committed()
            if (now := folder.state(shard)) is not None and now != self._before:
                raise LostRaceError  # None: another run has deleted what was damaged.
            if failures:
                folder.write(failures_name(shard), failures)
            else:
                folder.delete(failures_name(shard))
            folder.delete(record_name(shard))
            folder.rename(Path(file.name), shard)

    def _publish_tagged(self, path: Path, record: Record, failures: bytes) -> None:
        folder, beside = self._folder, record_name(self._shard)
        before, tag = self._before_tagged or (None, None)
        claim = folder.swap(beside, f"claimed by {uuid.uuid4()}\n".encode(), tag)
        if claim is None:
            raise LostRaceError
        tags: dict[str, str] = {}
        try:
            self._refuse_committed()
            tags[self._shard] = self._write_claimed(self._shard, path, claim)
            name = failures_name(self._shard)
            if failures:
                tags[name] = self._write_claimed(name, failures, claim)
            elif before is not None and (old := self._tag_claimed(name, claim)) is not None:
                folder.delete(name, old)
            if folder.swap(beside, replace(record, tags=tags).to_json_lines().encode(), claim) is None:
                raise LostRaceError
        except BaseException:
            with contextlib.suppress(DatasetError):  # Then the claim stays, and the shard counts as unfinished.
                self._withdraw(tags, claim, before)
            raise

    def _write_claimed(self, name: str, data: bytes | Path, claim: str) -> str:
        """Write a file as long as the claim is there, and return its tag."""
        # A new shard need not look: where it has been overtaken by a shard, this fails, and what comes first is replaced.
        seen = None if self._before_tagged is None else self._tag_claimed(name, claim)
        while (tag := self._folder.swap(name, data, seen)) is None:
            seen = self._tag_claimed(name, claim)
        return tag

    def _tag_claimed(self, name: str, claim: str) -> str | None:
        """Return the tag of a file, read before looking whether the claim is still there."""
        tag = self._folder.tag(name)
        if self._folder.tag(record_name(self._shard)) != claim:
            raise LostRaceError
        return tag

    def _withdraw(self, tags: Mapping[str, str], claim: str, before: bytes | None) -> None:
        """Leave no claim behind where nothing was written, and no failures where another attempt has published the shard."""
        folder, beside, failures = self._folder, record_name(self._shard), failures_name(self._shard)
        if self._shard not in tags:
            if before is None:
                folder.delete(beside, claim)
            else:
                folder.swap(beside, before, claim)
        elif failures in tags and folder.tag(beside) != claim:
            folder.delete(failures, tags[failures])

    def committed(self) -> CommittedError:
        """Return the error of an attempt whose dataset was committed."""
        return CommittedError(
            f"{self._folder.location!r} is committed: {self._shard} was not written. Give write_dataset or complete_dataset "
            "ReusePolicy(overwrite=True) to make the dataset again"
        )

    def _refuse_committed(self) -> None:
        folder = self._folder
        if any((folder.tag(name) if folder.has_tags else folder.state(name)) is not None for name in MANIFEST_NAMES):
            raise self.committed()


_TEXT_ROW_GROUP_ROWS = 65_536

Rows: TypeAlias = pa.Table | pa.RecordBatch


class ShardWriter:
    """Takes the rows of one shard, a table at a time; memory holds about one row group. Made by `open_shard`.

    Row groups do not depend on how the rows are cut into tables.

    Attributes:
        statistics: numbers about the rows, for the footer; to be set before the shard ends.
        failures: the failures so far, rows of kind ``failures``.
        sources: what each row and failure is made from, where a later run should be able to tell what has changed.
        state: digest of the sources, see `Record`.
    """

    def __init__(self, writer: pq.ParquetWriter, output: OutputDataset, group_rows: int) -> None:
        self.statistics: Mapping[str, Any] = {}
        self.failures: list[Mapping[str, str]] = []
        self.sources: Sequence[Source] = ()
        self.state = ""
        self._writer = writer
        self._output = output
        self._group_rows = group_rows
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._written_rows = 0

    @property
    def rows(self) -> int:
        """Number of rows written so far."""
        return self._written_rows + self._pending_rows

    def write(self, rows: Rows) -> None:
        """Add rows, which follow those written before in the order of their keys."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        table = table.cast(self._output.schema) if table.schema != self._output.schema else table
        self._pending.append(table)
        self._pending_rows += table.num_rows
        while self._pending_rows >= self._group_rows:
            merged = pa.concat_tables(self._pending)
            self._write_group(merged.slice(0, self._group_rows))
            self._pending = [merged.slice(self._group_rows)]
            self._pending_rows -= self._group_rows

    def add_failures(self, failures: Iterable[Mapping[str, str]]) -> None:
        """Add rows of kind ``failures``, in any order."""
        self.failures += failures

    def _finish(self, failures: FailuresEntry) -> Footer:
        """Write the last row group and the footer, and return the footer."""
        if self._pending_rows:
            self._write_group(pa.concat_tables(self._pending))
            self._pending, self._pending_rows = [], 0
        output = self._output
        footer = Footer(output.kind, output.fingerprint, output.parameters, self.statistics, self.rows, failures)
        self._writer.add_key_value_metadata(footer_metadata(footer))
        self._writer.close()
        return footer

    def _write_group(self, group: pa.Table) -> None:
        self._writer.write_table(_canonical(group), row_group_size=self._group_rows)
        self._written_rows += group.num_rows


@contextlib.contextmanager
def open_shard(output: OutputDataset, number: int) -> Iterator[ShardWriter]:
    """Write one shard whole or not at all.

    It takes its name when the block ends well, and leaves nothing behind when it does not. Where another attempt has published the
    shard since the block began, that one stays; see this module.

    Raises:
        DatasetError: the dataset is committed, or the folder cannot be written.

    Example:
        >>> with open_shard(output, 0) as shard:  # doctest: +SKIP
        ...     shard.write(table)
        ...     shard.statistics = {"images": table.num_rows}
    """
    folder, name = output.folder, output.name(number)
    options, group_rows = _layout(output.schema)
    attempt = Attempt(folder, name)
    with contextlib.suppress(LostRaceError), folder.temporary(name) as file:
        with pq.ParquetWriter(file, output.schema, version="2.6", **options) as parquet:
            shard = ShardWriter(parquet, output, group_rows)
            if output.listings is None and output.states is not None:
                shard.state = output.states[number]
            yield shard
            failures, said = failures_content(shard.failures)
            footer = shard._finish(said)
        file.flush()
        try:
            with pa.memory_map(file.name) as written:
                entry = entry_of(written, name, shard.rows)
            attempt.publish(file, Record.of(entry, footer, shard.state, shard.sources), failures)
        except FileNotFoundError as error:  # A commit deletes temporary files, those of attempts that still run, too.
            raise attempt.committed() from error


def _layout(schema: pa.Schema) -> tuple[dict[str, Any], int]:
    """Return Parquet options and the number of rows per row group for a schema.

    Columns of vectors are stored plainly: dictionaries and statistics only cost time there, and compression halves the
    reader's speed for a third of the bytes. Measured on two cores, 20,000 x 2048 float32, best of three: items that are
    not nullable 1.0 to 1.75 GB/s against 0.4 to 0.9 nullable; row groups of 4 MiB 1.75 against 1.1 of 64 MiB;
    zstd 0.44, lz4 0.78, byte-stream-split with zstd 0.45. tests/benchmarks/bench_reading.py measures it again.
    """
    if not holds_vectors(schema):
        return {"compression": "zstd", "use_dictionary": True, "write_statistics": True}, _TEXT_ROW_GROUP_ROWS
    keys = [field.name for field in schema if not is_vector(field.type)]
    options = {"compression": "none", "use_dictionary": False, "write_statistics": keys}
    return options, group_rows(schema)


def _canonical(group: pa.Table) -> pa.Table:
    """Make one chunk per column, dictionaries in the order of first use: the bytes must not depend on how the rows arrived."""
    for number, field in enumerate(group.schema):
        if pa.types.is_dictionary(field.type):
            plain = group.column(number).cast(field.type.value_type).combine_chunks()
            group = group.set_column(number, field, plain.dictionary_encode())
    return group.combine_chunks()

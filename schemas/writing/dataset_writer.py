"""Writing datasets: the commit protocol, in one place.

A run holds the folder, refuses what must not be lost, writes the missing shards one by one, in any order and process, and commits:
every shard is read again (in a store: its record, and its size), and the manifest is written last. A run that is killed at any
moment leaves finished shards and no manifest; the same command continues from there.

`write_dataset` does all of it for shards that are written in this process. A pipeline, whose shards are written by workers, uses
`complete_dataset` around the pipeline and `commit` at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import DatasetError
from schemas.failures import FailuresEntry, failures_content, failures_name
from schemas.fingerprints import Identity, sha256_of_bytes, sum_digests
from schemas.kinds import group_rows, holds_vectors, is_vector
from schemas.manifest import FileEntry, Manifest, ShardEntry
from schemas.shards import Footer, entry_of, footer_metadata, inspect_shard, shard_entry
from schemas.storage.folder import Entry, Folder
from schemas.writing.output import PROBE_NAME, OutputDataset, ReusePolicy, hold
from schemas.writing.own_names import is_temporary
from schemas.writing.publishing import Attempt, LostError, publish_manifest, publishing
from schemas.writing.records import Record, Sources, read_record, record_name
from schemas.writing.summary import write_summary
from schemas.writing.survey import Survey

__all__ = [
    "Rows",
    "ShardWriter",
    "Statistics",
    "commit",
    "complete_dataset",
    "library_versions",
    "open_shard",
    "sum_statistics",
    "write_dataset",
]

_TEXT_ROW_GROUP_ROWS = 65_536

Rows: TypeAlias = pa.Table | pa.RecordBatch
Statistics: TypeAlias = Callable[[list[Footer]], Mapping[str, Any]]


class ShardWriter:
    """Takes the rows of one shard, a table at a time; memory holds about one row group. Made by `open_shard`.

    Row groups do not depend on how the rows are cut into tables.

    Attributes:
        statistics: numbers about the rows, for the footer; to be set before the shard ends.
        failures: the failures so far, rows of kind ``failures``.
        sources: what the rows are made from, where a later run should be able to tell what has changed.
    """

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema, group_rows: int, identity: Identity) -> None:
        self.statistics: Mapping[str, Any] = {}
        self.failures: list[Mapping[str, str]] = []
        self.sources = Sources()
        self._writer = writer
        self._schema = schema
        self._identity = identity
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
        table = table.cast(self._schema) if table.schema != self._schema else table
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

    def _finish(self, failures: FailuresEntry) -> None:
        """Write the last row group and the footer."""
        if self._pending_rows:
            self._write_group(pa.concat_tables(self._pending))
            self._pending, self._pending_rows = [], 0
        self._writer.add_key_value_metadata(footer_metadata(self._identity, self.statistics, failures))
        self._writer.close()

    def _write_group(self, group: pa.Table) -> None:
        self._writer.write_table(_canonical(group), row_group_size=self._group_rows)
        self._written_rows += group.num_rows


@contextmanager
def open_shard(output: OutputDataset, number: int) -> Iterator[ShardWriter]:
    """Write one shard whole or not at all.

    It takes its name when the block ends well, and leaves nothing behind when it does not. Where another attempt has published the
    shard since the block began, that one stays; see `schemas.writing.publishing`.

    Args:
        output: the dataset.
        number: number of the shard.

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
    with suppress(LostError), folder.temporary(name) as file:
        with pq.ParquetWriter(file, output.schema, version="2.6", **options) as parquet:
            shard = ShardWriter(parquet, output.schema, group_rows, output.identity)
            if output.listings is None and output.states is not None:
                shard.sources = Sources(output.states[number])
            yield shard
            failures, said = failures_content(shard.failures)
            shard._finish(said)
        file.flush()
        with pa.memory_map(file.name) as written:
            entry = entry_of(written, name, shard.rows)
        identity = output.identity
        footer = Footer(identity.kind, identity.fingerprint, {}, shard.statistics, shard.rows, said)
        attempt.publish(file, Record.of(entry, footer), shard.sources, failures)


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


def write_dataset(
    output: OutputDataset,
    make_shard: Callable[[int, ShardWriter], None],
    policy: ReusePolicy = ReusePolicy(),
    *,
    check: Callable[[], object] = lambda: None,
    libraries: tuple[str, ...] = (),
    statistics: Statistics | None = None,
) -> Manifest:
    """Write a dataset in this process, or what an earlier run left of it to do.

    Args:
        output: folder and identity of the dataset.
        make_shard: writes the rows of the shard of a number; called for those that are missing, in order.
        policy: what the run keeps.
        check: raises where the inputs are unusable; called before anything is replaced, and only if there is something to do.
        libraries: distributions whose versions matter to the content.
        statistics: makes the manifest's statistics from the footers of all shards; `sum_statistics` when None.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: the folder is in use, or holds something that must not be lost.
    """

    def make_missing(finished: frozenset[int]) -> None:
        for number in range(output.shards):
            if number not in finished:
                with open_shard(output, number) as shard:
                    make_shard(number, shard)
        commit(output, libraries=libraries, statistics=statistics)

    return complete_dataset(output, make_missing, policy, check=check)


def complete_dataset(
    output: OutputDataset,
    make_missing: Callable[[frozenset[int]], object],
    policy: ReusePolicy = ReusePolicy(),
    *,
    check: Callable[[], object] = lambda: None,
) -> Manifest:
    """Hold the folder of a dataset while its missing shards are written and committed, if there are any.

    A shard is missing, too, if it or the failures beside it are damaged, by their sizes, or by digests if the policy verifies.

    Args:
        output: folder and identity of the dataset.
        make_missing: writes all shards but those with the numbers that it is given, and commits.
        policy: what the run keeps.
        check: raises where the run cannot succeed; called before anything is replaced, and only if there is something to do.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: the folder is in use, or holds something that must not be lost.
    """
    with hold(output.folder):
        survey = Survey(output, policy)
        manifest = survey.complete()
        if manifest is not None:
            return manifest
        survey.refuse()
        if not output.folder.is_local:
            output.folder.write(PROBE_NAME, b"")  # Else hours may pass before the first shard turns out not to be writable.
            output.folder.delete(PROBE_NAME)
        check()
        finished = survey.finished()
        survey.clear(survey.usable())
        make_missing(finished)
        return Manifest.read(output.folder)


def sum_statistics(footers: list[Footer]) -> dict[str, Any]:
    """Add up the statistics of shards: numbers, and digests of lists, at the same place of nested mappings."""
    total: dict[str, Any] = {}
    for footer in footers:
        _add(total, footer.statistics)
    return total


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(key, {}), value)
        elif isinstance(value, str):
            total[key] = sum_digests((total.get(key, "0"), value))
        else:
            total[key] = total.get(key, 0) + value


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of distributions that are installed here, and of those that write every dataset."""
    return {name: metadata.version(name) for name in ("imagepivot", "numpy", "pyarrow", *names)}


def commit(
    output: OutputDataset,
    *,
    libraries: tuple[str, ...] | Mapping[str, str] = (),
    files: tuple[str, ...] = (),
    statistics: Statistics | None = None,
) -> Manifest:
    """Compare every shard with its record and write the manifest, last.

    A shard in a local folder is read again. In a store, which keeps checksums of its own, that would take as long as writing it:
    there its record tells the digest, and the listing the size.

    Args:
        output: the folder, with all its shards.
        libraries: distributions whose versions matter to the content, or what `library_versions` said of them elsewhere.
        files: paths of other files that belong to the dataset, besides those that the output knows.
        statistics: makes the manifest's statistics from the footers of all shards; `sum_statistics` when None.

    Raises:
        DatasetError: a shard is missing, or its bytes are not those that were written. It is then deleted.
    """
    with publishing(output.folder):
        versions = libraries if isinstance(libraries, Mapping) else library_versions(libraries)
        return _commit(output, versions, (*files, *output.files), statistics or sum_statistics)


def _commit(output: OutputDataset, libraries: Mapping[str, str], files: tuple[str, ...], statistics: Statistics) -> Manifest:
    folder, identity = output.folder, output.identity
    stored = folder.tagged()
    written = folder.map(lambda number: _written(output, output.name(number), stored), range(output.shards))
    footers = [one.footer for one in written]
    reasons: Counter[str] = Counter()
    for footer in footers:
        reasons.update(footer.failures.reasons)
    manifest = Manifest(
        kind=identity.kind,
        fingerprint=identity.fingerprint,
        parameters=identity.parameters,
        inputs=tuple(identity.inputs),
        libraries=libraries,
        shards=tuple(one.shard for one in written),
        failures=tuple(one.failures for one in written if one.failures is not None),
        failure_reasons=dict(reasons),
        files=tuple(_file_entry(folder, name) for name in sorted(files)),
        statistics=statistics(footers),
    )
    beside = {failures_name(output.name(number)) for number in range(output.shards)} - {one.path for one in manifest.failures}
    # Left by a dataset that was overwritten, by an attempt that was killed or overtaken, or on the way between workers.
    left = [
        name
        for name in sorted(stored)
        if is_temporary(name) or name == PROBE_NAME or name in beside or (output.is_other_file(name) and name not in files)
    ]
    folder.map(folder.delete, left)
    if not folder.is_local:
        listings = [str(footer.statistics.get("listing", "")) for footer in footers]
        write_summary(folder, manifest, listings, [one.state for one in written], stored)
    publish_manifest(folder, manifest, stored)
    return manifest


class _Written(NamedTuple):
    shard: ShardEntry
    footer: Footer
    failures: ShardEntry | None
    state: str


def _written(output: OutputDataset, name: str, stored: Mapping[str, Entry]) -> _Written:
    """Return what a manifest says of a finished shard, and compare the shard with its record."""
    folder, record = output.folder, read_record(output.folder, name)
    if record is None and folder.has_tags and record_name(name) in stored:
        raise DatasetError(f"another attempt writes {folder.path_of(name)}, or was stopped: run the same command again")
    if record is not None and not record.is_of(stored):
        record = None
    told = None if record is None or folder.is_local or name not in stored else record.stands_for(name, stored[name].size)
    if record is not None and told is not None and output.own(told[1]) is not None:
        shard, footer = told
        said, beside = footer.failures, failures_name(name)
        if not said.rows or (beside in stored and stored[beside].size == said.bytes):
            failures = ShardEntry(beside, said.bytes, said.sha256, said.rows) if said.rows else None
            return _Written(shard, footer, failures, record.state)
    found = output.own(inspect_shard(folder, name))
    if found is None:
        raise DatasetError(f"{folder.path_of(name)} is missing after the run: run the same command again")
    shard = _shard_entry(folder, name, found, record)
    failures = _failures_entry(folder, name, found.failures) if found.failures.rows else None
    return _Written(shard, found, failures, record.state if record else "")


def _shard_entry(folder: Folder, name: str, footer: Footer, record: Record | None) -> ShardEntry:
    entry = shard_entry(folder, name, footer.rows)
    if record is not None and (record.sha256 != entry.sha256 or not record.describes(entry.bytes, footer.statistics)):
        folder.delete(name)
        raise DatasetError(
            f"{folder.path_of(name)} was damaged after it had been written: run the same command again, which makes it again"
        )
    return entry


def _failures_entry(folder: Folder, shard: str, expected: FailuresEntry) -> ShardEntry:
    name = failures_name(shard)
    try:
        entry = shard_entry(folder, name, expected.rows)
    except FileNotFoundError:
        entry = None
    if entry is None or entry.sha256 != expected.sha256:
        folder.delete(shard)  # Without its failures it is not finished.
        raise DatasetError(f"{folder.path_of(name)} is missing or damaged after the run: run the same command again")
    return entry


def _file_entry(folder: Folder, name: str) -> FileEntry:
    data = folder.read(name)
    return FileEntry(path=name, bytes=len(data), sha256=sha256_of_bytes(data))

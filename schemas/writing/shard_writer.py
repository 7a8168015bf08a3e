"""Writing one shard: rows to a Parquet file whose bytes do not depend on how the rows arrive, published whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.failures import FailuresEntry, failures_content
from schemas.kinds import group_rows, holds_vectors, is_vector
from schemas.shards import Footer, entry_of, footer_metadata
from schemas.writing.output import OutputDataset
from schemas.writing.publishing import Attempt, LostError
from schemas.writing.records import Record, Source

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

"""Writing of one shard: the Parquet file with footer, record and failures."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.failures import FailuresEntry, failures_content
from schemas.footers import Footer, footer_metadata, shard_entry
from schemas.kinds import group_rows, holds_vectors, is_vector
from schemas.sample_outputs import SampleOutputs
from schemas.writing.attempts import Attempt, LostRaceError
from schemas.writing.output import OutputDataset
from schemas.writing.records import Record, Source

_TEXT_ROW_GROUP_ROWS = 65_536


class ShardWriter:
    """A writer of the rows of one shard, created by `open_shard`.

    Row groups do not depend on the sizes of the tables.

    Attributes:
        rows: number of rows so far.
        statistics: statistics of the rows for the footer, set before the block ends.
        failures: failures so far, rows of kind ``failures``.
        sources: source of each row and failure, if later runs should detect changes.
        version_digest: digest of the versions of the sources, see `Record`.
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

    If another attempt has published the shard since the block began, that one stays; see `schemas.writing.attempts`.

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

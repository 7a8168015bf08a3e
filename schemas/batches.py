"""Reading a shard a few rows at a time, for datasets whose shards do not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.dataset import Dataset

__all__ = ["batch_rows", "shard_batches", "vector_bytes"]

_BATCH_BYTES = 4 << 20
_TEXT_ROW_BYTES = 512  # Rough size of a row without vectors.


def vector_bytes(schema: pa.Schema) -> int:
    """Return the bytes that the vectors of one row take; they are stored uncompressed."""
    vectors = (field.type for field in schema if pa.types.is_fixed_size_list(field.type))
    return sum(vector.list_size * vector.value_type.bit_width // 8 for vector in vectors)


def batch_rows(schema: pa.Schema) -> int:
    """Return the number of rows that take about four MiB."""
    return max(1, _BATCH_BYTES // (vector_bytes(schema) or _TEXT_ROW_BYTES))


def shard_batches(dataset: Dataset, number: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a shard, sorted by key, in batches of about four MiB.

    Args:
        dataset: the dataset.
        number: number of the shard.
        columns: columns to read; all when None.

    Raises:
        DatasetError: the shard is missing.
    """
    with dataset.open_file(dataset.manifest.shards[number].path) as file:
        yield from pq.ParquetFile(file).iter_batches(
            batch_size=batch_rows(dataset.schema), columns=None if columns is None else list(columns)
        )

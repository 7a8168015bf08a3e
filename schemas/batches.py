"""Reading a shard a few rows at a time, for datasets whose shards do not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from schemas.dataset import Dataset
from schemas.kinds import vector_bytes

__all__ = ["batch_rows", "shard_batches"]

_BATCH_BYTES = 4 << 20
_TEXT_ROW_BYTES = 512  # Rough size of a row without vectors.


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
        DatasetError: the shard is missing or damaged.
    """
    return dataset.shard_batches(number, columns, batch_rows(dataset.schema))

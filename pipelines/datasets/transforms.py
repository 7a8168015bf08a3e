"""Beam transform that reads datasets of any kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.typehints.row_type import RowTypeConstraint

from pipelines.running.transforms import check_root, spread_shards
from schemas.dataset import Dataset, open_dataset
from schemas.kinds import numpy_type


@dataclass(eq=False)
class ReadDataset(beam.PTransform):
    """Root of a pipeline, which reads a dataset's rows with a Beam schema.

    A row has a field per column. A vector is flat, in row-major order, see `Dataset.shape_of`; float16 becomes float32.

    Attributes:
        columns: columns to read; None for all.

    Examples:
        >>> with beam.Pipeline() as pipeline:
        ...     rows = pipeline | imagepivot.ReadDataset("features")
        ...     _ = rows | beam.Filter(lambda row: row.image_id == "img-03") | beam.Map(lambda row: print(row.feature[:3]))
        [0.0, 1.0, 2.0]
    """

    location: str | os.PathLike[str]
    columns: Sequence[str] | None = None

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Read each shard in one call.

        Raises:
            UsageError: it is applied to a PCollection.
            DatasetError: the folder has no dataset.
        """
        check_root(begin, self, "it lists the shards of one folder; read folders of a PCollection with imagepivot.open_dataset")
        dataset = open_dataset(self.location)
        columns = dataset.schema.names if self.columns is None else list(self.columns)
        fields = [(name, _beam_type(dataset.schema.field(name).type)) for name in columns]
        read = beam.FlatMap(_read_rows, dataset, columns).with_output_types(RowTypeConstraint.from_fields(fields))
        return spread_shards(begin.pipeline, range(dataset.num_shards), None) | "ReadShard" >> read


def _read_rows(shard: int, dataset: Dataset, columns: Sequence[str]) -> Iterator[beam.Row]:
    for batch in dataset.shard_batches(shard, columns):
        for row in batch.select(list(columns)).to_pylist(maps_as_pydicts="strict"):
            yield beam.Row(**row)


def _beam_type(dtype: pa.DataType) -> Any:
    """Return the type of a column in a Beam schema, which has no float16."""
    if pa.types.is_dictionary(dtype):
        return _beam_type(dtype.value_type)
    if pa.types.is_map(dtype):
        return Mapping[_beam_type(dtype.key_type), _beam_type(dtype.item_type)]  # type: ignore[misc]
    if pa.types.is_list(dtype) or pa.types.is_fixed_size_list(dtype):
        return Sequence[_beam_type(dtype.value_type)]  # type: ignore[misc]
    if pa.types.is_string(dtype):
        return str
    return np.float32 if pa.types.is_float16(dtype) else numpy_type(dtype).type

"""Reader of datasets: by shard, by key, as Arrow tables or as one array."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.damage import content_errors, damaged
from schemas.errors import DatasetError
from schemas.failures import parse_failures
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_bytes
from schemas.footers import ShardRows, sha256_of_footer
from schemas.keys import shard_of
from schemas.kinds import FAILURES, batch_rows, belongs_to_images, holds_vectors, is_vector, numpy_type, schema_of, vector_bytes
from schemas.manifest import FileEntry, Manifest
from schemas.pages import PagedShard
from schemas.parameters import FeaturesParameters, feature_of
from schemas.storage.folder import Folder
from schemas.vocabulary import Vocabulary

_COMMANDS = {"encoded": "encode", "regions": "features", "embeddings": "embed"}  # If names of kind and command differ.
_PAGED_SHARDS = 1024  # Mapped by one dataset; a process may have 65,530 maps.


def open_dataset(path: str | os.PathLike[str], *, kind: str | None = None) -> Dataset:
    """Open a dataset by reading its manifest.

    Args:
        path: the dataset's folder: a local path, ``gs://...`` or ``s3://...``.
        kind: the expected kind; None for any.

    Raises:
        DatasetError: the folder has no dataset, its manifest is unusable, or it has another kind.

    Examples:
        >>> imagepivot.open_dataset("features").get("img-00")["feature"].shape
        (2048,)
    """
    folder = Folder(os.fspath(path))
    dataset = Dataset(folder=folder, manifest=Manifest.read(folder))
    if kind is not None:
        check_kind(dataset, kind)
    return dataset


def check_kind(dataset: Dataset, *kinds: str) -> None:
    """Raise a `DatasetError` for a dataset of none of these kinds."""
    if dataset.kind not in kinds:
        expected = " or ".join("encoded captions" if kind == "encoded" else kind for kind in kinds)
        commands = " or ".join(dict.fromkeys(_COMMANDS.get(kind, kind) for kind in kinds))
        raise DatasetError(
            f"{dataset.folder.location!r} holds {dataset.kind}, expected {expected}: give a folder that imagepivot {commands} wrote"
        )


class NoRowError(KeyError):
    """A dataset has no row of an image; similar ids are only searched for the message."""

    def __str__(self) -> str:
        dataset, image_id = self.args
        similar = get_close_matches(image_id, dataset.image_ids(), cutoff=0.7)
        hint = f": did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        return f"{dataset.folder.location!r} has no row of image {image_id!r}{hint}"


@dataclass(frozen=True)
class Dataset:
    """A committed dataset. Cheap to create and to pickle; data is read on demand.

    Examples:
        >>> features = imagepivot.open_dataset("features")
        >>> features.kind, len(features), features.numpy().shape
        ('features', 6, (6, 2048))
        >>> features.get("img-00")["feature"].dtype
        dtype('float32')
    """

    folder: Folder
    manifest: Manifest

    def __reduce__(self) -> tuple[Any, ...]:
        # Without cached properties: an unpickled schema does not equal the original.
        return type(self), (self.folder, self.manifest)

    def __repr__(self) -> str:
        return f"Dataset({self.folder.location!r}, kind={self.kind!r}, rows={len(self)}, shards={self.num_shards})"

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def kind(self) -> str:
        """Kind of the dataset, e.g. ``captions``."""
        return self.manifest.kind

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset."""
        return self.manifest.fingerprint

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.manifest.shards)

    @cached_property
    def spec(self) -> FeatureSpec | None:
        """Specification of the vectors; None for a kind without vectors."""
        return feature_of(self.manifest.parameters)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Features of random weights, see `FeaturesParameters.untrained`."""
        return () if self.spec is None else FeaturesParameters.from_json(self.manifest.parameters).untrained

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return schema_of(self.kind, self.spec)

    @cached_property
    def _starts(self) -> np.ndarray:
        """First row of each shard, followed by the number of rows."""
        return np.cumsum([0, *self.manifest.shards.column("rows")])

    def shard(self, index: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read all rows of one shard, sorted by key."""
        with self._open_shard(index) as shard:
            return shard.read(columns)

    def shards(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the shards sequentially; memory holds one."""
        for index in range(self.num_shards):
            yield self.shard(index, columns)

    def batches(self, columns: Sequence[str] | None = None, batch_size: int = 4096) -> Iterator[pa.RecordBatch]:
        """Read all rows in batches; memory holds one, or a row group of tokens."""
        for index in range(self.num_shards):
            yield from self.shard_batches(index, columns, batch_size)

    def shard_batches(
        self, index: int, columns: Sequence[str] | None = None, batch_size: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of one shard in batches, of about four MiB by default.

        Raises:
            DatasetError: the shard is missing or damaged.
        """
        with self._open_shard(index) as shard:
            yield from shard.batches(columns, batch_size or batch_rows(self.schema))

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read all rows; polars, DuckDB and pandas accept the table."""
        return pa.concat_tables(self.shards(columns), promote_options="default")

    def failures(self) -> pa.Table:
        """Read the failures: key, uri, stage, reason and message."""
        tables = [parse_failures(self.read_file(entry), self.folder.path_of(entry.path)) for entry in self.manifest.failures]
        return pa.concat_tables(tables) if tables else FAILURES.empty_table()

    def rows(self, image_id: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read all rows of an image, from the row groups of its shard that may contain it.

        Raises:
            KeyError: the dataset has no row of this image.
            DatasetError: rows of this kind do not belong to images.
        """
        if not belongs_to_images(self.kind):
            raise DatasetError(f"{self.folder.location!r} holds {self.kind}, which have no image ids: use table()")
        with self._open_shard(shard_of(image_id, self.num_shards)) as shard:
            table = self.schema.empty_table()
            for group in range(shard.metadata.num_row_groups):
                statistics = shard.metadata.row_group(group).column(0).statistics
                if statistics is None or not statistics.has_min_max or statistics.min <= image_id <= statistics.max:
                    table = pa.concat_tables([table, shard.read(groups=[group]).filter(pc.field("image_id") == image_id)])
        if table.num_rows == 0:
            raise NoRowError(self, image_id)
        return table if columns is None else table.select(list(columns))

    def get(self, image_id: str) -> dict[str, object]:
        """Read the only row of an image; vectors are numpy arrays.

        Raises:
            KeyError: the dataset has no row of this image.
        """
        row = self.rows(image_id)
        if row.num_rows != 1:
            raise DatasetError(f"image {image_id!r} has {row.num_rows} rows of kind {self.kind}: use rows()")
        return next(dicts_of_rows(row, self.spec))

    def take(self, image_ids: Sequence[str], columns: Sequence[str] | None = None) -> dict[str, np.ndarray | list[Any]]:
        """Read rows of images in the order of the ids, which may repeat.

        Vectors of a fixed size are read at their offsets, other kinds like `rows`.

        Returns:
            The columns by name: arrays ``(rows, *shape)`` of vectors, and lists.

        Raises:
            KeyError: the dataset has no row of an image.

        Examples:
            >>> imagepivot.open_dataset("features").take(["img-03", "img-00"])["feature"].shape
            (2, 2048)
        """
        names = self.schema.names if columns is None else columns
        if not vector_bytes(self.schema) or not belongs_to_images(self.kind):
            table = pa.concat_tables([self.schema.empty_table(), *map(self.rows, image_ids)])
            return {name: self.values(table[name], name) for name in names}
        rows: list[tuple[int, int]] = []
        for image_id in image_ids:
            shard = shard_of(image_id, self.num_shards)
            present = self._paged_shard(shard).rows_of(image_id)
            if not present:
                raise NoRowError(self, image_id)
            rows += [(shard, row) for row in present]
        return {name: self._take_column(name, rows) for name in names}

    def _take_column(self, name: str, rows: Sequence[tuple[int, int]]) -> np.ndarray | list[Any]:
        """Read rows of one column, given by shard and number."""
        dtype = self.schema.field(name).type
        if not pa.types.is_fixed_size_list(dtype):
            return [self._paged_shard(shard).table[name][row].as_py() for shard, row in rows]
        taken = np.empty((len(rows), dtype.list_size), numpy_type(dtype))

        def copy(position: int) -> None:
            shard, row = rows[position]
            paged = self._paged_shard(shard)
            with content_errors(paged.path):
                taken[position] = paged.vector(name, row, dtype.list_size, taken.dtype)

        self.folder.map(copy, range(len(rows)))
        return taken.reshape(len(rows), *self.shape_of(name))

    @cached_property
    def _paged_shard(self) -> Callable[[int], PagedShard]:
        return lru_cache(_PAGED_SHARDS)(self._open_paged_shard)

    def _open_paged_shard(self, index: int) -> PagedShard:
        entry = self.manifest.shards[index]

        def read_group(group: int, column: str) -> np.ndarray:
            with self._open_shard(index) as shard:
                return shard.read([column], groups=[group])[column].combine_chunks().flatten().to_numpy()

        with self._open_shard(index) as shard, self._open(entry) as file:
            path, table = self.folder.path_of(entry.path), shard.read([f.name for f in self.schema if not is_vector(f.type)])
            mapped = memoryview(file.read_buffer()).cast("B") if self.folder.is_local else b""
        read = (lambda start, size: mapped[start : start + size]) if mapped else partial(self.folder.read, entry.path)
        return PagedShard(path, table, shard.metadata, read, read_group)

    def __getitem__(self, index: int | slice) -> dict[str, object] | list[dict[str, object]]:
        """Read a row, or the rows of a slice, in the order of `image_ids`.

        Each access reads row groups; iterate to read all rows.
        """
        indices = range(len(self))[index]
        if isinstance(indices, int):
            return next(self._rows_between(indices, indices + 1))
        if indices.step == 1:
            return list(self._rows_between(indices.start, indices.stop))
        return [next(self._rows_between(row, row + 1)) for row in indices]

    def __iter__(self) -> Iterator[dict[str, object]]:
        """Read all rows sequentially; memory holds one row group."""
        return self._rows_between(0, len(self))

    def _rows_between(self, start: int, stop: int) -> Iterator[dict[str, object]]:
        starts = self._starts
        for index in range(int(np.searchsorted(starts, start, "right")) - 1, int(np.searchsorted(starts, stop))):
            with self._open_shard(index) as shard:
                begin = int(starts[index])
                for group in range(shard.metadata.num_row_groups):
                    end = begin + shard.metadata.row_group(group).num_rows
                    if begin < stop and start < end:
                        rows = shard.read(groups=[group])
                        yield from dicts_of_rows(rows[max(start - begin, 0) : stop - begin], self.spec)
                    begin = end

    def values(self, column: pa.ChunkedArray, name: str) -> np.ndarray | list[object]:
        """Convert a column of this name that was read, see `column_values`."""
        return column_values(column, name, self.spec)

    def shape_of(self, column: str) -> tuple[int, ...]:
        """Return the shape of one row of a column: ``()`` without vectors."""
        dtype = self.schema.field(column).type
        return _vector_shape(column, dtype.list_size, self.spec) if pa.types.is_fixed_size_list(dtype) else ()

    def image_ids(self) -> list[str]:
        """Read the image ids of all rows, in the order of `numpy`."""
        return [value for table in self.shards(["image_id"]) for value in table["image_id"].to_pylist()]

    def numpy(self, column: str = "feature", *, l2: bool = False, out: np.ndarray | None = None) -> np.ndarray:
        """Read a column of vectors into one contiguous array in parallel.

        Args:
            column: name of the column.
            l2: divide each vector by its Euclidean norm (over the last axis; a zero vector stays zero).
            out: contiguous array of the same shape to fill, e.g. a ``numpy.memmap``; a new array by default.

        Returns:
            Array ``(rows, *shape)`` in the stored type; rows in the order of ``image_ids()``.

        Raises:
            DatasetError: the column holds no vectors, or a shard is missing or not as listed.
            ValueError: ``out`` has another shape or is not contiguous.
        """
        dtype = self.schema.field(column).type
        if not pa.types.is_fixed_size_list(dtype):
            raise DatasetError(f"column {column!r} holds {dtype}, not vectors: use table()")
        shape = (len(self), *self.shape_of(column))
        for entry in self.manifest.shards:  # Before memory is allocated.
            if entry.rows * vector_bytes(self.schema) > entry.bytes:
                raise damaged(self.folder.path_of(entry.path), f"cannot hold {entry.rows:,} rows in {entry.bytes:,} bytes")
        if out is None:
            out = np.empty(shape, dtype=numpy_type(dtype))
        if out.shape != shape or not out.flags.c_contiguous:
            raise ValueError(f"out has shape {out.shape} and strides {out.strides}, expected a C-contiguous array {shape}")
        flat = out.reshape(len(self), dtype.list_size)
        starts = self._starts
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda n: self._fill(n, column, flat[starts[n] : starts[n + 1]]), range(self.num_shards)))
        if l2:
            # At least float32: squares of float16 overflow.
            norms = np.sqrt(np.einsum("...d,...d->...", out, out, dtype=np.result_type(out, np.float32)))[..., np.newaxis]
            out /= np.where(norms > 0, norms, 1)
        return out

    def vocabulary(self) -> Vocabulary:
        """Read the vocabulary of a dataset of kind ``vocabulary``."""
        check_kind(self, "vocabulary")
        table = self.table()
        try:
            return Vocabulary.from_table(table)
        except ValueError as error:
            raise DatasetError(
                f"{self.folder.location!r} is no vocabulary: {error}. Write it again with --overwrite"
            ) from error

    @contextmanager
    def _open_shard(self, index: int) -> Iterator[ShardRows]:
        """Open a shard and check its size, rows and columns.

        The digest of a small shard without vectors is compared, too. Of a shard of vectors only the digest of the footer is, since
        a damaged footer can crash pyarrow; `validate` finds damage of the vectors. Errors of pyarrow in the block become a
        ``DatasetError``: it must only read.

        Raises:
            DatasetError: the shard is missing or damaged.
        """
        entry = self.manifest.shards[index]
        path = self.folder.path_of(entry.path)
        with self._open(entry) as file, content_errors(path):
            source = file
            if not holds_vectors(self.schema):
                buffer = file.read_buffer()
                self._check_digest(entry, buffer)
                source = pa.BufferReader(buffer)
            elif sha256_of_footer(file) != entry.footer_sha256:
                raise damaged(path, "is damaged (the SHA-256 of its footer is not the one that the manifest lists)")
            shard = ShardRows(source, path)
            if shard.metadata.num_rows != entry.rows:
                raise damaged(path, f"has {shard.metadata.num_rows:,} rows, the manifest says {entry.rows:,}")
            if not shard.schema.equals(self.schema):
                stored, expected = (columns.to_string(show_field_metadata=False) for columns in (shard.schema, self.schema))
                raise damaged(path, f"has the columns {stored!r}, expected {expected!r}")
            yield shard

    def read_file(self, entry: FileEntry) -> bytes:
        """Read all bytes of a file in the manifest.

        Raises:
            DatasetError: the file is missing or damaged.
        """
        with self._open(entry) as file:
            data: bytes = file.read()
        self._check_digest(entry, data)
        return data

    def _open(self, entry: FileEntry) -> pa.NativeFile:
        path = self.folder.path_of(entry.path)
        try:
            file = self.folder.open(entry.path)
        except FileNotFoundError:
            raise DatasetError(
                f"{path} is listed in the manifest but missing: copy the whole folder again, or run the "
                "command that wrote it again, which writes only missing shards"
            ) from None
        if file.size() != entry.bytes:
            raise damaged(path, f"has {file.size():,} bytes, the manifest says {entry.bytes:,}")
        return file

    def _check_digest(self, entry: FileEntry, data: pa.Buffer | bytes) -> None:
        if sha256_of_bytes(data) != entry.sha256:
            raise damaged(self.folder.path_of(entry.path), "is damaged (its SHA-256 is not the one that the manifest lists)")

    def _fill(self, index: int, column: str, target: np.ndarray) -> None:
        """Copy one shard into the array by batches, which fit the processor's cache."""
        done = 0
        with self._open_shard(index) as shard:
            for batch in shard.batches([column], batch_rows(self.schema)):
                values = batch.column(0).flatten().to_numpy(zero_copy_only=True)
                target[done : done + len(batch)] = values.reshape(-1, target.shape[1])
                done += len(batch)


def dicts_of_rows(table: pa.Table, spec: FeatureSpec | None) -> Iterator[dict[str, Any]]:
    """Convert a table's rows to dicts; vectors are numpy arrays."""
    columns = {name: column_values(table[name], name, spec) for name in table.column_names}
    for row in range(len(table)):
        yield {name: column[row] for name, column in columns.items()}


def column_values(column: pa.ChunkedArray, name: str, spec: FeatureSpec | None) -> np.ndarray | list[object]:
    """Convert a column of this name.

    Returns:
        A read-only array ``(rows, *shape)`` for a column of vectors, a list of arrays ``(vectors, *shape)``
        for a variable number of vectors per row, and a list for any other column.
    """
    if pa.types.is_fixed_size_list(column.type):
        flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=True)
        return flat.reshape(len(column), *_vector_shape(name, column.type.list_size, spec))
    if spec is not None and is_vector(column.type):
        lists = column.combine_chunks()
        flat = lists.values.to_numpy(zero_copy_only=True)
        ends = lists.offsets.to_numpy()
        return [flat[start:end].reshape(-1, *spec.shape) for start, end in itertools.pairwise(ends.tolist())]
    return column.to_pylist()


def _vector_shape(name: str, width: int, spec: FeatureSpec | None) -> tuple[int, ...]:
    if name in ("feature", "features", "embedding") and spec is not None:
        return spec.shape
    return (width // 4, 4) if name == "boxes" else (width,)

"""Shards as Parquet files: their footer, and their rows within a limit of memory.

A later run recognises a finished shard by its footer alone: fingerprint, parameters and statistics.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.conversion import convert, stored_values
from schemas.errors import DatasetError
from schemas.failures import FailuresEntry
from schemas.fingerprints import FORMAT_VERSION, canonical_json, sha256_of_file, sha256_of_json
from schemas.manifest import ShardEntry, other_version
from schemas.storage.folder import Folder

_PREFIX = "imagepivot."
_MIN_LIMIT = 256 << 20
_MAX_EXPANSION = 16
_VALUE_BYTES = 8  # Upper bound for a value with its levels.


@dataclass(frozen=True)
class Footer:
    """Metadata in a shard's Parquet footer.

    Attributes:
        statistics: numbers about the shard's rows, summed over shards for the manifest.
        failures: the shard's failures.
    """

    kind: str
    fingerprint: str
    parameters: Mapping[str, Any]
    statistics: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 0
    failures: FailuresEntry = field(default_factory=FailuresEntry)
    version: int = FORMAT_VERSION


FOREIGN = Footer(kind="", fingerprint="", parameters={})
"""Placeholder for the footer of another tool's Parquet file."""


def footer_metadata(footer: Footer) -> dict[str, str]:
    """Return the key-value metadata of a shard; Parquet itself stores its rows."""
    content = {
        "version": str(footer.version),
        "kind": footer.kind,
        "fingerprint": footer.fingerprint,
        "parameters": canonical_json(footer.parameters),
        "statistics": canonical_json(footer.statistics),
        "failures": canonical_json(asdict(footer.failures)),
    }
    content["sha256"] = sha256_of_json(content)
    return {_PREFIX + key: text for key, text in content.items()}


def inspect_shard(folder: Folder, name: str) -> Footer | None:
    """Read a footer: `FOREIGN` for other tools' files, None if missing or damaged.

    Raises:
        DatasetError: the shard has version 1 of the format.
    """
    try:
        with folder.open(name) as file:
            metadata = pq.ParquetFile(file).metadata
        stored = {key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()}
    except (FileNotFoundError, ValueError, OverflowError, MemoryError, pa.ArrowException):
        return None
    except OSError:
        if not folder.is_local:
            raise  # The store, not the shard.
        return None  # A local file is mapped: parsing failed, not the disk.
    content = {key.removeprefix(_PREFIX): text for key, text in stored.items() if key.startswith(_PREFIX)}
    if not content:
        return FOREIGN
    digest = content.pop("sha256", None)
    if digest is None and content.get("version") == "1":
        raise DatasetError(f"{folder.path_of(name)} {other_version(1)}")
    if digest != sha256_of_json(content):
        return None  # Damage, not another dataset.
    try:
        return Footer(
            kind=content["kind"],
            fingerprint=content["fingerprint"],
            parameters=_read_parameters(content["parameters"]),
            statistics=convert(json.loads(content["statistics"]), dict, error=DatasetError),
            rows=metadata.num_rows,
            failures=FailuresEntry(**stored_values(FailuresEntry, json.loads(content["failures"]))),
            version=int(content["version"]),
        )
    except (KeyError, ValueError, RecursionError, DatasetError):
        return None


@lru_cache(maxsize=8)
def _read_parameters(text: str) -> Mapping[str, Any]:
    """Parse parameters; all shards of a dataset share one object."""
    return convert(json.loads(text), dict, error=DatasetError)


def shard_entry(file: pa.NativeFile, name: str, rows: int) -> ShardEntry:
    """Return the manifest's entry for an open shard, which is at its start."""
    footer = sha256_of_footer(file)
    return ShardEntry(path=name, bytes=file.size(), sha256=sha256_of_file(file), rows=rows, footer_sha256=footer)


def sha256_of_footer(file: pa.NativeFile) -> str:
    """Return the SHA-256 of a Parquet file from its metadata to its end, and rewind.

    The last eight bytes are the length of the metadata in front of them, and a magic number.
    """
    size = file.size()
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, size - 8 - length))
    digest = sha256_of_file(file)
    file.seek(0)
    return digest


def max_memory(file_size: int) -> int:
    """Return the bytes that a file may take in memory: 256 MiB and 16 times its size."""
    return _MIN_LIMIT + _MAX_EXPANSION * file_size


def check_expansion(size: int, file_size: int, path: str) -> None:
    """Refuse a file that takes more memory than `max_memory`."""
    if size > (limit := max_memory(file_size)):
        raise DatasetError(
            f"{path} takes more than {limit >> 20:,} MiB of memory ({_MIN_LIMIT >> 20} MiB and {_MAX_EXPANSION} times its size): "
            "do not use data of an unknown author; split your own into more files (--shards)"
        )


class ShardRows:
    """Rows of an open Parquet file within the limit of `max_memory`.

    A dictionary may expand 100 KB to gigabytes: text is read as dictionaries, and expanded only if it fits.
    The footer tells the size of everything else. Text that is not UTF-8 is an error if it is checked.
    """

    def __init__(self, source: pa.NativeFile, path: str, *, check_text: bool = True, **options: Any) -> None:
        plain = pq.ParquetFile(source)
        fields = [field.with_type(pa.string()) if field.type == pa.string_view() else field for field in plain.schema_arrow]
        self.metadata, self.schema = plain.metadata, pa.schema(fields, plain.schema_arrow.metadata)
        leaves = [self.metadata.schema.column(index) for index in range(self.metadata.num_columns)]
        self._paths = [leaf.path for leaf in leaves]
        self._texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        self._parquet = pq.ParquetFile(source, metadata=self.metadata, read_dictionary=self._texts, **options)
        self._check = partial(check_expansion, file_size=source.size(), path=path)
        self._check_text = check_text

    def read(self, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> pa.Table:
        """Read row groups, all by default; errors are those of `batches`."""
        return pa.Table.from_batches(self.batches(columns, groups=groups), self._schema_of(columns))

    def batches(
        self, columns: Sequence[str] | None = None, batch_size: int | None = None, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read row groups, all by default, in batches of a size or at once.

        The limit is that of a batch. Batches with lists of text end with their row group.

        Raises:
            DatasetError: they exceed the limit.
            ValueError, OSError, pa.ArrowException: they are damaged.
        """
        schema, groups = self._schema_of(columns), list(range(self.metadata.num_row_groups) if groups is None else groups)
        read = {index for index, path in enumerate(self._paths) if path.partition(".")[0] in schema.names}
        sizes = (self._size_of(group, read) for group in groups)
        self._check(max(sizes, default=0) if batch_size else sum(sizes))
        # Dictionaries of several texts in a row end with their row group.
        is_nested = any("." in self._paths[index] and self._paths[index] in self._texts for index in read)
        text = 0
        for part in [[group] for group in groups] if is_nested else [groups]:
            rows = sum(self.metadata.row_group(group).num_rows for group in part)
            size, done = rows if is_nested or not batch_size else batch_size, 0
            # Threads read one column each.
            for batch in self._parquet.iter_batches(max(1, size), part, schema.names, use_threads=len(read) > 1):
                if self._check_text:
                    batch.validate(full=True)
                text = sum(map(text_bytes, batch.columns)) + (0 if batch_size else text)
                self._check(text)
                done += batch.num_rows
                yield from pa.Table.from_batches([batch.cast(schema)]).to_batches(batch_size)
            if done != rows:
                raise ValueError(f"it has {done:,} rows, its footer says {rows:,}")

    def _size_of(self, group: int, columns: set[int]) -> int:
        chunks = map(self.metadata.row_group(group).column, columns)
        return sum(chunk.total_uncompressed_size + _VALUE_BYTES * chunk.num_values for chunk in chunks)

    def _schema_of(self, columns: Sequence[str] | None) -> pa.Schema:
        return self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])


def text_bytes(values: pa.Array) -> int:
    """Return the bytes of a column's text with its dictionaries expanded."""
    if pa.types.is_dictionary(values.type):
        # `take` checks the positions in the dictionary.
        return pc.sum(pc.binary_length(values.dictionary).take(values.indices)).as_py() or 0
    if not pa.types.is_nested(values.type):
        return 0
    parts = (values.keys, values.items) if pa.types.is_map(values.type) else values.flatten()
    return sum(map(text_bytes, (parts,) if isinstance(parts, pa.Array) else parts))

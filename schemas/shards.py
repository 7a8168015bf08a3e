"""Writing one shard, and reading what its footer says about it.

A shard appears under its name only when it is complete. Its footer carries the dataset's fingerprint, its parameters and
statistics of its rows, so that a run that starts again knows a finished shard from its file alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.fingerprints import SCHEMA_VERSION, Identity, canonical_json, sha256_of_file
from schemas.kinds import FAILURES
from schemas.manifest import ShardEntry
from schemas.storage import Folder

__all__ = ["Footer", "Rows", "failures_name", "finished_shard", "is_foreign", "read_footer", "shard_entry", "write_shard"]

_ROW_GROUP_BYTES = 4 << 20
_TEXT_ROW_GROUP_ROWS = 65_536

Rows: TypeAlias = pa.Table | pa.RecordBatch


@dataclass(frozen=True)
class Footer:
    """What a shard says about itself.

    Attributes:
        kind: kind of the dataset.
        fingerprint: of the dataset that the shard was made for.
        parameters: the dataset's parameters.
        statistics: numbers about the shard's rows, summed over shards for the manifest.
        rows: number of rows.
    """

    kind: str
    fingerprint: str
    parameters: Mapping[str, Any]
    statistics: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 0


def failures_name(shard: str) -> str:
    """Path of the failures that belong to a shard."""
    return f"failures/{shard}"


def _layout(schema: pa.Schema) -> tuple[dict[str, Any], int]:
    """Parquet options and rows a row group for a schema.

    Columns of vectors are stored plainly: dictionaries and statistics only cost time there, and compression halves the
    reader's speed for a third of the bytes. Measured on two cores, 20,000 x 2048 float32, best of three: items that are
    not nullable 1.0 to 1.75 GB/s against 0.4 to 0.9 nullable; row groups of 4 MiB 1.75 against 1.1 of 64 MiB;
    zstd 0.44, lz4 0.78, byte-stream-split with zstd 0.45. tests/benchmarks/bench_reading.py measures it again.
    """
    vectors = [f for f in schema if pa.types.is_fixed_size_list(f.type)]
    if not vectors:
        return {"compression": "zstd", "use_dictionary": True, "write_statistics": True}, _TEXT_ROW_GROUP_ROWS
    row_bytes = sum(f.type.list_size * f.type.value_type.bit_width // 8 for f in vectors)
    keys = [f.name for f in schema if f not in vectors]
    options = {"compression": "none", "use_dictionary": False, "write_statistics": keys}
    return options, max(64, _ROW_GROUP_BYTES // row_bytes)


def write_shard(
    folder: Folder,
    name: str,
    tables: Iterable[Rows],
    *,
    schema: pa.Schema,
    identity: Identity,
    statistics: Mapping[str, Any] | None = None,
    failures: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Writes a shard whole or not at all, a row group at a time.

    Args:
        folder: the dataset's folder.
        name: path of the shard within it.
        tables: the rows, already in the order of their keys; consumed lazily, so that memory holds about one row group.
        schema: schema of the rows.
        identity: identity of the dataset, for the footer.
        statistics: numbers about the rows, for the footer. It may be filled while ``tables`` is consumed.
        failures: rows of the shard's failures, for a kind that has them; likewise. They are published before the shard:
            a shard that is there has its failures beside it.
    """
    options, group_rows = _layout(schema)
    with folder.replace(name) as file:
        with pq.ParquetWriter(file, schema, version="2.6", **options) as writer:
            for group in _regroup(tables, schema, group_rows):
                writer.write_table(_canonical(group), row_group_size=group_rows)
            writer.add_key_value_metadata(_footer_metadata(identity, statistics or {}))
        if failures is not None:
            _write_failures(folder, failures_name(name), failures, identity)


def _footer_metadata(identity: Identity, statistics: Mapping[str, Any]) -> dict[str, str]:
    return {
        "imagepivot.version": str(SCHEMA_VERSION),
        "imagepivot.kind": identity.kind,
        "imagepivot.fingerprint": identity.fingerprint,
        "imagepivot.parameters": canonical_json(identity.parameters),
        "imagepivot.statistics": canonical_json(statistics),
    }


def _regroup(tables: Iterable[Rows], schema: pa.Schema, rows: int) -> Iterable[pa.Table]:
    """Cuts a stream of tables into tables of ``rows`` rows and a last shorter one: row groups must not depend on batches."""
    held: list[pa.Table] = []
    count = 0
    for part in tables:
        table = pa.Table.from_batches([part]) if isinstance(part, pa.RecordBatch) else part
        table = table.cast(schema) if table.schema != schema else table
        held.append(table)
        count += table.num_rows
        while count >= rows:
            merged = pa.concat_tables(held)
            yield merged.slice(0, rows)
            held, count = [merged.slice(rows)], count - rows
    if count:
        yield pa.concat_tables(held)


def _canonical(group: pa.Table) -> pa.Table:
    """One chunk a column, dictionaries in the order of first use: the bytes must not depend on how the rows arrived."""
    for number, field_ in enumerate(group.schema):
        if pa.types.is_dictionary(field_.type):
            plain = group.column(number).cast(field_.type.value_type).combine_chunks()
            group = group.set_column(number, field_, plain.dictionary_encode())
    return group.combine_chunks()


def _read_metadata(folder: Folder, name: str) -> pq.FileMetaData | None:
    """A shard's Parquet metadata, or None where there is no file, or one that is not whole."""
    try:
        with folder.open(name) as file:
            return pq.ParquetFile(file).metadata
    except (FileNotFoundError, ValueError, pa.ArrowNotImplementedError):  # ArrowInvalid is a ValueError.
        return None
    except OSError:
        if not folder.is_local:
            raise  # A store that does not answer says nothing about the shard.
        return None  # A local file is mapped: what fails is not the disk but making sense of the bytes.


def is_foreign(folder: Folder, name: str) -> bool:
    """Whether a file with the name of a shard is a whole Parquet file that somebody else made."""
    metadata = _read_metadata(folder, name)
    return metadata is not None and b"imagepivot.fingerprint" not in (metadata.metadata or {})


def read_footer(folder: Folder, name: str) -> Footer | None:
    """What a shard says about itself, or None where there is no file, or one that is not ours or not whole."""
    metadata = _read_metadata(folder, name)
    if metadata is None:
        return None
    try:
        pairs = {key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()}
        return Footer(
            kind=pairs["imagepivot.kind"],
            fingerprint=pairs["imagepivot.fingerprint"],
            parameters=json.loads(pairs["imagepivot.parameters"]),
            statistics=json.loads(pairs["imagepivot.statistics"]),
            rows=metadata.num_rows,
        )
    except (KeyError, ValueError):
        return None


def finished_shard(folder: Folder, name: str, identity: Identity) -> Footer | None:
    """The footer of a shard that an earlier run of the same identity finished, else None."""
    footer = read_footer(folder, name)
    return footer if footer is not None and footer.fingerprint == identity.fingerprint else None


def shard_entry(folder: Folder, name: str, footer: Footer) -> ShardEntry:
    """The manifest's entry for a finished shard: read again, so that the digest is that of the stored bytes."""
    with folder.open(name) as file:
        return ShardEntry(path=name, bytes=file.size(), sha256=sha256_of_file(file), rows=footer.rows)


def _write_failures(folder: Folder, name: str, failures: Sequence[Mapping[str, str]], identity: Identity) -> None:
    if not failures:
        folder.delete(name)  # Those of an earlier try.
        return
    table = pa.Table.from_pylist(sorted(failures, key=lambda row: row["key"]), schema=FAILURES)
    reasons = dict(Counter(row["reason"] for row in failures))
    write_shard(folder, name, [table], schema=FAILURES, identity=identity, statistics={"reasons": reasons})

"""Footer of a shard: fingerprint, parameters and statistics.

A later run recognises a finished shard by its footer alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.conversion import convert, stored_values
from schemas.errors import DatasetError
from schemas.failures import FailuresEntry
from schemas.fingerprints import FORMAT_VERSION, canonical_json, sha256_of_file, sha256_of_json
from schemas.manifest import ShardEntry, other_version
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import store_error_of

_PREFIX = "imagepivot."


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
    except FileNotFoundError:
        return None
    except (ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        if store_error_of(error):
            raise
        return None
    except OSError:
        if not folder.is_local:
            raise  # The store, not the shard.
        return None  # A local file is mapped: parsing failed, not the disk.
    try:
        stored = {key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()}
    except ValueError:
        return None
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
            parameters=convert(json.loads(content["parameters"]), dict, error=DatasetError),
            statistics=convert(json.loads(content["statistics"]), dict, error=DatasetError),
            rows=metadata.num_rows,
            failures=FailuresEntry(**stored_values(FailuresEntry, json.loads(content["failures"]))),
            version=int(content["version"]),
        )
    except (KeyError, ValueError, RecursionError, DatasetError):
        return None


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

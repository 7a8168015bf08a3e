"""Canonical JSON, digests and the fingerprint of a dataset."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

FORMAT_VERSION = 2
"""Version of names of files, manifest and footers. Readers refuse all others."""

SCHEMA_VERSION = 1
"""Version of keys and columns. It is part of every fingerprint."""


def canonical_json(value: object) -> str:
    """Return JSON with sorted keys, without white space and escapes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_of_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of a value, hexadecimal."""
    return sha256_of_bytes(canonical_json(value).encode())


def sha256_of_file(file: BinaryIO) -> str:
    """Return the SHA-256 of the rest of a binary file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def sum_digests(digests: Iterable[str]) -> str:
    """Return the sum of digests of lists modulo 2**256, 64 hexadecimal digits."""
    return f"{sum(int(digest, 16) for digest in digests) % (1 << 256):064x}"


def fingerprint_of(kind: str, parameters: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], shards: int) -> str:
    """Return the SHA-256 of all that determines a dataset's content."""
    content = {"kind": kind, "parameters": parameters, "inputs": list(inputs), "shards": shards}
    return sha256_of_json({"schema_version": SCHEMA_VERSION, **content})

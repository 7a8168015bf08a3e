"""Files of failures: JSON lines that other tools do not read as data."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from schemas.damage import content_errors
from schemas.escapes import redact, redact_address
from schemas.fingerprints import sha256_of_bytes
from schemas.kinds import FAILURES


@dataclass(frozen=True)
class FailuresEntry:
    """Counts of a shard's failures, and size and digest of their file."""

    rows: int = 0
    bytes: int = 0
    sha256: str = ""
    reasons: Mapping[str, int] = field(default_factory=dict)


def failures_name(shard: str) -> str:
    """Return the path of a shard's failures."""
    return f"_failures/{shard.removesuffix('.parquet')}.jsonl"


def failure_row(key: str, stage: str, reason: str, message: str, uri: str = "") -> dict[str, str]:
    """Return a row of kind ``failures``; its address and message have no passwords."""
    return {"key": key, "uri": redact_address(uri), "stage": stage, "reason": reason, "message": redact(message)}


def failures_content(failures: Iterable[Mapping[str, str]]) -> tuple[bytes, FailuresEntry]:
    """Return the sorted content of a file of failures, and its entry for the footer."""
    rows = sorted([row[column] for column in FAILURES.names] for row in failures)
    if not rows:
        return b"", FailuresEntry()
    lines = (json.dumps(dict(zip(FAILURES.names, row, strict=True)), ensure_ascii=False) for row in rows)
    data = "".join(f"{line}\n" for line in lines).encode()
    reasons = Counter(row[FAILURES.get_field_index("reason")] for row in rows)
    return data, FailuresEntry(len(rows), len(data), sha256_of_bytes(data), dict(sorted(reasons.items())))


def parse_failures(data: bytes, path: str) -> pa.Table:
    """Parse a file of failures.

    Raises:
        DatasetError: it is damaged.
    """
    with content_errors(path):
        *lines, rest = data.decode().split("\n")  # Not splitlines: an address may hold one of Unicode's line ends.
        if rest:
            raise ValueError("the last line has no end")
        try:
            rows = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a line is nested too deeply") from error
        columns = set(FAILURES.names)
        for row in rows:
            if not isinstance(row, dict) or row.keys() != columns or not all(isinstance(text, str) for text in row.values()):
                raise ValueError(f"a line is not an object of {', '.join(FAILURES.names)}, all of them text")
        return pa.Table.from_pylist(rows, schema=FAILURES)

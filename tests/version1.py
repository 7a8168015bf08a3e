"""Datasets in version 1 of the format, as imagepivot wrote them before: ``manifest.json``, failures as Parquet, no records."""

import hashlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FAILURE_COLUMNS = ("key", "uri", "stage", "reason", "message")


def as_version_1(folder: Path) -> None:
    """Turn a dataset of the current version into what version 1 would have written, in place."""
    manifest = json.loads((folder / "_manifest.json").read_text(encoding="utf-8"))
    manifest.pop("sha256", None)
    for entry in manifest["shards"]:
        path = folder / entry["path"]
        pairs = {key.decode(): value.decode() for key, value in pq.read_metadata(path).metadata.items()}
        pairs = {key: value for key, value in pairs.items() if key.startswith("imagepivot.")}
        del pairs["imagepivot.failures"], pairs["imagepivot.sha256"]
        pairs["imagepivot.version"] = "1"
        write(path, pq.ParquetFile(path).read(), pairs)
        entry.update(listed(folder, path))
        entry.pop("footer_sha256")
        rows = failures_of(folder, entry["path"])
        if rows:
            reasons = json.dumps({"reasons": Counter(row["reason"] for row in rows)})
            schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in FAILURE_COLUMNS])
            failed = folder / "failures" / entry["path"]
            failed.parent.mkdir(exist_ok=True)
            write(failed, pa.Table.from_pylist(rows, schema=schema), {**pairs, "imagepivot.statistics": reasons})
    for entry in manifest["files"]:
        new = folder / re.sub(r"^_(names/.*)", r"\1.txt", entry["path"]).removeprefix("_")
        new.parent.mkdir(exist_ok=True)
        (folder / entry["path"]).rename(new)
        entry["path"] = new.relative_to(folder).as_posix()
    manifest["version"] = 1
    manifest["failures"] = [
        {**listed(folder, path), "rows": pq.read_metadata(path).num_rows} for path in sorted((folder / "failures").glob("*"))
    ]
    text = json.dumps({"format": "imagepivot", **manifest}, sort_keys=True, indent=2, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")
    (folder / "_manifest.json").unlink()
    for name in (".records", "_failures", "_names", "_truecaser"):
        shutil.rmtree(folder / name, ignore_errors=True)


def failures_of(folder: Path, shard: str) -> list[dict[str, str]]:
    path = folder / "_failures" / Path(shard).with_suffix(".jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write(path: Path, table: pa.Table, footer: dict[str, str]) -> None:
    table = table.replace_schema_metadata(None)
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(footer)


def listed(folder: Path, path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"path": path.relative_to(folder).as_posix(), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

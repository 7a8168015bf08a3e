"""``imagepivot inspect --json``: what the tables show, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.datasets.inspection import described_columns, failures_by_reason, first_rows, is_untrained, stored_bytes
from pipelines.datasets.region_names import RegionNames, named_regions
from schemas.dataset import Dataset

__all__ = ["describe_json"]

_MOST_VALUES = 4


def describe_json(dataset: Dataset, *, rows: int = 5) -> dict[str, Any]:
    """Describe a dataset: parameters, inputs, columns, statistics, failures and sample rows.

    Args:
        dataset: the dataset.
        rows: number of sample rows, from the first shards that have any. Of a vector they have the first four values.
    """
    manifest = dataset.manifest
    return {
        "dataset": dataset.folder.location,
        "kind": manifest.kind,
        "rows": manifest.rows,
        "shards": len(manifest.shards),
        "bytes": stored_bytes(dataset),
        "fingerprint": manifest.fingerprint,
        "untrained": is_untrained(dataset),
        "parameters": manifest.parameters,
        "inputs": list(manifest.inputs),
        "libraries": manifest.libraries,
        "columns": described_columns(dataset),
        "statistics": manifest.statistics,
        "failed": manifest.failed,
        "failures": failures_by_reason(dataset),
        "first_rows": _first_rows(dataset, rows) if rows else [],
    }


def _first_rows(dataset: Dataset, rows: int) -> list[dict[str, Any]]:
    if dataset.kind == "regions":
        names, columns = RegionNames.of(dataset), [column.name for column in dataset.schema if column.name != "features"]
        return [_with_regions(row, names) for row in first_rows(dataset, rows, columns)]
    return [{name: _value(value) for name, value in row.items()} for row in first_rows(dataset, rows)]


def _with_regions(row: Mapping[str, Any], names: RegionNames) -> dict[str, Any]:
    regions = [{"label": region.text, "class_id": region.class_id, "box": region.xyxy} for region in named_regions(row, names)]
    return {name: row[name] for name in ("image_id", "width", "height", "num_regions")} | {"regions": regions}


def _value(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return {"first": value[:_MOST_VALUES], "length": len(value)}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return dict(value)
    return value

"""``imagepivot inspect``: a dataset as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipelines.datasets.region_names import RegionNames, named_regions
from schemas.dataset import Dataset
from schemas.fingerprints import canonical_json
from schemas.manifest import Manifest
from schemas.parameters import FeaturesParameters

__all__ = ["describe", "statistics_table"]

_MOST_TEXT = 60
_MOST_REGIONS = 4


def describe(dataset: Dataset, *, rows: int = 5) -> Group:
    """Describe a dataset: parameters, columns, statistics, failures and sample rows.

    Args:
        dataset: the dataset.
        rows: number of sample rows, from the first shards that have any.
    """
    parts = [_overview(dataset), _columns(dataset)]
    statistics = statistics_table(dataset.manifest)
    if statistics is not None:
        parts.append(statistics)
    if dataset.manifest.failed:
        parts.append(_failures(dataset, rows))
    if rows:
        parts.append(_sample_regions(dataset, rows) if dataset.kind == "regions" else _sample(dataset, rows))
    return Group(*(item for part in parts for item in (part, Text(""))))


def _overview(dataset: Dataset) -> Table:
    manifest = dataset.manifest
    table = Table(title=Text(dataset.folder.location), title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    if dataset.spec is not None and FeaturesParameters.from_json(manifest.parameters).untrained:
        table.add_row("note", Text("untrained: the weights are random, the features mean nothing", style="yellow"))
    sizes = sum(shard.bytes for shard in (*manifest.shards, *manifest.failures, *manifest.files))
    table.add_row("kind", manifest.kind)
    table.add_row("rows", f"{manifest.rows:,} in {len(manifest.shards):,} shards, {_size(sizes)}")
    table.add_row("fingerprint", manifest.fingerprint)
    for name, value in manifest.parameters.items():
        table.add_row(Text(name), Text(_value(value)))
    for entry in manifest.inputs[:6]:
        rest = {key: value for key, value in entry.items() if key != "name"}
        table.add_row(Text(f"from {entry.get('name', '')}".strip()), Text(_value(rest)))
    if len(manifest.inputs) > 6:
        table.add_row("from", f"{len(manifest.inputs) - 6} more files, all in the manifest")
    table.add_row("made with", Text(", ".join(f"{name} {version}" for name, version in manifest.libraries.items())))
    return table


def _columns(dataset: Dataset) -> Table:
    table = Table(title="columns", title_justify="left", title_style="bold")
    for heading in ("name", "type", "what it is"):
        table.add_column(heading)
    for column in dataset.schema:
        description = (column.metadata or {}).get(b"description", b"").decode()
        table.add_row(column.name, Text(_type(column.type)), Text(description))
    return table


def statistics_table(manifest: Manifest) -> Table | None:
    """Return the manifest's statistics in the form that suits its kind; None if there are none."""
    if not manifest.statistics:
        return None
    own = {"captions": _captions_table, "vocabulary": _vocabulary_table}
    try:
        return own[manifest.kind](manifest.statistics)
    except (KeyError, TypeError, AttributeError, ValueError):
        return _plain_table(manifest.statistics)  # Another kind, or a dataset that was not written by its command.


def _plain_table(statistics: Mapping[str, Any]) -> Table:
    table = Table(title="statistics", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in statistics.items():
        table.add_row(Text(name.replace("_", " ")), Text(f"{value:,}" if isinstance(value, int) else str(value)))
    return table


def _captions_table(statistics: Mapping[str, Any]) -> Table:
    table = Table(title="statistics", title_justify="left", title_style="bold")
    for heading in ("portion", "split", "language"):
        table.add_column(heading)
    for heading in ("captions", "tokens"):
        table.add_column(heading, justify="right")
    for key, counts in sorted(statistics["captions"].items()):
        portion, split, language = key.split("/")
        table.add_row(*map(Text, (portion, split, language)), f"{counts['captions']:,}", f"{counts['tokens']:,}")
    return table


def _vocabulary_table(statistics: Mapping[str, Any]) -> Table:
    languages = list(statistics["tokens"])
    table = Table(title="statistics", title_justify="left", title_style="bold")
    table.add_column("")
    for heading in (*languages, "sum", "union"):
        table.add_column(heading, justify="right")
    tokens = [f"{statistics['tokens'][language]:,}" for language in languages]
    table.add_row("tokens in the vocabulary", *tokens, f"{statistics['sum']:,}", f"{statistics['union']:,}")
    for name, label in (
        ("types", "different tokens counted"),
        ("singletons", "of them singletons"),
        ("occurrences", "occurrences counted"),
    ):
        table.add_row(label, *(f"{statistics[name][language]:,}" for language in languages), end_section=name == "occurrences")
    for row in languages[:-1]:
        overlap = (statistics["jaccard"].get(f"{row}/{column}") for column in languages)
        table.add_row(f"Jaccard with {row}", *("" if value is None else f"{value:.4f}" for value in overlap), style="dim")
    splits = sorted({split for shares in statistics["unknown"].values() for split in shares})
    table.add_section()
    for split in splits:
        shares = (statistics["unknown"].get(language, {}).get(split) for language in languages)
        table.add_row(f"<unk> in {split}", *("" if share is None else f"{share:.2%}" for share in shares))
    return table


def _failures(dataset: Dataset, rows: int) -> Table:
    table = Table(title=f"{dataset.manifest.failed:,} failures", title_justify="left", title_style="bold red")
    for heading in ("reason", "inputs", "first", "message"):
        table.add_column(heading, overflow="fold")
    failures = dataset.failures().to_pylist()
    for reason, count in sorted(dataset.manifest.failure_reasons.items()):
        first = next((row for row in failures if row["reason"] == reason), {"uri": "", "key": "", "message": ""})
        table.add_row(Text(reason), f"{count:,}", Text(first["uri"] or first["key"]), Text(first["message"]))
    return table


def _sample(dataset: Dataset, rows: int) -> Table:
    table = Table(title="first rows", title_justify="left", title_style="bold")
    for column in dataset.schema:
        table.add_column(column.name, overflow="fold")
    for row in _first_rows(dataset, rows):
        table.add_row(*(Text(_value(value)) for value in row.values()))
    return table


def _sample_regions(dataset: Dataset, rows: int) -> Table:
    table = Table(title="first rows", title_justify="left", title_style="bold")
    for heading in ("image_id", "pixels", "num_regions", "best regions: attribute, class, score, corners"):
        table.add_column(heading, overflow="fold")
    names = RegionNames.of(dataset)
    columns = [column.name for column in dataset.schema if column.name != "features"]
    for row in _first_rows(dataset, rows, columns):
        regions = [
            f"{region.text}  ({', '.join(f'{value:.0f}' for value in region.xyxy)})" for region in named_regions(row, names)
        ]
        more = [f"and {len(regions) - _MOST_REGIONS} more"] if len(regions) > _MOST_REGIONS else []
        size, shown = f"{row['width']}×{row['height']}", "\n".join(regions[:_MOST_REGIONS] + more)
        table.add_row(Text(row["image_id"]), size, str(row["num_regions"]), Text(shown))
    return table


def _first_rows(dataset: Dataset, rows: int, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield rows of the first shards that have any."""
    batches = dataset.batches(columns, batch_size=rows)
    return islice((row for batch in batches for row in batch.to_pylist()), rows)


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return f"[{', '.join(f'{number:.3f}' for number in value[:4])}, ...] {len(value)} values"
    if isinstance(value, list) and value and isinstance(value[0], str) and len(value) > 1:
        return _short(" ".join(value))
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return ", ".join(f"{key} {count:,}" for key, count in value)
    if isinstance(value, (Mapping, list)):
        return canonical_json(value) if value else "all" if isinstance(value, list) else ""
    return _short(value) if isinstance(value, str) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


def _type(dtype: pa.DataType) -> str:
    if pa.types.is_fixed_size_list(dtype):
        return f"{dtype.value_type}[{dtype.list_size}]"
    if pa.types.is_list(dtype):
        return f"list of {dtype.value_type}"
    if pa.types.is_map(dtype):
        return f"map of {dtype.key_type} to {dtype.item_type}"
    return str(dtype.value_type) if pa.types.is_dictionary(dtype) else str(dtype)


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")

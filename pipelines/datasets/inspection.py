"""``imagepivot inspect``: a dataset as tables for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipelines.datasets.region_names import RegionNames, named_regions
from pipelines.datasets.value_tables import add_values, cell, named_table
from schemas.dataset import Dataset
from schemas.escapes import escape_text
from schemas.fingerprints import canonical_json
from schemas.manifest import Manifest
from schemas.parameters import FeaturesParameters

__all__ = [
    "describe",
    "described_columns",
    "failures_by_reason",
    "failures_table",
    "first_rows",
    "is_untrained",
    "statistics_table",
    "stored_bytes",
]

_MOST_TEXT = 60
_MOST_REGIONS = 4
_MOST_INPUTS = 6
_NO_FAILURE = {"uri": "", "key": "", "message": ""}
_CAPTION_KINDS = ("captions", "encoded", "embeddings")
_KEY_OF_CAPTION = ("image_id", "language", "portion", "index", "split")


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
        parts.append(_failures(dataset))
    if rows:
        parts.append(_sample_regions(dataset, rows) if dataset.kind == "regions" else _sample(dataset, rows))
    return Group(*(item for part in parts for item in (part, Text(""))))


def _overview(dataset: Dataset) -> Table:
    manifest = dataset.manifest
    table = named_table(dataset.folder.location)
    if is_untrained(dataset):
        table.add_row("note", Text("untrained: the weights are random, the features mean nothing", style="yellow"))
    table.add_row("kind", manifest.kind)
    table.add_row("rows", f"{manifest.rows:,} in {len(manifest.shards):,} shards, {_size(stored_bytes(dataset))}")
    table.add_row("fingerprint", manifest.fingerprint)
    add_values(table, manifest.parameters, empty="all")
    for entry in manifest.inputs[:_MOST_INPUTS]:
        rest = {key: f"{value:,}" if key == "bytes" else value for key, value in entry.items() if key != "name"}
        add_values(table, {f"from {entry.get('name', '')}": rest})
    if len(manifest.inputs) > _MOST_INPUTS:
        table.add_row("from", f"{len(manifest.inputs) - _MOST_INPUTS} more files, all in the manifest")
    table.add_row("made with", cell(", ".join(f"{name} {version}" for name, version in manifest.libraries.items())))
    return table


def is_untrained(dataset: Dataset) -> bool:
    """Return whether a dataset holds features of a model with random weights."""
    return dataset.spec is not None and FeaturesParameters.from_json(dataset.manifest.parameters).untrained


def stored_bytes(dataset: Dataset) -> int:
    """Return the size of the files of a dataset."""
    manifest = dataset.manifest
    return sum(entry.bytes for entry in (*manifest.shards, *manifest.failures, *manifest.files))


def _columns(dataset: Dataset) -> Table:
    table = Table(title="columns", title_justify="left", title_style="bold")
    for heading in ("name", "type", "what it is"):
        table.add_column(heading, overflow="fold")
    for column in described_columns(dataset):
        table.add_row(*(cell(column[name]) for name in ("name", "type", "description")))
    return table


def described_columns(dataset: Dataset) -> list[dict[str, str]]:
    """Return name, type and description of the columns of a dataset."""
    return [
        {
            "name": column.name,
            "type": _type(column.type),
            "description": (column.metadata or {}).get(b"description", b"").decode(),
        }
        for column in dataset.schema
    ]


def statistics_table(manifest: Manifest) -> Table | None:
    """Return the manifest's statistics in the form that suits its kind; None if there are none."""
    if not manifest.statistics:
        return None
    own = {
        "captions": _captions_table,
        "vocabulary": _vocabulary_table,
        "word-vectors": _word_vectors_table,
        "token-features": _token_features_table,
    }
    try:
        return own[manifest.kind](manifest.statistics)
    except (KeyError, TypeError, AttributeError, ValueError):
        return _plain_table(manifest.statistics)  # Another kind, or a dataset that was not written by its command.


def _plain_table(statistics: Mapping[str, Any]) -> Table:
    table = Table(title="statistics", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right", overflow="fold")
    for name, value in statistics.items():
        add_values(table, {name.replace("_", " "): f"{value:,}" if isinstance(value, int) else value})
    return table


def _captions_table(statistics: Mapping[str, Any]) -> Table:
    table = Table(title="statistics", title_justify="left", title_style="bold")
    for heading in ("portion", "split", "language"):
        table.add_column(heading)
    for heading in ("captions", "tokens"):
        table.add_column(heading, justify="right")
    for key, counts in sorted(statistics["captions"].items()):
        portion, split, language = key.split("/")
        table.add_row(*map(cell, (portion, split, language)), f"{counts['captions']:,}", f"{counts['tokens']:,}")
    return table


def _vocabulary_table(statistics: Mapping[str, Any]) -> Table:
    languages = list(statistics["tokens"])
    table = Table(title="statistics", title_justify="left", title_style="bold")
    table.add_column("")
    for heading in (*languages, "sum", "union"):
        table.add_column(cell(heading), justify="right")
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
        table.add_row(cell(f"Jaccard with {row}"), *("" if value is None else f"{value:.4f}" for value in overlap), style="dim")
    splits = sorted({split for shares in statistics["unknown"].values() for split in shares})
    table.add_section()
    for split in splits:
        shares = (statistics["unknown"].get(language, {}).get(split) for language in languages)
        table.add_row(cell(f"<unk> in {split}"), *("" if share is None else f"{share:.2%}" for share in shares))
    reserved = statistics.get("reserved", {})
    for split in sorted({split for counts in reserved.values() for split in counts}):
        counts = (reserved.get(language, {}).get(split, 0) for language in languages)
        table.add_row(cell(f"reserved tokens in {split}"), *(f"{count:,}" for count in counts))
    return table


def _word_vectors_table(statistics: Mapping[str, Any]) -> Table:
    table = Table(title="statistics", title_justify="left", title_style="bold")
    table.add_column("")
    for language in statistics:
        table.add_column(cell(language), justify="right", overflow="fold")
    of_languages = tuple(statistics.values())
    table.add_row("words in the file", *(f"{one['file_words']:,}" for one in of_languages))
    for name, label in (("types", "words of the vocabulary"), ("occurrences", "their occurrences")):
        table.add_section()
        table.add_row(label, *(f"{one[name]:,}" for one in of_languages))
        found = ((one[f"{name}_found"], one[name]) for one in of_languages)
        table.add_row("with a vector", *(f"{count:,} ({count / every:.2%})" for count, every in found))
    table.add_row("in lower case only", *(f"{one['types_in_lower_case']:,}" for one in of_languages), style="dim")
    table.add_section()
    missing = (sorted(one["most_frequent_missing"].items(), key=lambda item: (-item[1], item[0])) for one in of_languages)
    listed = ("\n".join(f"{escape_text(token)} {count:,}" for token, count in one) for one in missing)
    table.add_row("without, most frequent", *map(Text, listed))
    return table


def _token_features_table(statistics: Mapping[str, Any]) -> Table:
    table = Table(title="statistics", title_justify="left", title_style="bold")
    table.add_column("")
    of_languages = [counts for _, counts in sorted(statistics.items())]
    for language in sorted(statistics):
        table.add_column(cell(language), justify="right")
    for name, label in (("captions", "captions"), ("tokens", "tokens"), ("sub_words", "sub-words")):
        table.add_row(label, *(f"{counts[name]:,}" for counts in of_languages))
    table.add_row(
        "of a token", *(f"{counts['sub_words'] / max(1, counts['tokens']):.2f}" for counts in of_languages), style="dim"
    )
    unknown = (counts["unknown_sub_words"] / max(1, counts["sub_words"]) for counts in of_languages)
    table.add_row("unknown", *(f"{share:.2%}" for share in unknown), style="dim", end_section=True)
    for name, label in (("captions_cut", "captions cut"), ("captions_in_parts", "captions read in parts")):
        table.add_row(label, *(f"{counts[name]:,}" for counts in of_languages))
    return table


def _failures(dataset: Dataset) -> Table:
    table = Table(title=f"{dataset.manifest.failed:,} failures", title_justify="left", title_style="bold red")
    for heading in ("reason", "inputs", "first", "message"):
        table.add_column(heading, overflow="fold")
    for entry in failures_by_reason(dataset):
        first = entry["first"]
        table.add_row(*map(cell, (entry["reason"], f"{entry['inputs']:,}", first["uri"] or first["key"], first["message"])))
    table.caption = f"all of them: imagepivot inspect {escape(shlex.quote(dataset.folder.location))} --failures"
    return table


def failures_by_reason(dataset: Dataset) -> list[dict[str, Any]]:
    """Return reason, number of inputs and the first failure of each reason, sorted by reason."""
    failures = dataset.failures().to_pylist() if dataset.manifest.failed else []
    return [
        {"reason": reason, "inputs": count, "first": next((row for row in failures if row["reason"] == reason), _NO_FAILURE)}
        for reason, count in sorted(dataset.manifest.failure_reasons.items())
    ]


def failures_table(dataset: Dataset) -> Table:
    """Return all failures of a dataset."""
    table = Table(title=f"{dataset.manifest.failed:,} failures", title_justify="left", title_style="bold red")
    for heading in ("key", "reason", "uri", "message"):
        table.add_column(heading, overflow="fold")
    for row in dataset.failures().to_pylist():
        table.add_row(*(cell(row[name]) for name in ("key", "reason", "uri", "message")))
    return table


def _sample(dataset: Dataset, rows: int) -> Table:
    """Return the first rows, with the values that make up the key of a caption in one column."""
    table = Table(title="first rows", title_justify="left", title_style="bold", show_lines=dataset.kind in _CAPTION_KINDS)
    names = [column.name for column in dataset.schema]
    together = [name for name in names if name in _KEY_OF_CAPTION] if dataset.kind in _CAPTION_KINDS else []
    rest = [name for name in names if name not in together]
    if together:
        table.add_column(", ".join(together), overflow="fold", max_width=32)
    for name in rest:
        table.add_column(name, overflow="fold")
    for row in first_rows(dataset, rows):
        key = [Text("\n".join(escape_text(str(row[name])) for name in together))] if together else []
        table.add_row(*key, *(cell(_value(row[name])) for name in rest))
    return table


def _sample_regions(dataset: Dataset, rows: int) -> Table:
    table = Table(title="first rows", title_justify="left", title_style="bold")
    for heading in ("image_id", "pixels", "num_regions", "best regions: attribute, class, score, corners"):
        table.add_column(heading, overflow="fold")
    names = RegionNames.of(dataset)
    columns = [column.name for column in dataset.schema if column.name != "features"]
    for row in first_rows(dataset, rows, columns):
        regions = [
            f"{region.text}  ({', '.join(f'{value:.0f}' for value in region.xyxy)})" for region in named_regions(row, names)
        ]
        more = [f"and {len(regions) - _MOST_REGIONS} more"] if len(regions) > _MOST_REGIONS else []
        size, shown = f"{row['width']}×{row['height']}", "\n".join(map(escape_text, regions[:_MOST_REGIONS] + more))
        table.add_row(cell(row["image_id"]), size, str(row["num_regions"]), Text(shown))
    return table


def first_rows(dataset: Dataset, rows: int, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
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
        return canonical_json(value) if value else ""
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

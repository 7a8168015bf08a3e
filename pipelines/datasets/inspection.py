"""``imagepivot inspect``: a dataset as tables, and as JSON values."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from rich.filesize import pick_unit_and_suffix

from pipelines.datasets.region_names import RegionNames, named_regions
from schemas.console.tables import Cell, Column, Row, Table, number_columns
from schemas.dataset import Dataset
from schemas.escapes import counted, redact
from schemas.fingerprints import canonical_json
from schemas.manifest import Manifest
from schemas.parameters import untrained_remark
from schemas.vocabulary import SPECIALS, UNK

_MAX_TEXT = 60
_MAX_REGIONS = 4
_MAX_INPUTS = 6
_MAX_VALUES = 4
_NO_FAILURE = {"uri": "", "key": "", "message": ""}
_CAPTION_KINDS = ("captions", "encoded", "embeddings")
_KEY_OF_CAPTION = ("image_id", "language", "portion", "index", "split")
_FLOATS = (float, np.floating)  # Older versions of pyarrow convert float16 to NumPy's.


def describe_dataset(dataset: Dataset, *, rows: int = 5) -> list[Table]:
    """Describe parameters, columns, statistics, failures and first rows as tables."""
    columns = [tuple(column.values()) for column in _column_rows(dataset)]
    sample = _sample_regions if dataset.kind == "regions" else _sample
    return [
        Table(("", ""), list(_overview(dataset)), dataset.folder.location, has_borders=True),
        Table(("name", "type", "description"), columns, "columns", has_borders=True),
        *statistics_tables(dataset.manifest),
        _reasons_table(dataset),
        *([sample(dataset, rows)] if rows else []),
    ]


def describe_json(dataset: Dataset, *, rows: int = 5) -> dict[str, Any]:
    """Describe a dataset as JSON; vectors have only their first four values."""
    manifest = dataset.manifest
    return {
        "dataset": redact(dataset.folder.location),
        "kind": manifest.kind,
        "rows": manifest.rows,
        "shards": len(manifest.shards),
        "bytes": _stored_bytes(manifest),
        "fingerprint": manifest.fingerprint,
        "untrained": bool(dataset.untrained),
        "parameters": manifest.parameters,
        "inputs": list(manifest.inputs),
        "libraries": manifest.libraries,
        "notes": manifest.notes,
        "columns": _column_rows(dataset),
        "statistics": manifest.statistics,
        "failed": manifest.failed,
        "failures": _failures_by_reason(dataset),
        "first_rows": list(_first_json(dataset, rows)) if rows else [],
    }


def _overview(dataset: Dataset) -> Iterator[Row]:
    manifest = dataset.manifest
    if note := untrained_remark(dataset.untrained):
        yield _cyan("note"), Cell(note, style="yellow")
    yield _cyan("kind"), manifest.kind
    size = _stored_bytes(manifest)
    unit, suffix = pick_unit_and_suffix(size, ["bytes", "KiB", "MiB", "GiB"], 1024)
    size_text = f"{size / unit:,.{int(unit > 1)}f} {suffix}"
    yield _cyan("rows"), f"{manifest.rows:,} in {counted(len(manifest.shards), 'shard')}, {size_text}"
    yield _cyan("fingerprint"), manifest.fingerprint
    yield from value_rows(manifest.parameters, empty="all")
    for entry in manifest.inputs[:_MAX_INPUTS]:
        values = {key: f"{value:,}" if key == "bytes" else value for key, value in entry.items() if key != "name"}
        yield from value_rows({f"from {entry.get('name', '')}": values})
    if len(manifest.inputs) > _MAX_INPUTS:
        yield _cyan("from"), f"{len(manifest.inputs) - _MAX_INPUTS} more files, all in the manifest"
    yield _cyan("made with"), ", ".join(f"{name} {version}" for name, version in manifest.libraries.items())
    if manifest.notes:
        yield from value_rows({"notes": manifest.notes})


def value_rows(values: Mapping[str, Any], *, empty: str = "none", depth: int = 0) -> Iterator[Row]:
    """Yield a row for each JSON value; the values of a mapping are indented."""
    for name, value in values.items():
        label = _cyan("  " * depth + name)
        if isinstance(value, Mapping):
            yield label, "" if value else "none"
            yield from value_rows(value, empty=empty, depth=depth + 1)
        else:
            yield label, _plain_text(value, empty)


def _cyan(text: str) -> Cell:
    return Cell(text, style="cyan")


def _plain_text(value: Any, empty: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        is_flat = not any(isinstance(item, (list, tuple, Mapping)) for item in value)
        return ", ".join(_plain_text(item, empty) for item in value) or empty if is_flat else canonical_json(value)
    return "" if value is None else str(value)


def _stored_bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in (*manifest.shards, *manifest.failures, *manifest.files))


def _column_rows(dataset: Dataset) -> list[dict[str, str]]:
    return [
        {"name": column.name, "type": _type(column.type), "description": column.metadata[b"description"].decode()}
        for column in dataset.schema
    ]


def statistics_tables(manifest: Manifest) -> list[Table]:
    """Return the manifest's statistics, in a form by its kind."""
    forms = {
        "captions": _caption_statistics,
        "vocabulary": _vocabulary_statistics,
        "word-vectors": _word_vector_statistics,
        "token-features": _token_feature_statistics,
        "embeddings": _sentence_statistics,
    }
    try:
        return forms[manifest.kind if manifest.statistics else ""](manifest.statistics)
    except (KeyError, TypeError, AttributeError, ValueError):  # Another kind, or a dataset of another program.
        named = {name.replace("_", " "): value for name, value in manifest.statistics.items()}
        values = {name: f"{value:,}" if isinstance(value, int) else value for name, value in named.items()}
        return [_statistics_table(["", Column("", "")], list(value_rows(values)))]


def _statistics_table(columns: Sequence[Column | str], rows: Sequence[Row]) -> Table:
    return Table(columns, rows, "statistics", has_borders=True)


def _caption_statistics(statistics: Mapping[str, Any]) -> list[Table]:
    rows: list[Row] = []
    for key, counts in sorted(statistics["captions"].items()):
        portion, split, language = key.split("/")
        rows.append((portion, split, language, f"{counts['captions']:,}", f"{counts['tokens']:,}"))
    return [_statistics_table(["portion", "split", "language", *number_columns("captions", "tokens")], rows)]


def _vocabulary_statistics(statistics: Mapping[str, Any]) -> list[Table]:
    """Return counts by language, shares of unknown tokens, and overlaps."""
    languages, jaccard, reserved = list(statistics["tokens"]), statistics["jaccard"], statistics.get("reserved", {})
    names = ("tokens", "types", "singletons", "occurrences")
    counted_tokens = [(language, *_counts(statistics[name][language] for name in names)) for language in languages]
    totals = [("sum", f"{statistics['sum']:,}"), ("union", f"{statistics['union']:,}")]
    unknown: list[Row] = []
    for language, shares in statistics["unknown"].items():
        counts = reserved.get(language, {})
        unknown += [(language, split, f"{share:.2%}", counts.get(split)) for split, share in sorted(shares.items())]
    overlaps = [
        (language, *(jaccard.get(f"{other}/{language}") for other in languages[:index]))
        for index, language in enumerate(languages)
    ]
    columns = ["language", "split", *number_columns(SPECIALS[UNK]), *number_columns("reserved tokens", spec=",")]
    width = len(columns) if reserved else len(columns) - 1
    return [
        _statistics_table(["language", *number_columns(*names)], [*counted_tokens, (), *totals]),
        Table(columns[:width], [row[:width] for row in unknown], "unknown tokens", has_borders=True),
        Table(["", *number_columns(*languages[:-1], spec=".1%")], overlaps[1:], "Jaccard"),
    ]


def _word_vector_statistics(statistics: Mapping[str, Any]) -> list[Table]:
    languages = tuple(statistics.values())
    rows: list[Row] = [("words in the file", *_counts(counts["file_words"] for counts in languages))]
    for name, label in (("types", "words of the vocabulary"), ("occurrences", "their occurrences")):
        pairs = ((counts[f"{name}_found"], counts[name]) for counts in languages)
        rows += [(), (label, *_counts(counts[name] for counts in languages))]
        rows.append(("with a vector", *(f"{count:,} ({count / total:.2%})" for count, total in pairs)))
    rows += [_dim("in lower case only", *_counts(counts["types_in_lower_case"] for counts in languages)), ()]
    missing = (sorted(counts["most_frequent_missing"].items(), key=lambda item: (-item[1], item[0])) for counts in languages)
    rows.append(("without, most frequent", *(tuple(f"{token} {count:,}" for token, count in words) for words in missing)))
    return [_statistics_table(["", *number_columns(*statistics)], rows)]


def _sentence_statistics(statistics: Mapping[str, Any]) -> list[Table]:
    """Return counts by language; those of a run's embeddings have another form."""
    rows = [
        (language, counts["captions"], max(map(int, counts["lengths"])), counts["captions_cut"])
        for language, counts in sorted(statistics.items())
    ]
    return [_statistics_table(["language", *number_columns("captions", "longest, sub-words", "captions cut", spec=",")], rows)]


def _token_feature_statistics(statistics: Mapping[str, Any]) -> list[Table]:
    languages = [counts for _, counts in sorted(statistics.items())]
    parts = (counts["sub_words"] / max(1, counts["tokens"]) for counts in languages)
    unknown = (counts["unknown_sub_words"] / max(1, counts["sub_words"]) for counts in languages)
    rows: list[Row] = []
    for name in ("captions", "tokens", "sub_words", "captions_cut", "captions_in_parts"):
        label = {"sub_words": "sub-words", "captions_in_parts": "captions read in parts"}.get(name, name.replace("_", " "))
        rows.append((label, *_counts(counts[name] for counts in languages)))
    rows.insert(3, _dim("of a token", *(f"{part:.2f}" for part in parts)))
    rows.insert(4, _dim("unknown", *(f"{share:.2%}" for share in unknown)))
    rows.insert(5, ())
    return [_statistics_table(["", *number_columns(*sorted(statistics))], rows)]


def _counts(counts: Iterable[int]) -> list[str]:
    return [f"{count:,}" for count in counts]


def _dim(*values: str | None) -> Row:
    return [Cell(value, style="dim") for value in values]


def failures_table(dataset: Dataset) -> Table:
    """Return all failures of a dataset."""
    names = ("key", "reason", "uri", "message")
    failures = dataset.failures().select(names).to_pylist()
    return Table(names, [tuple(row.values()) for row in failures], f"{dataset.manifest.failed:,} failures", has_borders=True)


def _reasons_table(dataset: Dataset) -> Table:
    rows = [
        (entry["reason"], entry["inputs"], entry["first"]["uri"] or entry["first"]["key"], entry["first"]["message"])
        for entry in _failures_by_reason(dataset)
    ]
    note = f"all of them: imagepivot inspect {shlex.quote(dataset.folder.location)} --failures"
    columns = ("reason", Column("inputs", ","), "first", "message")
    return Table(columns, rows, f"{dataset.manifest.failed:,} failures", [note], has_borders=True)


def _failures_by_reason(dataset: Dataset) -> list[dict[str, Any]]:
    """Return reason, number of inputs and first failure, sorted by reason."""
    failures = dataset.failures().to_pylist() if dataset.manifest.failed else []
    return [
        {"reason": reason, "inputs": count, "first": next((row for row in failures if row["reason"] == reason), _NO_FAILURE)}
        for reason, count in sorted(dataset.manifest.failure_reasons.items())
    ]


def _sample(dataset: Dataset, count: int) -> Table:
    """Return the first rows, with the key of a caption in one column."""
    names = [column.name for column in dataset.schema]
    key_names = [name for name in names if name in _KEY_OF_CAPTION] if dataset.kind in _CAPTION_KINDS else []
    others = [name for name in names if name not in key_names]
    rows: list[Row] = []
    for row in _first_rows(dataset, count):
        key = [tuple(str(row[name]) for name in key_names)] if key_names else []
        rows += [*([()] if key and rows else []), (*key, *(_value(row[name]) for name in others))]
    return Table([*([", ".join(key_names)] if key_names else []), *others], rows, "first rows", has_borders=True)


def _sample_regions(dataset: Dataset, count: int) -> Table:
    names = RegionNames.of(dataset)
    rows: list[Row] = []
    for row in _first_rows(dataset, count):
        regions = [
            f"{region.text}  ({', '.join(f'{value:.0f}' for value in region.xyxy)})" for region in named_regions(row, names)
        ]
        if len(regions) > _MAX_REGIONS:
            regions[_MAX_REGIONS:] = [f"and {len(regions) - _MAX_REGIONS} more"]
        rows.append((row["image_id"], f"{row['width']}×{row['height']}", str(row["num_regions"]), tuple(regions)))
    headings = ("image_id", "pixels", "num_regions", "best regions: attribute, class, score, corners")
    return Table(headings, rows, "first rows", has_borders=True)


def _first_json(dataset: Dataset, count: int) -> Iterator[dict[str, Any]]:
    if dataset.kind != "regions":
        for row in _first_rows(dataset, count):
            yield {name: _json_value(value) for name, value in row.items()}
        return
    names = RegionNames.of(dataset)
    for row in _first_rows(dataset, count):
        regions = [
            {"label": region.text, "class_id": region.class_id, "box": region.xyxy} for region in named_regions(row, names)
        ]
        yield {name: row[name] for name in ("image_id", "width", "height", "num_regions")} | {"regions": regions}


def _first_rows(dataset: Dataset, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows, without the features of regions."""
    columns = [column.name for column in dataset.schema if column.name != "features"]
    batches = dataset.batches(columns, batch_size=count)
    return islice((row for batch in batches for row in batch.to_pylist()), count)


def _json_value(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], _FLOATS):
        return {"first": [float(item) for item in value[:_MAX_VALUES]], "length": len(value)}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return dict(value)
    return value


def _value(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, _FLOATS):
        return f"[{', '.join(f'{number:.3f}' for number in value[:_MAX_VALUES])}, ...] {len(value)} values"
    if isinstance(first, str) and len(value) > 1:
        return elide(" ".join(value))
    if isinstance(first, tuple):
        return ", ".join(f"{key} {count:,}" for key, count in value)
    if isinstance(value, (Mapping, list)):
        return canonical_json(value) if value else ""
    return elide(value) if isinstance(value, str) else str(value)


def elide(text: str) -> str:
    """Shorten a text to at most 60 characters, with an ellipsis."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _type(dtype: pa.DataType) -> str:
    if pa.types.is_fixed_size_list(dtype):
        return f"{dtype.value_type}[{dtype.list_size}]"
    if pa.types.is_list(dtype):
        return f"list of {dtype.value_type}"
    if pa.types.is_map(dtype):
        return f"map of {dtype.key_type} to {dtype.item_type}"
    return str(dtype.value_type) if pa.types.is_dictionary(dtype) else str(dtype)

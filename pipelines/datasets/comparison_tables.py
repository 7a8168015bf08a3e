"""A comparison of two datasets, as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipelines.datasets.comparison import Comparison, VectorDifference
from pipelines.datasets.value_tables import add_values, cell, named_table
from schemas.fingerprints import canonical_json
from schemas.keys import normalization_hint

__all__ = ["comparison_table"]

_MOST_TEXT = 60


def comparison_table(comparison: Comparison) -> Group:
    """Return a comparison as tables for a terminal."""
    parts = [_overview(comparison)]
    if comparison.vectors:
        parts.append(_vector_table(comparison))
    if comparison.parameters:
        parts.append(_parameter_table(comparison))
    return Group(*(item for part in parts for item in (part, Text(""))))


def _overview(comparison: Comparison) -> Table:
    table = Table(title=f"{comparison.kind}: rows", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("rows", justify="right")
    table.add_column("the first", overflow="fold")
    table.add_row("in A", f"{comparison.rows_a:,}", "")
    table.add_row("in B", f"{comparison.rows_b:,}", "")
    table.add_row("in both", f"{comparison.common:,}", "")
    for label, sample in (
        ("only in A", comparison.missing_in_b),
        ("only in B", comparison.missing_in_a),
        ("in both, with a difference", comparison.differing),
    ):
        more = ", ..." if sample.count > len(sample.first) else ""
        table.add_row(label, f"{sample.count:,}", cell(", ".join(sample.first) + more))
    if hint := normalization_hint(comparison.missing_in_b.first, comparison.missing_in_a.first):
        table.add_row("", "", cell(hint, "yellow"))
    for name, count in comparison.columns.items():
        if count:
            table.add_row(cell(f"  {name} differs"), f"{count:,}", "")
    if comparison.incomparable:
        table.add_row("values not compared", "", cell(comparison.incomparable, "yellow"))
    return table


def _vector_table(comparison: Comparison) -> Table:
    """Return a row for each number: columns side by side would be too narrow to read."""
    table = named_table("values")
    for column in comparison.vectors:
        key = f" ({column.largest_key})" if column.largest_key else ""
        cosines = {}
        if column.cosine_mean is not None:
            cosines = {"mean cosine": f"{column.cosine_mean:.9f}", "least cosine": _least_cosine(column)}
        numbers = {
            "rows that differ": f"{column.rows:,}",
            "largest difference": f"{column.largest:.3g}{key}",
            "... of the largest value": f"{column.relative:.3g}",
            "mean difference": f"{column.mean:.3g}",
            **cosines,
        }
        add_values(table, {column.column: numbers})
    return table


def _least_cosine(difference: VectorDifference) -> str:
    if difference.cosine_least is None:
        return ""
    return f"{difference.cosine_least:.9f}{f' ({difference.cosine_least_key})' if difference.rows else ''}"


def _parameter_table(comparison: Comparison) -> Table:
    table = Table(title="parameters and inputs that differ", title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    table.add_column("A", overflow="fold")
    table.add_column("B", overflow="fold")
    for parameter in comparison.parameters:
        table.add_row(cell(parameter.path), *(cell(_short(value)) for value in (parameter.a, parameter.b)))
    return table


def _short(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"

"""Nested values as rows of a table: one value per row, indented under the names that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from schemas.escapes import escape_text
from schemas.fingerprints import canonical_json

__all__ = ["add_values", "cell", "named_table", "value_rows"]


def value_rows(name: str, value: Any, *, empty: str = "none", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield a value as pairs of a name and a text.

    Args:
        name: name of the value.
        value: JSON value; a mapping takes a row for each of its values below that of its own name.
        empty: text for an empty list.
        depth: how deep the name is indented.
    """
    label = "  " * depth + name
    if isinstance(value, Mapping):
        yield label, "" if value else "none"
        for key, item in value.items():
            yield from value_rows(key, item, empty=empty, depth=depth + 1)
    else:
        yield label, _text(value, empty)


def _text(value: Any, empty: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        plain = not any(isinstance(item, (list, tuple, Mapping)) for item in value)
        return ", ".join(_text(item, empty) for item in value) or empty if plain else canonical_json(value)
    return "" if value is None else str(value)


def named_table(title: str) -> Table:
    """Return an empty table of names and values; no value is cut, however narrow the terminal is."""
    table = Table(title=cell(title), title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def add_values(table: Table, values: Mapping[str, Any], *, empty: str = "none") -> None:
    """Add rows for named values, see `value_rows`."""
    for name, value in values.items():
        for label, text in value_rows(name, value, empty=empty):
            table.add_row(cell(label), cell(text))


def cell(text: str, style: str = "") -> Text:
    """Return text of data for a table: it is no markup, and control characters are escapes before the table is laid out."""
    return Text(escape_text(text), style=style)

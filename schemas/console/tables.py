"""Tables of commands and reports: on a terminal, as Markdown, JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from schemas.escapes import escape_text, to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Value: TypeAlias = str | int | float | tuple[str, ...] | None
"""Text, a number, lines of text, or None."""

ABSENT = "–"
"""Text for a missing number."""

_ANY_WIDTH = 10_000


@dataclass(frozen=True)
class Cell:
    """Value of a `Table` with a reference value or a style.

    Attributes:
        reference: value in brackets, e.g. of chance; not in JSON and CSV.
        style: style on a terminal, e.g. ``dim``.
    """

    value: Value
    reference: Value = None
    style: str = ""


Row: TypeAlias = Sequence[Value | Cell]
"""Cells from the left; missing cells are empty. An empty row is a separator."""


@dataclass(frozen=True)
class Column:
    """Column of a `Table`.

    Attributes:
        heading: its heading, and its key in JSON.
        format: format of its right-aligned numbers, e.g. ``,`` or ``.1f``; None for text.
    """

    heading: str
    format: str | None = None

    def text(self, value: Value) -> str:
        """Format a value, with control characters escaped."""
        if isinstance(value, tuple):
            return "\n".join(map(escape_text, value))
        if isinstance(value, int | float):
            return format(value, self.format or "")
        return "" if value is None else escape_text(value)


def number_columns(*headings: str, spec: str = "") -> list[Column | str]:
    """Return number columns with a common format."""
    return [Column(heading, spec) for heading in headings]


@dataclass(frozen=True)
class Table:
    r"""Rows below headings.

    >>> table = Table(["image", *number_columns("score", spec=".2f")], [("a|b.jpg", 0.5)])
    >>> print(table.to_markdown())
    | image | score |
    | --- | ---: |
    | a\|b.jpg | 0.50 |

    Attributes:
        columns: the columns; a text column may be its heading.
        notes: explanations, one line each.
        has_borders: whether lines separate the cells on a terminal, for long text.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Row]
    title: str = ""
    notes: Sequence[str] = ()
    has_borders: bool = False

    @property
    def headings(self) -> list[str]:
        """Headings of the columns."""
        return [column.heading for column in self._columns]

    @property
    def values(self) -> list[list[Value]]:
        """Values without references and separators."""
        return [[cell.value for cell in self._cells(row)] for row in self.rows if row]

    @property
    def texts(self) -> list[list[str]]:
        """Formatted values with their references, without separators."""
        return [[self._text(*cell) for cell in zip(self._columns, self._cells(row), strict=True)] for row in self.rows if row]

    @property
    def are_numbers(self) -> list[bool]:
        """Whether each column has numbers."""
        return [column.format is not None for column in self._columns]

    def to_markdown(self) -> str:
        """Return the table with its title and notes as Markdown."""
        rule = ["---:" if is_number else "---" for is_number in self.are_numbers]
        rows = [list(map(_markdown, row)) for row in self.texts]
        lines = [[_markdown(escape_text(heading, lines=True)) for heading in self.headings], rule, *rows]
        table = [f"| {' | '.join(line)} |" for line in lines]
        title = [f"## {escape_text(self.title)}"] if self.title else []
        return "\n\n".join([*title, *_note_list(self.notes), "\n".join(table) if rows else "None."])

    def to_json(self) -> str:
        """Return a JSON list of rows, without columns with empty headings."""
        rows = [{key: value for key, value in zip(self.headings, row, strict=True) if key} for row in self.values]
        return to_json(rows, indent=2)

    def to_csv(self) -> str:
        """Return headings and values as CSV."""
        rows = [["\n".join(value) if isinstance(value, tuple) else value for value in row] for row in self.values]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *rows])
        return text.getvalue()

    def render(self, console: Console) -> None:
        """Print the table on a terminal of any width without truncation."""
        from rich import box
        from rich.table import Table as Grid
        from rich.text import Text

        def grid(gap: int) -> Grid:
            grid = Grid(
                title=Text(escape_text(self.title), "bold") if self.title else None,
                title_justify="left",
                caption=Text("\n".join(map(escape_text, self.notes)), "table.caption") if self.notes else None,
                caption_justify="left",
                show_header=any(self.headings),
                box=box.HEAVY_HEAD if self.has_borders else None,
                padding=(0, 1) if self.has_borders else (0, gap, 0, 0),
                pad_edge=self.has_borders,
            )
            for column in self._columns:
                grid.add_column(
                    Text(escape_text(column.heading, lines=True)),
                    justify="left" if column.format is None else "right",
                    overflow="fold",
                    vertical="bottom" if any("\n" in heading for heading in self.headings) else "top",
                )
            for row in self.rows:
                if not row and self.has_borders:
                    grid.add_section()
                else:
                    grid.add_row(*map(_rich_text, self._columns, self._cells(row)))
            return grid

        wide = grid(2)
        fits = console.measure(wide, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width
        console.print(wide if fits else grid(1))

    @property
    def _columns(self) -> list[Column]:
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    def _cells(self, row: Row) -> list[Cell]:
        empty = [None] * (len(self.columns) - len(row))
        return [cell if isinstance(cell, Cell) else Cell(cell) for cell in (*row, *empty)]

    @staticmethod
    def _text(column: Column, cell: Cell) -> str:
        return column.text(cell.value) + ("" if cell.reference is None else f" ({column.text(cell.reference)})")


def _markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _rich_text(column: Column, cell: Cell) -> Text:
    from rich.text import Text

    text = Text(column.text(cell.value), cell.style)
    return text if cell.reference is None else text.append(f" ({column.text(cell.reference)})", "dim")


def _note_list(notes: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {escape_text(note)}" for note in notes)] if notes else []


def markdown_document(title: str, notes: Sequence[str], tables: Iterable[Table]) -> str:
    """Return tables as a Markdown document."""
    return "\n\n".join([f"# {escape_text(title)}", *_note_list(notes), *(table.to_markdown() for table in tables)]) + "\n"


def render_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print tables with rows on a terminal, with blank lines between them."""
    for index, table in enumerate(table for table in tables if table.rows):
        if index:
            console.print()
        table.render(console)

"""The papers' tables of textual similarity, see `train.reports.sts_rows`, for a terminal, as Markdown and as JSON."""

from __future__ import annotations

from textwrap import wrap

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from schemas.escapes import escape_text, to_json
from schemas.storage.folder import Folder
from train.reports.score_tables import plain_table
from train.reports.sts_published import TASKS
from train.reports.sts_rows import StsRow, StsRows
from train.reports.table_reports import Cell

__all__ = ["sts_row_markdown", "sts_row_tables", "write_sts_rows"]

_COLUMNS, _WIDTH = 3, 12  # Data sets side by side on 80 columns, and characters of their names on a line.
_QUOTED = "*"


def write_sts_rows(rows: StsRows, output: str) -> list[str]:
    """Write a table into a folder as ``PAPER-table-N.md`` and ``.json``, and return these names."""
    name = f"{rows.paper.paper}-table-{rows.paper.table}"
    contents = {
        f"{name}.md": sts_row_markdown(rows),
        f"{name}.json": to_json(rows.to_dict(), indent=2) + "\n",
    }
    for file, content in contents.items():
        Folder(output).write(file, content.encode())
    return list(contents)


def sts_row_markdown(rows: StsRows) -> str:
    """Return a table as Markdown, published numbers in brackets."""
    numbers = range(len(rows.data))
    lines = [["row", "runs", *(_heading(rows, number).replace("|", "\\|") for number in numbers)]]
    lines += [["---", "---:", *["---:"] * len(rows.data)]]
    for row in rows.rows:
        texts = [_cell(rows, row, number).text for number in numbers]
        lines.append([_name(row), _runs(row), *texts])
    title = f"# {rows.paper.paper}, table {rows.paper.table}: semantic textual similarity"
    parts = [title, "", *(f"- {note}" for note in _notes(rows)), "", *(f"| {' | '.join(line)} |" for line in lines)]
    return escape_text("\n".join(parts), lines=True) + "\n"


def sts_row_tables(rows: StsRows) -> list[Table]:
    """Return a table for a terminal of 80 columns: below what was measured stands what was published."""
    numbers = range(len(rows.data))
    return [_table(rows, numbers[start : start + _COLUMNS]) for start in numbers[::_COLUMNS]]


def _table(rows: StsRows, numbers: range) -> Table:
    last = numbers[-1] == len(rows.data) - 1
    table = plain_table(
        f"Table {rows.paper.table}: semantic textual similarity", "\n".join(map(escape, _notes(rows))) if last else None
    )
    table.add_column("")
    for number in numbers:
        pairs, task = rows.data[number], rows.tasks[number]
        lines = [*wrap(pairs.name, _WIDTH), f"{len(pairs):,} pairs", *([] if task is None else [TASKS[task]])]
        table.add_column(escape("\n".join(lines)), justify="right", no_wrap=True, vertical="bottom")
    for row in rows.rows:
        cells = [_cell(rows, row, number) for number in numbers]
        runs = f", {_runs(row)} run{'' if _runs(row) == '1' else 's'}" if _runs(row) else ""
        table.add_row(Text.assemble((_name(row), "bold"), runs), *(cell.measured_text if cell.values else "" for cell in cells))
        if any(cell.published_text for cell in cells):
            table.add_row("    published", *(cell.published_text for cell in cells), style="dim")
    return table


def _notes(rows: StsRows) -> list[str]:
    refused = [f"{row.published.name} is not measured: {row.refused}" for row in rows.rows if row.refused]
    unknown = [pairs.name for pairs, task in zip(rows.data, rows.tasks, strict=True) if task is None]
    absent = [task for number, task in enumerate(TASKS) if number not in rows.tasks]
    return [
        "Pearson's r times 100, the mean of the runs ± their standard deviation, beside or below it as published.",
        f"{_QUOTED} quoted in the paper from other work.",
        *([f"Published numbers on {', '.join(absent)} are not shown: these pairs are not given."] if absent else []),
        *([f"Not a data set of the paper, by number of pairs or word overlap: {', '.join(unknown)}."] if unknown else []),
        *refused,
    ]


def _heading(rows: StsRows, number: int) -> str:
    task = rows.tasks[number]
    return rows.data[number].name + ("" if task is None else f" ({TASKS[task]})")


def _name(row: StsRow) -> str:
    return f"{row.published.name}{f' {_QUOTED}' if row.published.quoted else ''}"


def _runs(row: StsRow) -> str:
    """Return the number of runs, where a preset trains the row."""
    return str(len(row.measured)) if row.published.preset else ""


def _cell(rows: StsRows, row: StsRow, number: int) -> Cell:
    return Cell(rows.published(row, number), row.values(number))

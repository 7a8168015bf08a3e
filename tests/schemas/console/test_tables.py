from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from schemas.console.tables import Cell, Column, Table, number_columns, render_tables

TABLE = Table(
    ["image", "captions", *number_columns("rank", "R@1", spec=".1f"), Column("all", ",")],
    [("a|b.jpg", ("eins", "zwei"), 2, Cell(45.25, 1.0), 12345), (), (Cell("\x1b[1m[red]x", style="bold"), "a\nb", "–")],
    "title [bold]",
    ["in brackets: chance", "all: \x1b"],
)


def rendered(*tables: Table, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    render_tables(console, tables)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_table_in_four_formats():
    assert rendered(TABLE) == [
        "title [bold]",
        "image          captions  rank         R@1     all",
        "a|b.jpg        eins       2.0  45.2 (1.0)  12,345",
        "               zwei",
        "",
        r"\x1b[1m[red]x  a\nb         –",
        "in brackets: chance",
        r"all: \x1b",
    ]
    assert TABLE.to_markdown().split("\n") == [
        "## title [bold]",
        "",
        "- in brackets: chance",
        r"- all: \x1b",
        "",
        "| image | captions | rank | R@1 | all |",
        "| --- | --- | ---: | ---: | ---: |",
        r"| a\|b.jpg | eins<br>zwei | 2.0 | 45.2 (1.0) | 12,345 |",
        r"| \x1b[1m[red]x | a\nb | – |  |  |",
    ]
    first = {"image": "a|b.jpg", "captions": ["eins", "zwei"], "rank": 2, "R@1": 45.25, "all": 12345}
    second = {"image": "\x1b[1m[red]x", "captions": "a\nb", "rank": "–", "R@1": None, "all": None}
    assert json.loads(TABLE.to_json()) == [first, second]
    assert list(csv.reader(io.StringIO(TABLE.to_csv(), newline=""))) == [
        ["image", "captions", "rank", "R@1", "all"],
        ["a|b.jpg", "eins\nzwei", "2", "45.25", "12345"],
        ["\x1b[1m[red]x", "a\nb", "–", "", ""],
    ]


@pytest.mark.parametrize("has_borders", [False, True])
@pytest.mark.parametrize("width", [40, 24])
def test_narrow_terminal_cuts_nothing(has_borders, width):
    digest = "0123456789abcdef" * 4
    table = Table(["name", *number_columns("R@1", "R@10")], [(digest, "12.5", "37.5")], has_borders=has_borders)
    lines = rendered(table, width=width)
    assert max(map(len, lines)) <= width
    rows = [line.replace("│", " ").split() for line in lines]
    assert digest in "".join(row[0] for row in rows)
    assert ["12.5", "37.5"] in [row[1:] for row in rows]
    assert "…" not in "".join(lines)

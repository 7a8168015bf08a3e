"""Semantic textual similarity beside what was published: for a terminal, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from rich.markup import escape
from rich.table import Table

from schemas.escapes import to_json
from schemas.storage.folder import Folder
from train.evaluation.correlations import Correlation
from train.evaluation.sts_scoring import StsResult, StsSystem
from train.reports.score_tables import plain_table
from train.reports.sts_published import STS_PAPERS, TASKS, StsPaper, task_of

__all__ = ["sts_report", "sts_tables", "tasks_of", "write_sts"]

_COLUMNS, _WIDTH = 3, 11  # Data sets side by side on 80 columns, and characters of their names on a line.
_ABSENT = "[dim]–[/dim]"
_QUOTED = "*"


def tasks_of(result: StsResult) -> list[int | None]:
    """Return for each data set which of `TASKS` it is; None if it is none of them."""
    baseline = result.systems[0].correlations
    return [task_of(pairs, found.pearson) for pairs, found in zip(result.data, baseline, strict=True)]


def sts_tables(result: StsResult) -> list[Table]:
    """Return the tables: the correlations beside those published, then what each system read and how much of it it knows."""
    numbers = range(len(result.data))
    tables = [_scores(result, numbers[start : start + _COLUMNS]) for start in numbers[::_COLUMNS]]
    return [*tables, _readings(result.systems)]


def sts_report(result: StsResult) -> dict[str, Any]:
    """Return the result with what was published on the same data sets as plain values, for JSON."""
    tasks = tasks_of(result)
    plain = result.to_dict()
    for entry, task in zip(plain["data"], tasks, strict=True):
        entry["task"] = None if task is None else TASKS[task]
    plain["published"] = [
        {
            "source": paper.title,
            "name": row.name,
            "quoted": row.quoted,
            "scores": {
                pairs.name: row.values[task] for pairs, task in zip(result.data, tasks, strict=True) if task is not None
            },
        }
        for paper in STS_PAPERS
        for row in paper.rows
        if set(tasks) != {None}
    ]
    return plain


def write_sts(result: StsResult, output: str) -> list[str]:
    """Write the result into a folder: ``sts.json``, ``sts.csv`` with its numbers, and ``sts-pairs.csv`` with the similarity of each
    pair under each system.

    Returns:
        The names of the files.

    Raises:
        DatasetError: a file cannot be written.
    """  # fmt: skip
    contents = {
        "sts.json": to_json(sts_report(result), indent=2) + "\n",
        "sts.csv": _csv(_numbers(result)),
        "sts-pairs.csv": _csv(_pairs(result)),
    }
    for name, content in contents.items():
        Folder(output).write(name, content.encode())
    return list(contents)


def _scores(result: StsResult, numbers: Sequence[int]) -> Table:
    tasks = tasks_of(result)
    last, several = numbers[-1] == len(result.data) - 1, len(result.data) > 1
    known = [number for number in numbers if tasks[number] is not None]
    caption = "Pearson's r times 100, in brackets Spearman's rho times 100"
    if known:
        caption += f"\n{_QUOTED}: quoted in that paper from other work"
    table = plain_table("semantic textual similarity", caption)
    table.add_column("", overflow="fold")
    for number in numbers:
        pairs, task = result.data[number], tasks[number]
        lines = [*wrap(pairs.name, _WIDTH), f"{len(pairs):,} pairs", *([] if task is None else [TASKS[task]])]
        table.add_column(escape("\n".join(lines)), justify="right", no_wrap=True, vertical="bottom")
    if several and last:
        table.add_column("mean", justify="right", no_wrap=True)
    for system in result.systems:
        found = [system.correlations[number] for number in numbers]
        language = f" [dim]{system.language}[/dim]" if system.language else ""
        table.add_row(f"{escape(system.name)}{language}", *map(_cell, [*found, system.means] if several and last else found))
    for paper in STS_PAPERS if known else ():
        _add_published(table, paper, [tasks[number] for number in numbers])
    return table


def _add_published(table: Table, paper: StsPaper, tasks: Sequence[int | None]) -> None:
    table.add_row()
    table.add_row(f"[bold]{paper.title}[/bold]")
    for row in paper.rows:
        values = [None if task is None else row.values[task] for task in tasks]
        cells = [_ABSENT if value is None else f"{value:.1f}" + " " * len(" (00.0)") for value in values]
        table.add_row(f"{row.name}{f' {_QUOTED}' if row.quoted else ''}", *cells, style="dim")


def _readings(systems: Iterable[StsSystem]) -> Table:
    table = plain_table("what was read", "known: words with a vector; blind: sentences without such a word")
    table.add_column("", overflow="fold")
    table.add_column("sentences became tokens by", overflow="fold")
    for heading in ("known", "of words", "blind"):
        table.add_column(heading, justify="right", no_wrap=True)
    for system in systems:
        coverage = system.coverage
        cells = [""] * 3
        if coverage is not None:
            share = 100 * coverage.known / max(coverage.words, 1)
            cells = [f"{share:.1f} %", f"{coverage.words:,}", f"{coverage.blind:,}"]
        table.add_row(escape(system.name), escape(system.text), *cells)
    return table


def _cell(found: Correlation) -> str:
    if found.pearson is None or found.spearman is None:
        return _ABSENT
    return f"{found.pearson:.1f} [dim]({found.spearman:.1f})[/dim]"


def _numbers(result: StsResult) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("kind", "name", "language", "data", "pairs", "pearson", "spearman")]
    for system in result.systems:
        for pairs, found in zip(result.data, system.correlations, strict=True):
            score = _rounded(found.pearson), _rounded(found.spearman)
            rows.append((system.kind, system.name, system.language, pairs.name, len(pairs), *score))
    for paper in STS_PAPERS:
        for row in paper.rows:
            for pairs, task in zip(result.data, tasks_of(result), strict=True):
                if task is not None and row.values[task] is not None:
                    name = f"{paper.title}: {row.name}{' (quoted)' if row.quoted else ''}"
                    rows.append(("published", name, "", pairs.name, len(pairs), row.values[task], ""))
    return rows


def _pairs(result: StsResult) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [
        ("data", "line", "score", *(system.name for system in result.systems), "sentence1", "sentence2")
    ]
    for number, pairs in enumerate(result.data):
        similarities = [system.similarities[number].tolist() for system in result.systems]
        for line, score, first, second, *found in zip(
            pairs.lines, pairs.scores, pairs.first, pairs.second, *similarities, strict=True
        ):
            rows.append((pairs.name, line, score, *(round(value, 6) for value in found), first, second))
    return rows


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()

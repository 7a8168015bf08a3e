"""Runs side by side as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from schemas.conversion import dump
from train.reports.comparison import MEASURES, SUM, Comparison
from train.reports.score_tables import plain_table

__all__ = ["comparison_tables"]

_HEADINGS = {"recall_at_1": "R@1", "recall_at_5": "R@5", "recall_at_10": "R@10", "median_rank": "median"}
_ARROWS = {"image_to_text": "i→t", "text_to_image": "t→i"}
_ABSENT = "[dim]–[/dim]"


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Return the tables: what differs, how far the runs have come, and their scores; those with nothing in them are left out."""
    tables = [_differences(comparison), _progress(comparison), _scores(comparison)]
    return [table for table in tables if table.row_count]


def _differences(comparison: Comparison) -> Table:
    # Runs that differ in their seeds alone share a column.
    columns: dict[str, list[int]] = {}
    for number, run in enumerate(comparison.runs):
        columns.setdefault(comparison.label(run), []).append(number)
    table = plain_table("what differs", gap=1)
    table.add_column("", no_wrap=True)
    for label in columns:
        table.add_column(escape(label), overflow="fold")
    for key, values in comparison.differences.items():
        own = (dict.fromkeys(_ABSENT if values[n] is None else escape(_text(values[n])) for n in of) for of in columns.values())
        table.add_row(escape(key), *map(", ".join, own))
    return table


def _text(value: Any) -> str:
    """Return a setting in as few characters as can be read."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else dump(value)


def _progress(comparison: Comparison) -> Table:
    table = plain_table(
        "progress", "score: sum of recalls of the monitored languages on the validation split, at the best step", gap=1
    )
    table.add_column("run", overflow="fold")
    table.add_column("ended by")
    for heading in ("steps", "best step", "score", "steps/s", "pairs/s"):
        table.add_column(heading, justify="right")
    for run in comparison.runs:
        best, speed = run.history.best, run.speed
        table.add_row(
            escape(run.name),
            run.state,
            f"{run.history.last_step:,}",
            *((_ABSENT, _ABSENT) if best is None else (f"{best['step']:,}", f"{best['score']:.1f}")),
            *((f"{speed['steps_per_second']:.2f}", f"{speed['pairs_per_second']:,.0f}") if speed else (_ABSENT, _ABSENT)),
        )
    return table


def _scores(comparison: Comparison) -> Table:
    table = plain_table(
        "validation, at the best step",
        "recalls in percent; med.: median rank; i→t: image to text, t→i: text to image; sum: of the six recalls",
        gap=1,
    )
    table.add_column("", no_wrap=True)
    table.add_column("run", overflow="fold")
    for direction, measure in MEASURES:
        table.add_column(f"{_ARROWS[direction]}\n{_HEADINGS[measure][:3] if measure == 'median_rank' else _HEADINGS[measure]}")
        table.columns[-1].justify = "right"
    table.add_column("sum", justify="right")
    for language in comparison.languages:
        rows = [(escape(run.name), run.scores(language), 0) for run in comparison.runs]
        for group in comparison.groups:
            rows.append((f"[italic]{escape(group.name)}, mean of {len(group.runs)}[/italic]", group.mean(language), 1))
            rows.append(("[italic]  deviation[/italic]", group.deviation(language), 1))
        rows = [row for row in rows if row[1]]
        for number, (name, scores, digits) in enumerate(rows):
            cells = [f"{scores[pair]:.{digits if pair[1] == 'median_rank' else 1}f}" for pair in (*MEASURES, SUM)]
            table.add_row("" if number else escape(language), name, *cells)
    return table

"""The report of ``imagepivot tables``, measured beside published numbers: for a terminal, as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from schemas.storage import Folder
from train.reports.published import PublishedRow, rows_of_paper
from train.reports.results import DIRECTIONS, MEASURES, read_result

__all__ = ["Cell", "Line", "Report", "Section", "read_report"]

_RECALLS = MEASURES[:3]
_SHORT = {"recall_at_1": "R@1", "recall_at_5": "R@5", "recall_at_10": "R@10", "median_rank": "median rank"}
_NONE = "–"


@dataclass(frozen=True)
class Cell:
    """One measure of a row.

    Attributes:
        published: the paper's number; None if it has none.
        values: the measurement of each run.
    """

    published: float | None
    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """Mean over the runs; None without runs."""
        return mean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the runs (with n - 1); None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def measured_text(self) -> str:
        """Mean and deviation."""
        measured = _NONE if self.mean is None else f"{self.mean:.1f}"
        return measured if self.deviation is None else f"{measured} ± {self.deviation:.1f}"

    @property
    def published_text(self) -> str:
        """The published number; empty if there is none."""
        if self.published is None:
            return ""
        # Medians are whole numbers in the papers, recalls have one decimal.
        return f"{self.published:.1f}" if isinstance(self.published, float) else str(self.published)

    @property
    def text(self) -> str:
        """Mean and deviation, and the published number in brackets."""
        return f"{self.measured_text} ({self.published_text})" if self.published_text else self.measured_text


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        row: the published row.
        runs: number of runs.
        cells: cells by direction and measure.
    """

    row: PublishedRow
    runs: int
    cells: Mapping[tuple[str, str], Cell]


@dataclass(frozen=True)
class Section:
    """A table of the paper.

    Attributes:
        title: name of the table, and the captions that it is measured on.
        columns: directions and measures that have numbers.
        lines: rows of the table.
    """

    title: str
    columns: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]

    @property
    def headings(self) -> list[str]:
        """Names of the columns."""
        measures = [f"{direction.replace('_', ' ')} {_SHORT[measure]}" for direction, measure in self.columns]
        return ["row", "language", "runs", *measures]

    def texts(self) -> Iterable[list[str]]:
        """Yield the rows as text."""
        for line in self.lines:
            yield [line.row.name, line.row.language, str(line.runs), *(line.cells[column].text for column in self.columns)]


@dataclass(frozen=True)
class Report:
    """All tables of a paper.

    Attributes:
        paper: name of the paper.
        notes: remarks about the runs.
        sections: the tables.
    """

    paper: str
    notes: tuple[str, ...]
    sections: tuple[Section, ...]

    @property
    def begun(self) -> Report:
        """The report without tables that have no trained rows."""
        begun = (section for section in self.sections if any(line.runs for line in section.lines))
        return replace(self, sections=tuple(begun))

    def to_markdown(self) -> str:
        """Return the report as Markdown."""
        parts = [f"# {self.paper}: measured beside published", *(f"- {note}" for note in self.notes)]
        for section in self.sections:
            rule = ["---", "---", *("---:" for _ in section.headings[2:])]
            lines = [section.headings, rule, *section.texts()]
            parts += ["", f"## {section.title}", "", *(f"| {' | '.join(line)} |" for line in lines)]
        return "\n".join([parts[0], "", *parts[1:]]) + "\n"

    def to_tables(self) -> list[Table]:
        """Return the report as tables for a terminal of 80 columns: each row of a paper takes a line for each direction."""
        return [_terminal_table(section) for section in self.sections]


def _terminal_table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    measures = [measure for measure in MEASURES if any(measure == column for _, column in section.columns)]
    table.add_column("")
    for measure in measures:
        table.add_column(_SHORT[measure].removesuffix(" rank"), justify="right", no_wrap=True)
    for line in section.lines:
        runs = f"{line.runs} run{'' if line.runs == 1 else 's'}"
        table.add_row(Text.assemble((line.row.name, "bold"), f", {line.row.language}, {runs}"))
        for direction in DIRECTIONS:
            cells = [line.cells[direction, name] if (direction, name) in section.columns else None for name in measures]
            if any(cells):
                table.add_row(f"  {direction.replace('_', ' ')}", *(cell.measured_text if cell else "" for cell in cells))
            published = [cell.published_text if cell else "" for cell in cells]
            if any(published):
                table.add_row("    published", *published, style="dim")
    return table


def read_report(output: str, paper: str) -> Report:
    """Read the results in a folder and put them beside the numbers of a paper.

    Args:
        output: output folder of ``imagepivot tables``.
        paper: ``gella2017`` or ``kadar2018``.

    Returns:
        The report; a row without results has only the published numbers.

    Raises:
        UsageError: the paper is unknown.
        DatasetError: a result is damaged.
    """
    rows, folder = rows_of_paper(paper), Folder(output).local_path
    results = {preset: _results(folder / "results" / preset) for preset in {row.preset for row in rows}}
    sections = []
    for table, published in groupby(rows, key=lambda row: row.table):
        lines = tuple(_line(row, results[row.preset]) for row in published)
        columns = tuple(
            (direction, measure)
            for direction in DIRECTIONS
            for measure in MEASURES
            if any(line.cells[direction, measure].published is not None for line in lines)
        )
        columns = columns or tuple((direction, measure) for direction in DIRECTIONS for measure in _RECALLS)
        portions = ", ".join(dict.fromkeys(line.row.portion for line in lines))
        sections.append(Section(f"{table} ({portions} captions)".capitalize(), columns, lines))
    return Report(paper, _notes([result for of_preset in results.values() for result in of_preset]), tuple(sections))


def _results(folder: Path) -> list[dict[str, Any]]:
    return [read_result(path) for path in sorted(folder.glob("seed-*.json"))]


def _line(row: PublishedRow, results: Sequence[Mapping[str, Any]]) -> Line:
    scores = [
        score
        for result in results
        for score in result["scores"]
        if (score["language"], score["portion"]) == (row.language, row.portion)
    ]
    cells = {
        (direction, measure): Cell(
            published=getattr(getattr(row, direction), measure),
            values=tuple(float(score[direction][measure]) for score in scores),
        )
        for direction in DIRECTIONS
        for measure in MEASURES
    }
    return Line(row, len(scores), cells)


def _notes(results: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    notes = ["Each number is the mean of the runs ± their standard deviation; beside or below it stands the published one."]
    if not results:
        return (*notes, "No row has been trained yet.")
    features = sorted({result["feature"] for result in results})
    steps = sorted(result["step"] for result in results)
    changed = sorted({setting for result in results for setting in result["overrides"]})
    notes.append(f"Features: {'; '.join(features)}.")
    notes.append(f"{len(results)} runs; the best model of each was reached after {steps[0]:,} to {steps[-1]:,} steps.")
    notes.append(f"Changed against the presets: {', '.join(changed)}." if changed else "The presets are unchanged.")
    fewer = [result for result in results if result.get("left_out") or any(score.get("left_out") for score in result["scores"])]
    if fewer:
        notes.append(f"Images without features, with their captions, were left out of {len(fewer)} runs.")
    return tuple(notes)

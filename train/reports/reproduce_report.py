"""Report of ``imagepivot reproduce``: measured and published numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from statistics import mean, stdev
from typing import Any, Self

from schemas.console.tables import ABSENT, Cell, Row, Table, markdown_document, number_columns
from schemas.parameters import untrained_remark
from train.chance import DIRECTIONS, MEASURES, RECALLS
from train.data.splits import TEST_SPLITS
from train.evaluation.protocols import PROTOCOLS
from train.evaluation.ranks import Queries
from train.evaluation.statistics import Interval
from train.reports.compared_runs import SCORES, nested
from train.reports.published import PublishedRow, presets_of_paper, rows_of_paper
from train.reports.row_results import FailedRun, RowSummary, read_row
from train.reports.significance import best_rows

_OTHER_SET, _BEST = "†", "≈"
_SETS = {
    portion: next(protocol for protocol in PROTOCOLS if split in protocol.splits)
    for portion, split in zip(("comparable", "translation"), TEST_SPLITS, strict=True)
}
"""Protocol of all three papers by portion."""

_SHORT = {"recall_at_1": "R@1", "recall_at_5": "R@5", "recall_at_10": "R@10", "median_rank": "median rank"}


@dataclass(frozen=True)
class RowMeasurement:
    """One measure of a row: the published number, if any, and the number of each run.

    Attributes:
        chance: expectation of a random ranking of the same gallery; None if unknown.
        is_other_set: whether the published number was measured on other images or captions.
        interval: 95 % confidence interval of the mean; None without ranks.
        not_below_best: whether it is the best of several rows, or does not differ from the best.
    """

    published: float | None
    values: tuple[float, ...]
    chance: float | None = None
    is_other_set: bool = False
    interval: Interval | None = None
    not_below_best: bool = False

    @property
    def mean(self) -> float | None:
        """Mean over the runs; None without runs."""
        return mean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the runs (with n - 1); None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def text(self) -> str:
        """Mean and deviation, marked if not below the best."""
        measured = ABSENT if self.mean is None else f"{self.mean:.1f}"
        measured += "" if self.deviation is None else f" ± {self.deviation:.1f}"
        return f"{measured} {_BEST}" if self.not_below_best else measured

    @property
    def interval_text(self) -> str | None:
        """The interval; None without ranks."""
        return None if self.interval is None else f"{self.interval.low:.1f}–{self.interval.high:.1f}"

    def to_cell(self) -> Cell:
        """Return mean, deviation and interval, with the published number in brackets."""
        published = self.published
        text = self.text if self.interval is None else f"{self.text} [{self.interval_text}]"
        return Cell(text, published if published is None or not self.is_other_set else f"{published} {_OTHER_SET}")


@dataclass(frozen=True)
class Line:
    """A row of a table, with measurements by direction and measure."""

    row: PublishedRow
    runs: int
    cells: Mapping[tuple[str, str], RowMeasurement]
    failed: int = 0

    @property
    def runs_text(self) -> str:
        """Number of runs, and number of all runs if any failed."""
        return f"{self.runs} of {self.runs + self.failed}" if self.failed else str(self.runs)

    def chance(self, columns: Iterable[tuple[str, str]]) -> tuple[str | None, ...]:
        """Format the recalls of chance."""
        values = (self.cells[column].chance for column in columns)
        return tuple(None if value is None else f"{value:.1f}" for value in values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        cells = {pair: {**asdict(cell), "mean": cell.mean, "deviation": cell.deviation} for pair, cell in self.cells.items()}
        names = {name: getattr(self.row, name) for name in ("name", "preset", "language", "portion", "split")}
        return {**names, "runs": self.runs, "failed": self.failed, **nested(cells)}


@dataclass(frozen=True)
class Section:
    """A table of the paper; ``columns`` are the published directions and measures."""

    title: str
    columns: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]

    @property
    def galleries(self) -> Mapping[str, Line]:
        """A measured line for each language, for the recalls of chance."""
        return {line.row.language: line for line in self.lines if line.runs}

    def to_table(self) -> Table:
        """Return the table with a row for each row of the paper."""
        measures = [f"{direction.replace('_', ' ')} {_SHORT[measure]}" for direction, measure in self.columns]
        rows: list[Row] = [
            (line.row.name, line.row.language, line.runs_text, *(line.cells[column].to_cell() for column in self.columns))
            for line in self.lines
        ]
        rows += [("chance", language, None, *line.chance(self.columns)) for language, line in self.galleries.items()]
        return Table(["row", "language", *number_columns("runs", *measures)], rows, self.title)

    def to_narrow_table(self) -> Table:
        """Return the table for a terminal of 80 columns, with a line per direction."""
        measures = [measure for measure in MEASURES if any(measure == column for _, column in self.columns)]
        directions = {way: [(way, measure) for measure in measures] for way, _ in self.columns}
        rows: list[Row] = []
        for line in self.lines:
            runs = f"{line.runs_text} run{'' if line.runs_text == '1' else 's'}"
            rows.append((Cell(f"{line.row.name}, {line.row.language}, {runs}", style="bold"),))
            for direction, columns in directions.items():
                cells = [line.cells[column] for column in columns]
                mark = f" {_OTHER_SET}" if any(cell.is_other_set for cell in cells) else ""
                rows.append((f"  {direction.replace('_', ' ')}", *(cell.text for cell in cells)))
                for name, attribute in (("95 % interval", "interval_text"), (f"published{mark}", "published")):
                    values = [getattr(cell, attribute) for cell in cells]
                    if any(value is not None for value in values):
                        rows.append([Cell(value, style="dim") for value in (f"    {name}", *values)])
        for language, line in self.galleries.items():
            rows.append((Cell(f"chance, {language}", style="bold"),))
            rows += ((f"  {way.replace('_', ' ')}", *line.chance(columns)) for way, columns in directions.items())
        headings = [_SHORT[measure].removesuffix(" rank") for measure in measures]
        return Table(["", *number_columns(*headings)], rows, self.title)


@dataclass(frozen=True)
class PaperReport:
    """All tables of a paper.

    Attributes:
        further: measurements of the same rows in unpublished languages and portions.
        rows: summaries of rows with a finished or failed run.
    """

    paper: str
    notes: tuple[str, ...]
    sections: tuple[Section, ...]
    further: tuple[Section, ...] = ()
    rows: tuple[RowSummary, ...] = ()

    @property
    def failed(self) -> tuple[FailedRun, ...]:
        """The runs that failed."""
        return tuple(run for row in self.rows for run in row.failed)

    @property
    def begun(self) -> Self:
        """The report without tables that have no trained rows."""
        begun = (section for section in self.sections if any(line.runs for line in section.lines))
        return replace(self, sections=tuple(begun))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        sections = *self.sections, *self.further
        tables = [{"title": section.title, "rows": [line.to_dict() for line in section.lines]} for section in sections]
        failed = [{"preset": run.preset, "seed": run.seed, **vars(run.failure)} for run in self.failed]
        untrained = sorted({name for row in self.rows for name in row.untrained})
        return {"paper": self.paper, "notes": list(self.notes), "untrained": untrained, "tables": tables, "failed": failed}

    def to_markdown(self) -> str:
        """Return the report as Markdown."""
        failed = [(run.preset, run.seed, run.failure.kind, run.failure.reason) for run in self.failed]
        tables = [
            *(section.to_table() for section in (*self.sections, *self.further)),
            *([Table(_SUMMARY_COLUMNS, [*map(_summary_row, self.rows)], "What was trained")] if self.rows else []),
            *([Table(("preset", "seed", "kind", "reason"), failed, "Runs that failed")] if failed else []),
        ]
        return markdown_document(f"{self.paper}: measured beside published", self.notes, tables)

    def to_tables(self) -> list[Table]:
        """Return the report as tables for a terminal of 80 columns."""
        tables = [section.to_narrow_table() for section in (*self.sections, *self.further)]
        for data, rows in groupby(self.rows, key=_data):
            tables.append(Table([""], [(f"{row.preset}: {_describe(row)}",) for row in rows], f"trained{data}"))
        return tables


_SUMMARY_COLUMNS = (
    *("preset", "features", "recipe"),
    *number_columns("vocabulary", "words", "pretrained", "captions", "steps", "best after", "seeds"),
)


def _summary_row(row: RowSummary) -> Row:
    numbers = map(row.number, ("vocabulary", "words", "pretrained", "captions", "steps", "step"))
    name = f"{row.preset} ({_ensemble(row)})" if row.members else row.preset
    return name, row.feature, row.recipe, *numbers, row.seeds


def _ensemble(row: RowSummary) -> str:
    return f"means of the scores of {' and '.join(row.members)}"


def _data(row: RowSummary) -> str:
    values = {"features {}": row.feature, "captions {}": row.recipe, "{} words": row.number("vocabulary")}
    data = "; ".join(text.format(value) for text, value in values.items() if value != ABSENT)
    return f" on {data}" if data else ""


def _describe(row: RowSummary) -> str:
    if not row.results:
        return f"seeds: {row.seeds}"
    if row.members:
        return f"{_ensemble(row)}; seeds: {row.seeds}"
    parts = [f"{name}: {row.number(name)}" for name in ("words", "pretrained", "captions") if row.number(name) != ABSENT]
    steps = f"of {row.number('steps')} steps" if row.number("steps") != ABSENT else "steps"
    return "; ".join((*parts, f"best after {row.number('step')} {steps}", f"seeds: {row.seeds}"))


def read_report(output: str, paper: str) -> PaperReport:
    """Read the results in a folder, with the published numbers of a paper.

    Raises:
        UsageError: the paper is unknown.
        DatasetError: a result is damaged.
    """
    rows = {preset: read_row(output, preset) for preset in presets_of_paper(paper)}
    published = [replace(row, split=_measured_split(row, rows[row.preset])) for row in rows_of_paper(paper)]
    begun = tuple(row for row in rows.values() if row.results or row.failed)
    is_paper_split = all(score["split"] in TEST_SPLITS for row in begun for score in row.scores)
    sections, further = [], []
    unpublished = _unpublished(published, rows)
    for table, table_rows in groupby(published, key=lambda row: row.table):
        paper_rows = tuple(table_rows)
        columns = tuple(pair for pair in SCORES if any(pair in row.numbers for row in paper_rows))
        columns = columns or tuple(product(DIRECTIONS, RECALLS))
        portions = ", ".join(dict.fromkeys(row.portion for row in paper_rows))
        shown = [row if is_paper_split else replace(row, numbers={}) for row in paper_rows]
        sections.append(Section(f"{table.capitalize()} ({portions} captions)", columns, _lines(shown, rows)))
        others: dict[tuple[str, str], list[PublishedRow]] = {}
        for row in (row for row in unpublished if row.table == table):
            others.setdefault((row.portion, row.split), []).append(row)
        for (portion, split), other_rows in others.items():
            splits = {row.split for row in (*published, *unpublished) if row.portion == portion and row.split}
            of_split = f" of {split}" if len(splits) > 1 else ""
            title = f"{table.capitalize()} ({portion} captions{of_split}), not in the paper"
            further.append(Section(title, columns, _lines(other_rows, rows)))
    return PaperReport(paper, _notes(begun, is_paper_split=is_paper_split), tuple(sections), tuple(further), begun)


def _place(score: Mapping[str, Any]) -> tuple[str, str, str]:
    return score["language"], score["portion"], score["split"]


def _measured_split(row: PublishedRow, summary: RowSummary) -> str:
    """Return the paper's split if it is measured, or another one."""
    paper = dict(zip(_SETS, TEST_SPLITS, strict=True)).get(row.portion)
    splits = [split for *place, split in map(_place, summary.scores) if place == [row.language, row.portion]]
    return paper if paper in splits else next(iter(splits), "")


def _unpublished(published: Sequence[PublishedRow], summaries: Mapping[str, RowSummary]) -> list[PublishedRow]:
    """Return rows of measured places that are not in the paper.

    They follow the first row of their preset and language, or of their preset if the language has none.
    """
    known = {(row.preset, row.place) for row in published}
    homes = {(row.preset, row.language) for row in published}
    rows: dict[tuple[str, tuple[str, str, str]], PublishedRow] = {}
    for row in published:
        for language, portion, split in sorted(set(map(_place, summaries[row.preset].scores))):
            other = replace(row, language=language, portion=portion, split=split, numbers={})
            is_home = language == row.language or (row.preset, language) not in homes
            if is_home and (row.preset, other.place) not in known:
                rows.setdefault((row.preset, other.place), other)
    return list(rows.values())


def _lines(rows: Sequence[PublishedRow], summaries: Mapping[str, RowSummary]) -> tuple[Line, ...]:
    groups: dict[tuple[Any, ...], dict[str, Queries]] = {}  # Rows with the same queries.
    for row, direction in product(rows, DIRECTIONS):
        place = *row.place, direction
        if queries := summaries[row.preset].ranks.get(place):
            groups.setdefault((place, tuple(queries.ids)), {})[row.preset] = queries
    best = {item for (place, _), group in groups.items() for item in best_rows(place, group)}
    return tuple(_line(row, summaries[row.preset], best) for row in rows)


def _line(row: PublishedRow, summary: RowSummary, best: set[tuple[Any, str, str]]) -> Line:
    scores = [score for score in summary.scores if _place(score) == row.place]
    chance = scores[0].get("chance", {}) if scores else {}
    cells = {}
    for direction, measure in SCORES:
        place = *row.place, direction
        cells[direction, measure] = RowMeasurement(
            published=row.numbers.get((direction, measure)),
            values=tuple(float(score[direction][measure]) for score in scores),
            chance=dict(zip(MEASURES, chance.get(direction, ()), strict=False)).get(measure),
            is_other_set=any(map(_other_set, scores)),
            interval=getattr(summary.ranks[place].intervals, measure) if place in summary.ranks else None,
            not_below_best=(place, measure, row.preset) in best,
        )
    return Line(row, len(scores), cells, len(summary.failed))


def _other_set(score: Mapping[str, Any]) -> str:
    """Return the size of an evaluated set that differs from the papers' set, or ""."""
    images, captions = (score[direction]["queries"] for direction in DIRECTIONS)
    protocol = _SETS.get(score["portion"])
    if protocol is None or (images, captions) == (protocol.images, *protocol.captions):
        return ""
    sizes = f"{images:,} of {protocol.images:,} images, {captions:,} of {protocol.captions[0]:,} captions"
    return f"{score['language']} {score['portion']} {sizes}"


def _notes(rows: Sequence[RowSummary], *, is_paper_split: bool) -> tuple[str, ...]:
    notes = ["Each number is the mean of the runs ± their standard deviation, with the published one beside or below it."]
    results = [result for row in rows for result in row.results]
    scores = [score for row in rows for score in row.scores]
    if not is_paper_split:
        splits = ", ".join(sorted({score["split"] for score in scores}))
        notes = [f"Each number is the mean of the runs ± their standard deviation, on split {splits}."]
        notes.append("Published numbers, of the test images of 2016, are left out.")
    elif sets := sorted(set(filter(None, map(_other_set, scores)))):
        notes.append(f"{_OTHER_SET} published on another set than the measured one: {'; '.join(sets)}.")
    failed = sum(len(row.failed) for row in rows)
    if any(row.ranks for row in rows):
        notes.append("95 % intervals of means are by a bootstrap over images: for other images, not other trainings.")
        notes.append(f"{_BEST} best for its language, or no difference (paired randomization over images, Holm, 5 %).")
    if results:
        steps = sorted(result["step"] for result in results if "step" in result)
        changed = sorted({setting for result in results for setting in result["overrides"]})
        notes.append(f"Features: {'; '.join(sorted({row.feature for row in rows if row.results}))}.")
        if untrained := untrained_remark(name for row in rows for name in row.untrained):
            notes.append(f"{untrained}.")
        notes.append(f"{len(steps)} runs; the best model of each was reached after {steps[0]:,} to {steps[-1]:,} steps.")
        notes.append(f"Changed against the presets: {', '.join(changed)}." if changed else "The presets are unchanged.")
    else:
        notes.append("No row has been trained yet.")
    if failed:
        notes.append(f"{failed} of {len(results) + failed} runs failed.")
    if fewer := sum(any(item.get("missing_features") for item in (result, *result["scores"])) for result in results):
        notes.append(f"Images without features, with their captions, were left out of {fewer} runs.")
    return tuple(notes)

"""Measured tables of semantic textual similarity in the papers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.console.tables import Row, Table, markdown_document, number_columns
from schemas.dataset import open_dataset
from schemas.errors import UsageError
from schemas.escapes import redact
from schemas.parameters import EncodedParameters
from train.devices import choose_device
from train.evaluation.evaluation import Count, no_progress
from train.evaluation.sentences import Tokenize
from train.jobs import ReproduceJob
from train.reports.published import QUOTED, STS_PAPERS, TASKS, PublishedSts, StsPaper
from train.reports.reproduce_report import RowMeasurement
from train.reports.row_results import finished_runs
from train.runs.run import open_run
from train.sts.pairs import StsPairs, read_sts
from train.sts.report import data_column, table_parts, untrained_systems
from train.sts.similarity import StsSystem, score_overlap, score_sts, tasks_of

_LANGUAGE = "en"  # All pairs in the papers are English.


@dataclass(frozen=True)
class StsRow:
    """A row of a table.

    Attributes:
        measured: correlations of the runs of its preset, or of the baseline of word overlap.
        refused: reason if the row or its runs cannot be measured; else empty.
    """

    published: PublishedSts
    measured: tuple[StsSystem, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class MeasuredSts:
    """A published table with measurements.

    Attributes:
        data: the sentence pairs on which it is measured.
        tasks: name in `TASKS` of each of them; None if they are none of the paper's.
    """

    paper: StsPaper
    data: tuple[StsPairs, ...]
    tasks: tuple[str | None, ...]
    rows: tuple[StsRow, ...]

    def measurement(self, row: StsRow, index: int) -> RowMeasurement:
        """Return the values of a row on a data set: Pearson's r times 100, if defined."""
        values = (system.correlations[index].pearson for system in row.measured)
        published = row.published.values.get(self.tasks[index])
        return RowMeasurement(published, tuple(value for value in values if value is not None))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "paper": self.paper.paper,
            "table": f"table {self.paper.table}",
            "data": [
                {"name": pairs.name, "location": redact(pairs.location), "pairs": len(pairs), "task": task}
                for pairs, task in zip(self.data, self.tasks, strict=True)
            ],
            "rows": [self._row_to_dict(row) for row in self.rows],
        }

    def to_tables(self) -> list[Table]:
        """Return the table, split by data sets."""
        return [self._table(indices) for indices in table_parts(self.data)]

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""
        return markdown_document(f"{self.paper.paper}: measured beside published", (), self.to_tables())

    def _table(self, indices: Sequence[int]) -> Table:
        columns = ["row", *number_columns("runs")]
        columns += (data_column(self.data[index], self.tasks[index]) for index in indices)
        lines: list[Row] = []
        for row in self.rows:
            cells = (self.measurement(row, index).to_cell() for index in indices)
            runs = len(row.measured) if row.published.preset else None
            lines.append((row.published.label, runs, *cells))
        is_last = indices[-1] == len(self.data) - 1
        title = f"Table {self.paper.table}: semantic textual similarity"
        return Table(columns, lines, title, self._notes() if is_last else ())

    def _notes(self) -> list[str]:
        unknown = [pairs.name for pairs, task in zip(self.data, self.tasks, strict=True) if task is None]
        absent = [task for task in TASKS if task not in self.tasks]
        return [
            "Pearson's r times 100, the mean of the runs ± their standard deviation, the published one in brackets.",
            f"{QUOTED} quoted in the paper from other work.",
            *([f"Published numbers on {', '.join(absent)} are not shown: these pairs are not given."] if absent else []),
            *([f"Not a data set of the paper, by number of pairs or word overlap: {', '.join(unknown)}."] if unknown else []),
            *(f"{row.published.name} is not measured: {row.refused}" for row in self.rows if row.refused),
            *untrained_systems(system for row in self.rows for system in row.measured),
        ]

    def _row_to_dict(self, row: StsRow) -> dict[str, Any]:
        cells = {pairs.name: self.measurement(row, index) for index, pairs in enumerate(self.data)}
        scores = {
            name: {"published": cell.published, "mean": cell.mean, "measured": list(cell.values)}
            for name, cell in cells.items()
        }
        source = {name: getattr(row.published, name) for name in ("name", "preset", "quoted")}
        untrained = sorted({name for system in row.measured for name in system.untrained})
        runs = [system.name for system in row.measured]
        return {**source, "runs": runs, "refused": row.refused, "scores": scores, "untrained": untrained}


def open_sts(job: ReproduceJob, tokenize: Tokenize) -> list[StsPairs]:
    """Read the sentence pairs of a job, and check that they can be tokenized.

    Raises:
        InputError: pairs are missing or damaged.
        UsageError: pairs are given for a paper without textual similarity, or missing for a table of it.
    """
    table = STS_PAPERS.get(job.paper)
    if job.sts and table is None:
        raise UsageError(f"--sts is given, but {job.paper} has no table of textual similarity: leave it out")
    if not job.sts:
        if table is not None and job.table == table.table:
            raise UsageError(
                f"table {job.table} of {job.paper} is measured on sentence pairs: give --sts, files or "
                "folders of them, as imagepivot sts takes them"
            )
        return []
    pairs = read_sts(job.sts)
    text = EncodedParameters.from_json(open_dataset(job.captions, kind="encoded").manifest.parameters).text
    tokenize(pairs[0].first[0], _LANGUAGE, text, job.truecaser)
    return pairs


def measure_sts(
    job: ReproduceJob, data: Sequence[StsPairs], tokenize: Tokenize, on_progress: Count = no_progress
) -> MeasuredSts:
    """Measure the finished runs of a job on the sentence pairs of `open_sts`.

    Rows without a result have only the published numbers.

    Raises:
        DatasetError: a run is damaged.
    """
    table = STS_PAPERS[job.paper]
    options: dict[str, Any] = {"language": _LANGUAGE, "truecaser": job.truecaser, "on_progress": on_progress}
    overlap = score_overlap(data)
    rows = [StsRow(table.rows[0], (overlap,))]  # The first row is the baseline.
    for published in table.rows[1:]:
        systems, refused = [], published.unmeasured
        for folder in finished_runs(job.output, published.preset) if published.preset else ():
            run, name = open_run(folder, device=choose_device(job.device)), f"{published.preset}/{folder.name}"
            try:
                systems.append(score_sts(run, data, tokenize, name=name, **options))
            except UsageError as error:
                refused = str(error)
                break
        rows.append(StsRow(published, tuple(systems), refused))
    return MeasuredSts(table, tuple(data), tasks_of(data, overlap), tuple(rows))

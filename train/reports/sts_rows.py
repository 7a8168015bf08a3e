"""The papers' tables of semantic textual similarity, measured: the runs of a table's rows, with the baseline, on sentence pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from schemas.dataset import open_dataset
from schemas.errors import UsageError
from schemas.parameters import EncodedParameters
from train.devices import resolve_device
from train.evaluation.evaluation import Count, no_progress
from train.evaluation.search import Tokenize
from train.evaluation.sts import StsSystem, score_overlap, score_sts
from train.evaluation.sts_data import StsPairs, read_sts
from train.jobs import ReproduceJob
from train.reports.published import STS_PAPERS, TASKS, PublishedSts, StsPaper, task_of
from train.reports.row_results import finished_runs
from train.runs.run import open_run

_LANGUAGE = "en"  # Of all pairs that the papers measure on.


@dataclass(frozen=True)
class StsRow:
    """A row of a table.

    Attributes:
        published: the row as published.
        measured: what was measured: each run of its preset, the baseline in the row of the baseline, or nothing.
        refused: why its runs cannot be measured; empty if they can.
    """

    published: PublishedSts
    measured: tuple[StsSystem, ...] = ()
    refused: str = ""

    def values(self, number: int) -> tuple[float, ...]:
        """Return Pearson's r times 100 of what was measured on a data set, as far as it has one."""
        found = (system.correlations[number].pearson for system in self.measured)
        return tuple(value for value in found if value is not None)


@dataclass(frozen=True)
class StsRows:
    """A table as published, measured; ``tasks`` says which of `TASKS` each data set is, None if it is none of them."""

    paper: StsPaper
    data: tuple[StsPairs, ...]
    tasks: tuple[int | None, ...]
    rows: tuple[StsRow, ...]

    def published(self, row: StsRow, number: int) -> float | None:
        """Return what was published of a row on a data set; None if nothing was, or if it is not one of the paper's."""
        task = self.tasks[number]
        return None if task is None else row.published.values[task]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "paper": self.paper.paper,
            "table": f"table {self.paper.table}",
            "data": [
                {
                    "name": pairs.name,
                    "location": pairs.location,
                    "pairs": len(pairs),
                    "task": None if task is None else TASKS[task],
                }
                for pairs, task in zip(self.data, self.tasks, strict=True)
            ],
            "rows": [self._plain(row) for row in self.rows],
        }

    def _plain(self, row: StsRow) -> dict[str, Any]:
        scores = {}
        for number, pairs in enumerate(self.data):
            values = row.values(number)
            scores[pairs.name] = {
                "published": self.published(row, number),
                "mean": mean(values) if values else None,
                "measured": list(values),
            }
        of_row = {"name": row.published.name, "preset": row.published.preset, "quoted": row.published.quoted}
        return {**of_row, "runs": [system.name for system in row.measured], "refused": row.refused, "scores": scores}


def sts_paper(paper: str, table: int | None = None) -> StsPaper | None:
    """Return a paper's table of textual similarity; None if it has none, or if another table is named."""
    return next((one for one in STS_PAPERS if one.paper == paper and table in (None, one.table)), None)


def open_sts(job: ReproduceJob, tokenize: Tokenize) -> list[StsPairs]:
    """Read the sentence pairs of a job, if any, and check that they can go through the recipe of its captions.

    Raises:
        InputError: there are no such pairs.
        UsageError: pairs are given for a paper or table without textual similarity, or lack for one with it.
    """
    if job.sts and sts_paper(job.paper) is None:
        raise UsageError(f"--sts is given, but {job.paper} has no table of textual similarity: leave it out")
    if not job.sts:
        if job.table is not None and sts_paper(job.paper, job.table):
            raise UsageError(
                f"table {job.table} of {job.paper} is measured on sentence pairs: give --sts, files or folders of them, as "
                "imagepivot sts takes them"
            )
        return []
    pairs = read_sts(job.sts)
    text = EncodedParameters.from_json(open_dataset(job.captions, kind="encoded").manifest.parameters).text
    tokenize(pairs[0].first[0], _LANGUAGE, text, job.truecaser)
    return pairs


def sts_rows(
    paper: str,
    output: str,
    data: Sequence[StsPairs],
    tokenize: Tokenize | None,
    *,
    truecaser: str = "",
    device: str = "cpu",
    count: Count = no_progress,
) -> StsRows:
    """Measure the finished runs in an output folder of ``reproduce`` on sentence pairs.

    Rows without a result have only the published numbers. Without ``tokenize`` the sentences are tokens, separated by spaces;
    the truecasers are for runs whose recipe truecases.

    Raises:
        UsageError: the paper has no such table.
        DatasetError: a run or a result is damaged.
    """
    table = sts_paper(paper)
    if table is None:
        raise UsageError(
            f"{paper} has no table of textual similarity: {' and '.join(one.paper for one in STS_PAPERS)} have one"
        )
    overlap = score_overlap(data)
    rows = [StsRow(table.rows[0], (overlap,))]
    for published in table.rows[1:]:
        systems, refused = [], ""
        for folder in finished_runs(output, published.preset) if published.preset else ():
            run, name = open_run(folder, device=resolve_device(device)), f"{published.preset}/{folder.name}"
            try:
                systems.append(score_sts(run, data, tokenize, name=name, language=_LANGUAGE, truecaser=truecaser, count=count))
            except UsageError as error:
                refused = str(error)
                break
        rows.append(StsRow(published, tuple(systems), refused))
    tasks = (task_of(pairs, found.pearson) for pairs, found in zip(data, overlap.correlations, strict=True))
    return StsRows(table, tuple(data), tuple(tasks), tuple(rows))

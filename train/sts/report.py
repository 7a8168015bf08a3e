"""Tables and files of ``imagepivot sts``: measured and published correlations."""

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from schemas.console.tables import ABSENT, Cell, Column, Row, Table, number_columns
from schemas.escapes import to_json
from schemas.parameters import untrained_remark
from schemas.storage.folder import Folder
from train.reports.published import QUOTED, STS_PAPERS
from train.sts.pairs import StsPairs
from train.sts.similarity import StsResult, StsSystem

_DATA_SETS, _NAME_WIDTH = 3, 11  # Data sets in a table of 80 columns, and characters of their names on a line.


def sts_tables(result: StsResult) -> list[Table]:
    """Return tables of measured and published correlations, and one of coverage."""
    tables = [_correlations(result, indices) for indices in table_parts(result.data)]
    rows: list[Row] = []
    for system in result.systems:
        cells: tuple[str | int, ...] = ()
        if coverage := system.coverage:
            cells = f"{100 * coverage.known / max(coverage.words, 1):.1f} %", coverage.words, coverage.blind
        rows.append((system.name, system.text, *cells))
    columns = ("", "sentences became tokens by", *number_columns("known", "of words", "blind", spec=","))
    notes = ["known: words with a vector; blind: sentences without such a word"]
    return [*tables, Table(columns, rows, "what was read", notes)]


def _correlations(result: StsResult, indices: Sequence[int]) -> Table:
    tasks = result.tasks
    has_means = indices[-1] == len(result.data) - 1 > 0
    columns = [data_column(result.data[index], tasks[index]) for index in indices]
    rows: list[Row] = []
    for system in result.systems:
        correlations = [*(system.correlations[index] for index in indices), *([system.means] if has_means else [])]
        measured = (
            Cell(ABSENT) if None in vars(value).values() else Cell(value.pearson, value.spearman) for value in correlations
        )
        rows.append((f"{system.name} {system.language}".rstrip(), *measured))
    notes = ["Pearson's r times 100, in brackets Spearman's rho times 100", *untrained_systems(result.systems)]
    if any(tasks[index] is not None for index in indices):
        notes.append(f"{QUOTED}: quoted in that paper from other work")
        for paper in STS_PAPERS.values():
            rows += [(), (Cell(paper.title, style="bold"),)]
            for row in paper.rows:
                values = [row.values.get(tasks[index]) for index in indices]
                cells = [ABSENT if value is None else f"{value:.1f}" + " " * len(" (00.0)") for value in values]
                rows.append([Cell(text, style="dim") for text in (row.label, *cells)])
    columns += [Column("mean", ".1f")] if has_means else []
    return Table(["", *columns], rows, "semantic textual similarity", notes)


def table_parts(data: Sequence[StsPairs]) -> list[range]:
    """Return the indices of the data sets of each table."""
    indices = range(len(data))
    return [indices[start : start + _DATA_SETS] for start in indices[::_DATA_SETS]]


def untrained_systems(systems: Iterable[StsSystem]) -> list[str]:
    """Return a note for each system on features of random weights."""
    untrained = {system.name: untrained_remark(system.untrained) for system in systems}
    return [f"{name}: {remark}" for name, remark in untrained.items() if remark]


def data_column(pairs: StsPairs, task: str | None) -> Column:
    """Return the column of a data set, headed by its name, size and task."""
    lines = [*wrap(pairs.name, _NAME_WIDTH), f"{len(pairs):,} pairs", *filter(None, [task])]
    return Column("\n".join(lines), ".1f")


def write_sts(result: StsResult, output: str) -> list[str]:
    """Write ``sts.json`` and ``sts-pairs.csv`` into a folder.

    Returns:
        The names of the files.

    Raises:
        DatasetError: a file cannot be written.
    """
    systems = (system.name for system in result.systems)
    pairs = Table(("data", "line", "score", *systems, "sentence1", "sentence2"), list(_sts_pair_rows(result)))
    report = to_json(result.to_dict(), indent=2) + "\n"
    contents = {"sts.json": report, "sts-pairs.csv": pairs.to_csv()}
    for name, content in contents.items():
        Folder(output).put(name, content.encode())
    return list(contents)


def _sts_pair_rows(result: StsResult) -> Iterator[Row]:
    for index, pairs in enumerate(result.data):
        similarities = [system.similarities[index].tolist() for system in result.systems]
        for line, score, first, second, *values in zip(
            pairs.lines, pairs.scores, pairs.first, pairs.second, *similarities, strict=True
        ):
            yield pairs.name, line, score, *(round(value, 6) for value in values), first, second

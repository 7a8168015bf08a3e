"""Published tables of the papers, with the preset of each row.

Recalls, textual similarity (Pearson's r, times 100, on three data sets of the shared tasks), and ranks of
single captions. The numbers and their sources are in ``published/PAPER.toml``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schemas.conversion import convert, parse_toml
from schemas.errors import UsageError
from train.chance import DIRECTIONS

PAPERS = ("gella2017", "kadar2018", "huang2019")

TASKS = ("MSRvid 2012", "images 2014", "images 2015")
"""The data sets of the shared tasks, in the order of the columns in both papers."""

QUOTED = "*"
"""Mark of rows that a paper quotes from other work."""

_FOLDER = Path(__file__).with_name("published")


@dataclass(frozen=True)
class PublishedRow:
    """A row of a table for one language.

    Attributes:
        table: name of the table in the paper, e.g. ``table 2``.
        name: name of the row in the paper, with the source of a quoted row.
        preset: preset that trains it, for a quoted row mostly of another paper; or a name in `ENSEMBLES`.
        numbers: reported numbers by direction and measure, recalls in percent.
        split: split on which runs are measured; empty if none is.
    """

    table: str
    name: str
    preset: str
    language: str
    portion: str
    numbers: Mapping[tuple[str, str], float]
    split: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """Language, portion and split."""
        return self.language, self.portion, self.split


@dataclass(frozen=True)
class PublishedSts:
    """A row of a table of textual similarity.

    Attributes:
        numbers: published number for each of ``tasks``.
        quoted: whether the paper quotes it from other work.
        preset: preset that trains it; empty if none does.
        unmeasured: reason not to measure a row that the paper measured; empty for quoted rows and rows with a preset.
    """

    name: str
    numbers: tuple[float, ...]
    tasks: tuple[str, ...] = TASKS
    quoted: bool = False
    preset: str = ""
    unmeasured: str = ""

    @property
    def label(self) -> str:
        """Name, marked if the row is quoted."""
        return f"{self.name} {QUOTED}" if self.quoted else self.name

    @property
    def values(self) -> Mapping[str | None, float]:
        """The numbers by task."""
        return dict(zip(self.tasks, self.numbers, strict=True))


@dataclass(frozen=True)
class StsPaper:
    """A table of textual similarity: its paper, number, title and rows."""

    paper: str
    table: int
    title: str
    rows: tuple[PublishedSts, ...]


@dataclass(frozen=True)
class GoldRank:
    """A caption of table 3 of Gella et al. 2017, with the ranks of its image.

    Attributes:
        index: index among the comparable captions of its image: the number of its file in Multi30K minus one.
        ranks: rank of the image, by column of the table.
    """

    image_id: str
    language: str
    index: int
    text: str
    ranks: Mapping[str, int]


@dataclass(frozen=True)
class _RecallTable:
    """A table of recalls; rows are name, preset, language, measures by direction."""

    name: str
    portion: str
    rows: tuple[tuple[str, str, str, tuple[int | float, ...], tuple[int | float, ...]], ...]
    measures: tuple[str, ...] = ()

    def published(self) -> list[PublishedRow]:
        rows = []
        for name, preset, language, *directions in self.rows:
            numbers: dict[tuple[str, str], float] = {}
            for direction, values in zip(DIRECTIONS, directions, strict=True):
                numbers |= {(direction, measure): value for measure, value in zip(self.measures, values, strict=bool(values))}
            rows.append(PublishedRow(self.name, name, preset, language, self.portion, numbers))
        return rows


@dataclass(frozen=True)
class _Paper:
    tables: tuple[_RecallTable, ...]
    sts: StsPaper | None = None
    ensembles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gold_columns: Mapping[str, str] = field(default_factory=dict)
    gold_ranks: tuple[GoldRank, ...] = ()


_PAPERS: Mapping[str, _Paper] = {
    paper: convert(parse_toml((_FOLDER / f"{paper}.toml").read_text(encoding="utf-8")), _Paper, paper) for paper in PAPERS
}

ENSEMBLES = _PAPERS["huang2019"].ensembles
"""Presets of the members of each ensemble; runs with the same seed are scored together."""

STS_PAPERS = {name: paper.sts for name, paper in _PAPERS.items() if paper.sts is not None}
"""Tables of textual similarity, by paper."""

GOLD_COLUMNS, GOLD_RANKS = _PAPERS["gella2017"].gold_columns, _PAPERS["gella2017"].gold_ranks
"""Columns of table 3 of Gella et al. 2017 with their presets (``{}`` is the language), and its lines."""


def rows_of_paper(paper: str) -> tuple[PublishedRow, ...]:
    """Return all rows of a paper's tables of recalls, in their order."""
    return tuple(row for table in _PAPERS[paper].tables for row in table.published())


def presets_of_paper(paper: str) -> tuple[str, ...]:
    """Return the presets of a paper's rows and of ensemble members, ensembles last."""
    names = [row.preset for row in rows_of_paper(paper)] + [name for names in _sts_presets(paper).values() for name in names]
    singles = [single for name in names for single in ENSEMBLES.get(name, (name,))]
    return tuple(dict.fromkeys([*singles, *(name for name in names if name in ENSEMBLES)]))


def presets_of_table(paper: str, table: int) -> tuple[str, ...]:
    """Return the distinct presets of a table's rows.

    Raises:
        UsageError: the paper has no such table with presets.
    """
    presets: dict[int, list[str]] = {}
    for row in rows_of_paper(paper):
        kind, _, number = row.table.partition(" ")
        if kind == "table":
            presets.setdefault(int(number), []).append(row.preset)
    if paper == "gella2017":
        presets[3] = [preset.format(rank.language) for preset in GOLD_COLUMNS.values() for rank in GOLD_RANKS]
    presets |= _sts_presets(paper)
    if table not in presets:
        raise UsageError(f"--table is {table}, but the tables of {paper} are {', '.join(map(str, sorted(presets)))}")
    return tuple(dict.fromkeys(presets[table]))


def _sts_presets(paper: str) -> dict[int, list[str]]:
    """Return the presets of a paper's table of textual similarity, if any, by number."""
    papers = [STS_PAPERS[paper]] if paper in STS_PAPERS else []
    return {sts.table: [row.preset for row in sts.rows if row.preset] for sts in papers}

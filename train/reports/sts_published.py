"""What the papers report of semantic textual similarity: Pearson's r, times 100, on three data sets of the shared tasks.

Gella, Sennrich, Keller, Lapata (2017), table 4, and Huang, Chang, Hauptmann (2019), table 2; as printed, although they differ in
the best system of 2012. The baseline is word overlap, see `train.evaluation.sts`.
"""

from __future__ import annotations

from dataclasses import dataclass

from train.evaluation.sts_data import StsPairs

TASKS = ("MSRvid 2012", "images 2014", "images 2015")
"""The data sets of the shared tasks, in the order of the columns in both papers."""

_PAIRS = 750  # In each of them.
_TOLERANCE = 0.2  # The baseline is printed with one decimal; this leaves room for how it was rounded.


@dataclass(frozen=True)
class PublishedSts:
    """A row of a paper's table.

    Attributes:
        name: name of the row.
        values: the numbers, in the order of `TASKS`; None if the paper has none.
        quoted: whether the paper quotes it from other work.
        preset: the preset that trains it here; empty if none does.
    """

    name: str
    values: tuple[float | None, ...]
    quoted: bool = False
    preset: str = ""


@dataclass(frozen=True)
class StsPaper:
    """A table of a paper.

    Attributes:
        paper: the paper, as in `train.reports.published.PAPERS`.
        table: number of the table.
        title: how it is called.
        rows: its rows, in their order.
    """

    paper: str
    table: int
    title: str
    rows: tuple[PublishedSts, ...]


STS_PAPERS = (
    StsPaper(
        "gella2017",
        4,
        "Gella et al. 2017, table 4",
        (
            PublishedSts("Shared task baseline", (29.9, 51.3, 60.4), quoted=True),
            PublishedSts("STS best system", (87.3, 83.4, 86.4), quoted=True),
            PublishedSts("GRAN (Wieting et al.)", (83.7, 84.5, 85.0), quoted=True),
            PublishedSts("MLMME (Calixto et al.)", (None, 72.7, 79.7), quoted=True, preset="mlmme"),
            PublishedSts("VSE", (80.6, 82.7, 89.6), preset="gella2017/vse-en"),
            PublishedSts("OE", (82.2, 84.1, 90.8), preset="gella2017/oe-en"),
            PublishedSts("PIVOT-SYM", (80.5, 81.8, 89.2), preset="gella2017/pivot-sym"),
            PublishedSts("PARALLEL-SYM", (82.0, 81.4, 90.4), preset="gella2017/parallel-sym"),
            PublishedSts("PIVOT-ASYM", (83.1, 83.8, 90.3), preset="gella2017/pivot-asym"),
            PublishedSts("PARALLEL-ASYM", (84.6, 84.5, 91.5), preset="gella2017/parallel-asym"),
        ),
    ),
    StsPaper(
        "huang2019",
        2,
        "Huang et al. 2019, table 2",
        (
            PublishedSts("STS baseline", (29.9, 51.3, 60.4), quoted=True),
            PublishedSts("STS best system", (86.3, 83.4, 86.4), quoted=True),
            PublishedSts("GRAN (Wieting et al.)", (83.7, 84.5, 85.0), quoted=True),
            PublishedSts("VSE (Kiros et al.)", (80.6, 82.7, 89.6), quoted=True, preset="gella2017/vse-en"),
            PublishedSts("OE (Vendrov et al.)", (82.2, 84.1, 90.8), quoted=True, preset="gella2017/oe-en"),
            PublishedSts("DAN (Nam et al.)", (84.1, 84.3, 90.8), preset="dan"),
            PublishedSts("VSE++ (Faghri et al.)", (84.5, 84.8, 91.2), preset="vsepp"),
            # It has no vectors of sentences; how it was measured is not said.
            PublishedSts("SCAN (Lee et al.)", (84.0, 83.9, 90.7)),
            PublishedSts("PIVOT (Gella et al.)", (84.6, 84.5, 91.5), quoted=True, preset="gella2017/parallel-asym"),
            PublishedSts("Ours (w/ Random)", (85.8, 87.8, 91.5), preset="huang2019/mha-d"),
            PublishedSts("Ours (w/ FastText)", (86.2, 88.3, 91.8), preset="huang2019/mha-d-fasttext"),
            PublishedSts("Ours (w/ BERT)", (86.4, 88.0, 91.7), preset="huang2019/mha-d-bert"),
        ),
    ),
)
"""The papers' tables."""


def task_of(pairs: StsPairs, baseline: float | None) -> int | None:
    """Return which of `TASKS` a data set is, by what the papers themselves say of them; None if it is another one.

    Files are called alike (``STS.input.images.txt`` in 2014 and in 2015), and the files of the training data as those of the test.

    Args:
        pairs: the data set.
        baseline: Pearson's r of word overlap on it, times 100.
    """
    if baseline is None or len(pairs) != _PAIRS:
        return None
    published = STS_PAPERS[0].rows[0].values
    return next(
        (number for number, value in enumerate(published) if value is not None and abs(value - baseline) <= _TOLERANCE), None
    )

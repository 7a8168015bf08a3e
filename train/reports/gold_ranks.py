"""Measured table 3 of Gella et al. 2017: image ranks of single captions.

The paper shows two images with a German and an English caption each. They are "a few examples where PIVOT-ASYM and PARALLEL-ASYM
models performed better on both the languages compared to baseline order embedding model". The report has these four captions, if
the dataset holds them, with the published ranks. With several runs of a row, a rank is the median over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np

from schemas.console.tables import ABSENT, Cell, Row, Table, markdown_document, number_columns
from schemas.errors import DatasetError
from schemas.keys import CaptionKey
from schemas.parameters import untrained_remark
from train.data.splits import TEST_SPLITS
from train.evaluation.ranks import Queries
from train.reports.published import GOLD_COLUMNS, GOLD_RANKS, GoldRank
from train.reports.row_results import read_row

_LANGUAGES = ("de", "en")


@dataclass(frozen=True)
class RankedCaption:
    """A caption of the paper, with the ranks of its image by column, one a run."""

    gold: GoldRank
    ranks: Mapping[str, tuple[int, ...]]

    def rank_text(self, column: str) -> str:
        """Return the median of the ranks, and their range in brackets if runs differ."""
        ranks = self.ranks.get(column, ())
        if not ranks:
            return ABSENT
        spread = f" [{min(ranks)}–{max(ranks)}]" if min(ranks) < max(ranks) else ""
        return f"{median(ranks):g}{spread}"


@dataclass(frozen=True)
class GoldRanks:
    """Captions of table 3 of Gella et al. 2017, with measured and published ranks."""

    images: int
    runs: Mapping[str, int]  # Numbers of runs by preset.
    published: tuple[RankedCaption, ...]
    untrained: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        published = [{**vars(line.gold), "published": line.gold.ranks, "ranks": line.ranks} for line in self.published]
        return {"paper": "gella2017", "table": "table 3", **vars(self), "published": published}

    def to_tables(self) -> list[Table]:
        """Return a table of ranks of single captions."""
        rows: list[Row] = []
        for line in self.published:
            cells = (Cell(line.rank_text(name), line.gold.ranks.get(name)) for name in GOLD_COLUMNS)
            rows.append(((f"{line.gold.language}: {line.gold.text}", f"  image {line.gold.image_id}"), *cells))
        return [Table(["rank of the right image", *number_columns(*GOLD_COLUMNS)], rows, "Table 3: the captions of the paper")]

    def to_markdown(self) -> str:
        """Return the tables with notes as Markdown."""
        notes = [
            f"Rank of the image of a caption among {self.images:,} test images, the published one in "
            "brackets; OE is the row of the caption's language alone.",
            f"Runs: {', '.join(f'{preset} {count}' for preset, count in self.runs.items())}. Of several, the median rank is "
            "shown, with the least and the greatest in square brackets.",
            "The paper chooses images on which PIVOT and PARALLEL are better than OE in both languages: they show the best.",
            *([f"{remark}."] if (remark := untrained_remark(self.untrained)) else []),
        ]
        return markdown_document("gella2017, table 3: ranks of the right image", notes, self.to_tables())


def gold_ranks(output: str) -> GoldRanks:
    """Rank the images of the test captions of 2016 by the runs of table 3.

    Ranks are those that ``reproduce`` wrote into the output folder. Rows without a result are left out.

    Raises:
        DatasetError: no row of the table is trained.
    """
    read = cache(partial(read_row, output))  # A row can have both languages.
    columns: dict[str, dict[str, Queries]] = {}
    runs: dict[str, int] = {}
    untrained: dict[str, None] = {}
    for column, pattern in GOLD_COLUMNS.items():
        for language in _LANGUAGES:
            row = read(pattern.format(language))
            if queries := row.ranks.get((language, "comparable", TEST_SPLITS[0], "text_to_image")):
                runs[row.preset] = len(queries.ranks)
                untrained |= dict.fromkeys(row.untrained)
                columns.setdefault(language, {})[column] = queries
    if not runs:
        raise DatasetError(
            f"{output!r} holds no trained row of table 3 (gella2017/oe-de, oe-en, pivot-asym, "
            "parallel-asym): train them with 'imagepivot reproduce gella2017 --table 3'"
        )
    images = max(len(np.unique(queries.images)) for by_column in columns.values() for queries in by_column.values())
    published = []
    for rank in GOLD_RANKS:
        caption_id = str(CaptionKey(rank.image_id, rank.language, "comparable", rank.index))
        by_column = columns.get(rank.language, {}).items()
        ranks = {column: tuple(queries.ranks[:, queries.ids == caption_id].ravel().tolist()) for column, queries in by_column}
        if any(ranks.values()):
            published.append(RankedCaption(rank, ranks))
    return GoldRanks(images, runs, tuple(published), tuple(untrained))

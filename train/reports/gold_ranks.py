"""Measured table 3 of Gella et al. 2017: image ranks of single captions.

The paper shows two images with a German and an English caption each. They are "a few examples where PIVOT-ASYM and PARALLEL-ASYM
models performed better on both the languages compared to baseline order embedding model". The report has

* these four captions, if the dataset holds them, with the published ranks;
* examples chosen by the paper's criterion: the gain of a caption is its rank under OE over the worse of its ranks under PIVOT and
  PARALLEL. The gain of an image is the smaller of its best German and its best English caption's. The images with the greatest
  gains above 1 are shown;
* for all captions, how often each model is better and worse than OE, since examples show only the best.

With several runs of a row, a rank is the median over them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np

from schemas.console.tables import ABSENT, Cell, Row, Table, markdown_document, number_columns
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.keys import CaptionKey
from schemas.parameters import untrained_remark
from train.data.captions import read_captions
from train.data.splits import TEST_SPLITS
from train.evaluation.ranks import Queries
from train.jobs import Corpus
from train.reports.figure_examples import shown_caption
from train.reports.published import GOLD_COLUMNS, GOLD_RANKS
from train.reports.row_results import read_row

_LANGUAGES = ("de", "en")
_BASELINE = next(iter(GOLD_COLUMNS))
_EXAMPLES = 2  # As many images as in the paper.


@dataclass(frozen=True)
class RankedCaption:
    """A caption as query.

    Attributes:
        index: index among the comparable captions of its image.
        text: the caption as printed in the paper, or its tokens.
        ranks: rank of its image under each run, by column.
        published: rank in the paper, by column; empty for other captions.
    """

    image_id: str
    language: str
    index: int
    text: str
    ranks: Mapping[str, tuple[int, ...]]
    published: Mapping[str, int] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """The gain over OE; 0 without a rank in each column."""
        baseline, *others = (median(self.ranks.get(column, (0,))) for column in GOLD_COLUMNS)
        return baseline / max(others) if all(others) else 0.0

    def rank_text(self, column: str) -> str:
        """Return the median of the ranks, and their range in brackets if runs differ."""
        ranks = self.ranks.get(column, ())
        if not ranks:
            return ABSENT
        spread = f" [{min(ranks)}–{max(ranks)}]" if min(ranks) < max(ranks) else ""
        return f"{median(ranks):g}{spread}"


@dataclass(frozen=True)
class RankComparison:
    """Comparison of a column with OE over all captions of a language.

    Attributes:
        better: share of captions with a smaller rank than under OE, in percent; None for OE itself, or without OE.
        worse: share of captions with a greater rank than under OE, in percent; None as ``better``.
    """

    language: str
    column: str
    median_rank: float
    better: float | None
    worse: float | None
    captions: int


@dataclass(frozen=True)
class GoldRanks:
    """Captions of table 3 of Gella et al. 2017, and examples by its criterion."""

    images: int
    runs: Mapping[str, int]  # Numbers of runs by preset.
    published: tuple[RankedCaption, ...]
    examples: tuple[RankedCaption, ...]
    comparisons: tuple[RankComparison, ...]
    untrained: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = asdict(self)
        comparisons = plain.pop("comparisons")
        return {"paper": "gella2017", "table": "table 3", **plain, "all": comparisons}

    def to_tables(self) -> list[Table]:
        """Return tables of ranks of single captions, and of all captions."""
        rows: list[Row] = []
        for comparison in self.comparisons:
            shares = (None if share is None else f"{share:.1f} %" for share in (comparison.better, comparison.worse))
            group = comparison.language, comparison.column, comparison.captions
            rows.append((*group, f"{comparison.median_rank:g}", *shares))
        columns = ("language", "row", *number_columns("captions", "median rank", "better than OE", "worse", spec=","))
        return [
            _caption_table("Table 3: the captions of the paper", self.published),
            _caption_table("Table 3: where PIVOT and PARALLEL gain most over OE, as the paper chooses", self.examples),
            Table(columns, rows, "Table 3: all captions"),
        ]

    def to_markdown(self) -> str:
        """Return the tables with notes as Markdown."""
        notes = [
            f"Rank of the image of a caption among {self.images:,} test images, the published one in brackets; OE is the row of "
            "the caption's language alone.",
            f"Runs: {', '.join(f'{preset} {count}' for preset, count in self.runs.items())}. Of several, the median rank is "
            "shown, with the least and the greatest in square brackets.",
            "By the paper's rule, those images are chosen on which PIVOT and PARALLEL gain most over OE in both languages: they "
            "show the best, not the usual.",
            *([f"{remark}."] if (remark := untrained_remark(self.untrained)) else []),
        ]
        return markdown_document("gella2017, table 3: ranks of the right image", notes, self.to_tables())


def gold_ranks(output: str, corpus: Corpus) -> GoldRanks:
    """Rank the images of the test captions of 2016 by the runs of table 3.

    Ranks are those that ``reproduce`` wrote into the output folder. Rows without a result are left out. The corpus is the one that
    the rows were trained on.

    Raises:
        DatasetError: no row of the table is trained, or the rows were trained on another corpus.
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
            f"{output!r} holds no trained row of table 3 (gella2017/oe-de, oe-en, pivot-asym, parallel-asym): train them with "
            "'imagepivot reproduce gella2017 --table 3'"
        )
    captions = _captions(columns, corpus)
    images = max(
        len({caption.image_id for caption in captions.values() if caption.language == language}) for language in columns
    )
    shown = ((CaptionKey(rank.image_id, rank.language, "comparable", rank.index), rank) for rank in GOLD_RANKS)
    published = [replace(captions[key], text=rank.text, published=rank.ranks) for key, rank in shown if key in captions]
    examples = _examples(list(captions.values()))
    return GoldRanks(images, runs, tuple(published), examples, tuple(_compare(columns)), tuple(untrained))


def _captions(columns: Mapping[str, Mapping[str, Queries]], corpus: Corpus) -> dict[CaptionKey, RankedCaption]:
    """Return the captions by key, from queries by language and column."""
    words = open_dataset(corpus.vocabulary, kind="vocabulary").vocabulary().tokens
    portions = dict.fromkeys(columns, ("comparable",))
    captions = read_captions(open_dataset(corpus.captions, kind="encoded"), split=TEST_SPLITS[0], portions=portions)
    shown = {str(caption.key): caption for caption in (shown_caption(captions, row, words) for row in range(len(captions)))}
    ranked: dict[CaptionKey, RankedCaption] = {}
    for language, by_column in columns.items():
        queries = next(iter(by_column.values()))
        if missing := set(queries.ids) - shown.keys():
            raise DatasetError(
                f"{corpus.captions!r} lacks the caption {min(missing)}, which rows of table 3 ranked: give the captions that they "
                "were trained on"
            )
        for position, caption_id in enumerate(queries.ids):
            ranks = {column: tuple(stored.ranks[:, position].tolist()) for column, stored in by_column.items()}
            key, tokens = shown[caption_id].key, shown[caption_id].tokens
            ranked[key] = RankedCaption(
                key.image_id, language, key.index, " ".join(tokens[1:-1]), ranks
            )  # Without <start>, <end>.
    return ranked


def _examples(captions: Sequence[RankedCaption]) -> tuple[RankedCaption, ...]:
    """Return a caption in each language of the images with the greatest gains."""
    best: dict[str, dict[str, RankedCaption]] = {}  # By image and language.
    for caption in sorted(captions, key=lambda caption: -caption.gain):
        if caption.gain > 1:
            best.setdefault(caption.image_id, {}).setdefault(caption.language, caption)
    images = [image_id for image_id, by_language in best.items() if len(by_language) == len(_LANGUAGES)]
    images.sort(key=lambda image_id: (-min(caption.gain for caption in best[image_id].values()), image_id))
    return tuple(best[image_id][language] for image_id in images[:_EXAMPLES] for language in _LANGUAGES)


def _compare(columns: Mapping[str, Mapping[str, Queries]]) -> Iterator[RankComparison]:
    """Compare each column with OE over all captions."""
    for language, by_column in columns.items():
        medians = {column: np.median(queries.ranks, axis=0) for column, queries in by_column.items()}
        for column, ranks in medians.items():
            better = worse = None
            if column != _BASELINE and _BASELINE in medians:
                better = round(100 * float(np.mean(ranks < medians[_BASELINE])), 1)
                worse = round(100 * float(np.mean(ranks > medians[_BASELINE])), 1)
            yield RankComparison(language, column, float(np.median(ranks)), better, worse, len(ranks))


def _caption_table(title: str, captions: Sequence[RankedCaption]) -> Table:
    rows: list[Row] = []
    for caption in captions:
        cells = (Cell(caption.rank_text(name), caption.published.get(name)) for name in GOLD_COLUMNS)
        rows.append(((f"{caption.language}: {caption.text}", f"  image {caption.image_id}"), *cells))
    return Table(["rank of the right image", *number_columns(*GOLD_COLUMNS)], rows, title)

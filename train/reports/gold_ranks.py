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

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from train.data.captions import read_captions
from train.data.splits import TEST_SPLITS
from train.jobs import Corpus
from train.reports.published import GOLD_COLUMNS, GOLD_RANKS
from train.reports.row_results import read_row_ranks
from train.reports.significance import Queries

_LANGUAGES = ("de", "en")
_BASELINE, *_OTHERS = GOLD_COLUMNS
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
    published: Mapping[str, int]

    def rank_text(self, column: str) -> str:
        """Return the median of the ranks, and their range in brackets if runs differ."""
        ranks = self.ranks.get(column, ())
        if not ranks:
            return "–"
        spread = f" [{min(ranks)}–{max(ranks)}]" if min(ranks) < max(ranks) else ""
        return f"{median(ranks):g}{spread}"


@dataclass(frozen=True)
class Tally:
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
    tallies: tuple[Tally, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = asdict(self)
        tallies = plain.pop("tallies")
        return {"paper": "gella2017", "table": "table 3", **plain, "all": tallies}


def gold_ranks(output: str, corpus: Corpus) -> GoldRanks:
    """Rank the images of the test captions of 2016 by the runs of table 3.

    Ranks are those that ``reproduce`` wrote into the output folder. Rows without a result are left out. The corpus is the one that
    the rows were trained on.

    Raises:
        DatasetError: no row of the table is trained, or the rows were trained on another corpus.
    """
    columns: dict[str, dict[str, Queries]] = {}
    runs: dict[str, int] = {}
    for column, pattern in GOLD_COLUMNS.items():
        for language in _LANGUAGES:
            preset = pattern.format(language)
            if queries := read_row_ranks(output, preset).get((language, "comparable", "text_to_image")):
                runs[preset] = len(queries.ranks)
                columns.setdefault(language, {})[column] = queries
    if not runs:
        raise DatasetError(
            f"{output!r} holds no trained row of table 3 (gella2017/oe-de, oe-en, pivot-asym, parallel-asym): train them with "
            "'imagepivot reproduce gella2017 --table 3'"
        )
    queries_of = {language: next(iter(by_column.values())) for language, by_column in columns.items()}
    images = max(len(np.unique(queries.images)) for queries in queries_of.values())
    results = _Results(columns, queries_of, _read_texts(corpus, queries_of))
    return GoldRanks(images, runs, tuple(results.published()), tuple(results.examples()), tuple(results.tallies()))


def _read_texts(corpus: Corpus, queries_of: Mapping[str, Queries]) -> dict[str, str]:
    """Read the tokens of captions by id, joined by spaces."""
    tokens = open_dataset(corpus.vocabulary, kind="vocabulary").vocabulary().tokens
    portions = dict.fromkeys(queries_of, ("comparable",))
    captions = read_captions(open_dataset(corpus.captions, kind="encoded"), split=TEST_SPLITS[0], portions=portions)
    texts = {}
    for row, caption_id in enumerate(captions.ids()):
        ids = captions.token_ids[captions.offsets[row] : captions.offsets[row + 1]][1:-1]  # Without <start> and <end>.
        texts[caption_id] = " ".join(tokens[token_id] for token_id in ids.tolist())
    if missing := {caption_id for queries in queries_of.values() for caption_id in queries.ids} - texts.keys():
        raise DatasetError(
            f"{corpus.captions!r} lacks the caption {min(missing)}, which rows of table 3 ranked: give the captions that they were "
            "trained on"
        )
    return texts


@dataclass(frozen=True)
class _Results:
    """Ranks by language and column, queries by language, and texts by caption id."""

    columns: Mapping[str, Mapping[str, Queries]]
    queries_of: Mapping[str, Queries]
    texts: Mapping[str, str]

    def published(self) -> list[RankedCaption]:
        """Return the captions of the paper that the dataset holds."""
        shown = []
        for rank in GOLD_RANKS:
            caption_id = f"{rank.image_id}/{rank.language}/comparable/{rank.index}"
            if rank.language in self.queries_of and caption_id in self.queries_of[rank.language].ids:
                position = self.queries_of[rank.language].ids.tolist().index(caption_id)
                shown.append(self._caption(rank.language, position, rank.text, rank.ranks))
        return shown

    def examples(self) -> list[RankedCaption]:
        """Return a caption in each language of the images with the greatest gains."""
        if any(set(self.columns.get(language, ())) < set(GOLD_COLUMNS) for language in _LANGUAGES):
            return []
        best: dict[str, dict[str, tuple[float, int]]] = {}  # By language and image: the greatest gain, and its position.
        for language in _LANGUAGES:
            medians, best[language] = self._medians(language), {}
            gains = medians[_BASELINE] / np.maximum(*(medians[name] for name in _OTHERS))
            for position, (image_id, gain) in enumerate(zip(self.queries_of[language].images, gains.tolist(), strict=True)):
                if gain > best[language].get(image_id, (1.0, 0))[0]:
                    best[language][image_id] = gain, position
        common = set.intersection(*(set(by_image) for by_image in best.values()))
        chosen = sorted(common, key=lambda image_id: (-min(by_image[image_id][0] for by_image in best.values()), image_id))
        return [
            self._caption(language, by_image[image_id][1])
            for image_id in chosen[:_EXAMPLES]
            for language, by_image in best.items()
        ]

    def tallies(self) -> list[Tally]:
        """Compare each column with OE over all captions."""
        tallies = []
        for language in self.columns:
            medians = self._medians(language)
            for column, ranks in medians.items():
                better = worse = None
                if column != _BASELINE and _BASELINE in medians:
                    better = round(100 * float(np.mean(ranks < medians[_BASELINE])), 1)
                    worse = round(100 * float(np.mean(ranks > medians[_BASELINE])), 1)
                tallies.append(Tally(language, column, float(np.median(ranks)), better, worse, len(ranks)))
        return tallies

    def _medians(self, language: str) -> dict[str, np.ndarray]:
        return {column: np.median(queries.ranks, axis=0) for column, queries in self.columns[language].items()}

    def _caption(
        self, language: str, position: int, text: str = "", published: Mapping[str, int] | None = None
    ) -> RankedCaption:
        queries, columns = self.queries_of[language], self.columns[language]
        caption_id = queries.ids[position]
        ranks = {column: tuple(stored.ranks[:, position].tolist()) for column, stored in columns.items()}
        index = int(caption_id.rpartition("/")[2])
        return RankedCaption(queries.images[position], language, index, text or self.texts[caption_id], ranks, published or {})

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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from train.data.captions import Captions, read_captions
from train.data.splits import TEST_SPLITS
from train.evaluation.ranks import caption_ids
from train.jobs import Corpus
from train.reports.published import GOLD_COLUMNS, GOLD_RANKS
from train.reports.row_results import read_row_ranks

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
    ranks: dict[str, dict[str, np.ndarray]] = {language: {} for language in _LANGUAGES}
    runs: dict[str, int] = {}
    captions: dict[str, Captions] = {}
    for column, pattern in GOLD_COLUMNS.items():
        for preset in dict.fromkeys(pattern.format(language) for language in _LANGUAGES):
            for (language, portion, direction), queries in read_row_ranks(output, preset).items():
                if language in _LANGUAGES and (portion, direction) == ("comparable", "text_to_image"):
                    runs[preset] = len(queries.ranks)
                    ranks[language][column] = queries.ranks
                    captions[language] = captions.get(language) or _captions_of(corpus, language, queries.ids)
    if not runs:
        raise DatasetError(
            f"{output!r} holds no trained row of table 3 (gella2017/oe-de, oe-en, pivot-asym, parallel-asym): train them with "
            "'imagepivot reproduce gella2017 --table 3'"
        )
    results = _Results(captions, ranks, open_dataset(corpus.vocabulary, kind="vocabulary").vocabulary().tokens)
    return GoldRanks(
        images=max(len(np.unique(language_captions.images)) for language_captions in captions.values()),
        runs=runs,
        published=tuple(results.published()),
        examples=tuple(results.examples()),
        tallies=tuple(results.tallies()),
    )


def _captions_of(corpus: Corpus, language: str, ids: np.ndarray) -> Captions:
    """Read the captions with sorted ids, in this order."""
    portions = {language: ("comparable",)}
    captions = read_captions(open_dataset(corpus.captions, kind="encoded"), split=TEST_SPLITS[0], portions=portions)
    rows = dict(zip(caption_ids(captions, np.arange(len(captions))), range(len(captions)), strict=True))
    if missing := set(ids) - rows.keys():
        raise DatasetError(
            f"{corpus.captions!r} lacks the caption {min(missing)}, which rows of table 3 ranked: give the captions that they were "
            "trained on"
        )
    return captions.select(np.array([rows[caption_id] for caption_id in ids]))


@dataclass(frozen=True)
class _Results:
    """Captions by language, and ranks ``[runs, captions]`` by language and column."""

    captions: Mapping[str, Captions]
    ranks: Mapping[str, Mapping[str, np.ndarray]]
    tokens: Sequence[str]

    def published(self) -> list[RankedCaption]:
        """Return the captions of the paper that the dataset holds."""
        shown = []
        for rank in GOLD_RANKS:
            captions = self.captions.get(rank.language)
            if captions is not None and rank.image_id in captions.image_ids:
                matches = (captions.images == captions.image_ids.index(rank.image_id)) & (captions.indices == rank.index)
                shown += [self._caption(rank.language, row, rank.text, rank.ranks) for row in np.flatnonzero(matches).tolist()]
        return shown

    def examples(self) -> list[RankedCaption]:
        """Return a caption in each language of the images with the greatest gains."""
        if any(set(self.ranks[language]) < set(GOLD_COLUMNS) for language in _LANGUAGES):
            return []
        best: dict[str, dict[str, tuple[float, int]]] = {}  # By language and image: the greatest gain, and its row.
        for language in _LANGUAGES:
            captions, medians = self.captions[language], self._medians(language)
            gains = medians[_BASELINE] / np.maximum(*(medians[name] for name in _OTHERS))
            best[language] = {}
            for row, (image, gain) in enumerate(zip(captions.images.tolist(), gains.tolist(), strict=True)):
                image_id = captions.image_ids[image]
                if gain > best[language].get(image_id, (1.0, 0))[0]:
                    best[language][image_id] = gain, row
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
        for language in self.captions:
            medians = self._medians(language)
            for column, ranks in medians.items():
                better = worse = None
                if column != _BASELINE and _BASELINE in medians:
                    better = round(100 * float(np.mean(ranks < medians[_BASELINE])), 1)
                    worse = round(100 * float(np.mean(ranks > medians[_BASELINE])), 1)
                tallies.append(Tally(language, column, float(np.median(ranks)), better, worse, len(ranks)))
        return tallies

    def _medians(self, language: str) -> dict[str, np.ndarray]:
        return {column: np.median(ranks, axis=0) for column, ranks in self.ranks[language].items()}

    def _caption(self, language: str, row: int, text: str = "", published: Mapping[str, int] | None = None) -> RankedCaption:
        captions = self.captions[language]
        ids = captions.token_ids[captions.offsets[row] : captions.offsets[row + 1]][1:-1]  # Without <start> and <end>.
        return RankedCaption(
            image_id=captions.image_ids[captions.images[row]],
            language=language,
            index=int(captions.indices[row]),
            text=text or " ".join(self.tokens[token_id] for token_id in ids.tolist()),
            ranks={column: tuple(ranks[:, row].tolist()) for column, ranks in self.ranks[language].items()},
            published=published or {},
        )

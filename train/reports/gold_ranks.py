"""Table 3 of Gella et al. 2017, measured: the rank of the right image for single captions, under the rows with order similarity.

The paper shows two images, each with a German and an English caption, as "a few examples where PIVOT-ASYM and PARALLEL-ASYM models
performed better on both the languages compared to baseline order embedding model". The report has

* these four captions, where the captions hold them, with the published ranks;
* examples that are chosen as the paper says, by a rule: the gain of a caption is the rank under OE over the worse one of the ranks
  under PIVOT and PARALLEL; that of an image is the smaller one of its best German and its best English caption's. The images with
  the greatest gains are shown, if both are above 1;
* for all captions, how often each model is better than OE and how often worse, since such examples show only what is best.

With several runs of a row, a rank is the median over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from schemas.errors import DatasetError
from train.data.captions import Captions
from train.data.splits import TEST_SPLITS, SplitData, open_data
from train.devices import resolve_device
from train.evaluation.evaluation import Count, ensemble_ranks, no_progress
from train.jobs import Corpus
from train.reports.published import GOLD_COLUMNS, GOLD_RANKS
from train.reports.row_results import finished_runs
from train.runs.run import Run, open_run

_LANGUAGES = ("de", "en")
_BASELINE, *_OTHERS = GOLD_COLUMNS
_EXAMPLES = 2  # As many images as in the paper.

_Ranks: TypeAlias = Mapping[str, Mapping[str, np.ndarray]]
"""By language and column: ranks ``[runs, captions]``."""


@dataclass(frozen=True)
class RankedCaption:
    """A caption as query.

    Attributes:
        index: its index among the comparable captions of its image.
        text: the caption; as the paper prints it, or its tokens.
        ranks: by column, the rank of its image under each run.
        published: by column, the rank in the paper; empty for captions that it does not show.
    """

    image_id: str
    language: str
    index: int
    text: str
    ranks: Mapping[str, tuple[int, ...]]
    published: Mapping[str, int]

    def rank_text(self, column: str) -> str:
        """Median of the ranks, with the least and the greatest in brackets where runs differ."""
        ranks = self.ranks.get(column, ())
        if not ranks:
            return "–"
        spread = f" [{min(ranks)}–{max(ranks)}]" if min(ranks) < max(ranks) else ""
        return f"{median(ranks):g}{spread}"


@dataclass(frozen=True)
class Tally:
    """How a column compares with OE over all captions of a language.

    Attributes:
        median_rank: median of the ranks.
        better: share of the captions with a smaller rank than under OE, in percent; None for OE itself, or without it.
        worse: share of those with a greater one, likewise.
    """

    language: str
    column: str
    median_rank: float
    better: float | None
    worse: float | None
    captions: int


@dataclass(frozen=True)
class GoldRanks:
    """Table 3 of Gella et al. 2017: captions of the paper, and those chosen as it says; ``runs`` counts by preset."""

    images: int
    runs: Mapping[str, int]
    published: tuple[RankedCaption, ...]
    examples: tuple[RankedCaption, ...]
    tallies: tuple[Tally, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = asdict(self)
        tallies = plain.pop("tallies")
        return {"paper": "gella2017", "table": "table 3", **plain, "all": tallies}


def gold_ranks(
    output: str,
    corpus: Corpus,
    *,
    device: str = "cpu",
    allow_missing_features: bool = False,
    count: Count = no_progress,
) -> GoldRanks:
    """Rank the images of the test captions of 2016 under the trained rows of table 3 in an output folder of ``reproduce``.

    Rows without a result are left out. The corpus is the one that they were trained on.

    Raises:
        DatasetError: no row of the table is trained, or the data is not what the rows were trained on.
    """
    ranks: dict[str, dict[str, np.ndarray]] = {language: {} for language in _LANGUAGES}
    runs: dict[str, int] = {}
    captions: dict[str, Captions] = {}
    words: tuple[str, ...] = ()
    for column, pattern in GOLD_COLUMNS.items():
        for preset in dict.fromkeys(pattern.format(language) for language in _LANGUAGES):
            of_runs: dict[str, list[np.ndarray]] = {}
            for folder in finished_runs(output, preset):
                run = open_run(folder, device=resolve_device(device))
                words = run.vocabulary.tokens
                data = _test_data(run, corpus, allow_missing_features)
                for language, found in ranks_of_captions(run, data, count=count).items():
                    captions[language] = data.captions.select(data.captions.rows_of(language))
                    of_runs.setdefault(language, []).append(found)
            if of_runs:
                runs[preset] = max(map(len, of_runs.values()))
            for language, values in of_runs.items():
                ranks[language][column] = np.stack(values)
    if not runs:
        raise DatasetError(
            f"{output!r} holds no trained row of table 3 (gella2017/oe-de, oe-en, pivot-asym, parallel-asym): train them with "
            "'imagepivot reproduce gella2017 --table 3'"
        )
    everything = _Found(captions, ranks, words)
    return GoldRanks(
        images=max(len(np.unique(of_language.images)) for of_language in captions.values()),
        runs=runs,
        published=tuple(everything.published()),
        examples=tuple(everything.examples()),
        tallies=tuple(everything.tallies()),
    )


def ranks_of_captions(run: Run, data: SplitData, *, count: Count = no_progress) -> dict[str, np.ndarray]:
    """Return, by language, the rank of each caption's image among the images that have captions in the language.

    Returns:
        int64 arrays in the order of ``data.captions.rows_of(language)``.
    """
    ranks = ensemble_ranks([(run.model, data)], count=count)
    return {language: of_language.text_to_image.cpu().numpy() for language, of_language in ranks.items()}


def _test_data(run: Run, corpus: Corpus, allow_missing_features: bool) -> SplitData:
    return open_data(
        corpus.captions,
        corpus.features,
        split=TEST_SPLITS[0],
        portions={language: ("comparable",) for language in run.model.languages if language in _LANGUAGES},
        l2=run.config.data.l2_features,
        expected={name: run.fingerprints[name] for name in ("vocabulary", "extractor")},
        allow_missing_features=allow_missing_features,
    )


@dataclass(frozen=True)
class _Found:
    """The captions of each language, their ranks, and the words of their token ids."""

    captions: Mapping[str, Captions]
    ranks: _Ranks
    words: Sequence[str]

    def published(self) -> list[RankedCaption]:
        """Return the captions of the paper that are there."""
        shown = []
        for rank in GOLD_RANKS:
            captions = self.captions.get(rank.language)
            if captions is not None and rank.image_id in captions.image_ids:
                here = (captions.images == captions.image_ids.index(rank.image_id)) & (captions.indices == rank.index)
                shown += [self._caption(rank.language, row, rank.text, rank.ranks) for row in np.flatnonzero(here).tolist()]
        return shown

    def examples(self) -> list[RankedCaption]:
        """Return a caption in each language of the images with the greatest gains."""
        if any(set(self.ranks[language]) < set(GOLD_COLUMNS) for language in _LANGUAGES):
            return []
        best: list[dict[str, tuple[float, int]]] = []  # By language: the greatest gain of each image, and its row.
        for language in _LANGUAGES:
            captions, medians = self.captions[language], self._medians(language)
            gains = medians[_BASELINE] / np.maximum(*(medians[name] for name in _OTHERS))
            of_images: dict[str, tuple[float, int]] = {}
            for row, (image, gain) in enumerate(zip(captions.images.tolist(), gains.tolist(), strict=True)):
                name = captions.image_ids[image]
                if gain > of_images.get(name, (1.0, 0))[0]:
                    of_images[name] = gain, row
            best.append(of_images)
        both = best[0].keys() & best[1].keys()
        chosen = sorted(both, key=lambda name: (-min(of_images[name][0] for of_images in best), name))[:_EXAMPLES]
        return [
            self._caption(language, of_images[name][1])
            for name in chosen
            for language, of_images in zip(_LANGUAGES, best, strict=True)
        ]

    def tallies(self) -> list[Tally]:
        """Compare the columns over all captions."""
        tallies = []
        for language in self.captions:
            medians = self._medians(language)
            for column, ranks in medians.items():
                better, worse = (
                    None
                    if column == _BASELINE or _BASELINE not in medians
                    else round(100 * float(np.mean(compare(ranks, medians[_BASELINE]))), 1)
                    for compare in _COMPARISONS
                )
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
            text=text or " ".join(self.words[number] for number in ids.tolist()),
            ranks={column: tuple(ranks[:, row].tolist()) for column, ranks in self.ranks[language].items()},
            published=published or {},
        )


_COMPARISONS: tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], ...] = (np.less, np.greater)

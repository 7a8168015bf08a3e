"""``imagepivot evaluate``: recall and median rank of a run, or an ensemble of runs, on a split, by language and portion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import numpy as np

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.overlaps import find_overlap
from train.data.captions import Captions, labels_of
from train.data.splits import TEST_SPLITS, MissingFeatures, SplitData, open_data
from train.devices import resolve_device
from train.evaluation.compatibility import check_members, check_tokens, expected_of
from train.evaluation.cross_lingual import CrossLingual, evaluate_cross_lingual
from train.evaluation.evaluation import Count, chance_in_folds, count_nothing, evaluate_folds
from train.evaluation.metrics import Retrieval
from train.jobs import EvaluateJob
from train.models.retrieval_model import RetrievalModel
from train.runs.run import Run, open_run

Remark = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Retrieval with the captions of one language and portion.

    Attributes:
        chance: recalls that a random order reaches, by direction; see `train.evaluation.chance`.
        missing_features: the images of the split that lack features and were left out; None if there are none.
        folds: number of folds that the images were ranked in, and that the numbers are means over.
        cross_lingual: by language, what these captions find among its captions; empty unless it was requested.
    """

    language: str
    portion: str
    split: str
    retrieval: Retrieval
    chance: Mapping[str, tuple[float, ...]]
    missing_features: MissingFeatures | None = None
    folds: int = 1
    cross_lingual: Mapping[str, CrossLingual] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        across = {language: result.to_dict() for language, result in self.cross_lingual.items()}
        return {
            "language": self.language,
            "portion": self.portion,
            "split": self.split,
            **self.retrieval.to_dict(),
            "chance": {direction: list(recalls) for direction, recalls in self.chance.items()},
            **({"folds": self.folds} if self.folds > 1 else {}),
            **({"missing_features": self.missing_features.to_dict()} if self.missing_features else {}),
            **({"cross_lingual": across} if across else {}),
        }


def evaluate_run(job: EvaluateJob, count: Count = count_nothing, remark: Remark = logger.warning) -> list[Score]:
    """Open runs and evaluate them; takes, returns and raises what `score_together` does, and raises what `open_run` does.

    ``remark`` receives a sentence about evaluated images that a run was trained on.
    """
    device = resolve_device(job.device)
    runs = [open_run(run, device=device) for run in job.runs]
    trained = {split for run in runs for split in run.config.data.splits}
    evaluated = {*(job.splits or TEST_SPLITS)} - trained
    overlap = find_overlap(
        open_dataset(job.captions, kind="encoded"), lambda splits: bool(splits & trained) and bool(splits & evaluated)
    )
    if overlap is not None:
        remark(overlap.remark)
    options = {name: value for name, value in vars(job).items() if name not in ("run", "device")}
    return score_together(runs, count=count, **options)


def score_run(run: Run, *, captions: str, features: str, **options: Any) -> list[Score]:
    """Evaluate an open run; takes, returns and raises what `score_together` does, for one run."""
    return score_together([run], captions=captions, features=features, **options)


def score_together(
    runs: Sequence[Run],
    *,
    captions: str,
    features: str,
    splits: Sequence[str] = (),
    languages: Sequence[str] = (),
    portion: str = "",
    memory_map: str | None = None,
    count: Count = count_nothing,
    allow_missing_features: bool = False,
    folds: int = 1,
    cross_lingual: bool = False,
    token_features: str = "",
) -> list[Score]:
    """Evaluate open runs as an ensemble: the score of an image and a caption is the mean of theirs.

    The captions of each split and portion are a test of their own and are never mixed.

    The runs are on one device. Arguments are as in `EvaluateJob`; without languages, those that all runs know are scored.

    Returns:
        One score per split, language and portion.

    Raises:
        DatasetError: the captions are in the ids of another vocabulary, the features come from another extractor, images lack
            features, there is no such split, or the runs were trained with different vocabularies or extractors.
        UsageError: a run does not know a language; there are no captions of the split, language or portion, fewer images than
            folds, or, with ``cross_lingual``, none of the same images in two languages.
    """
    known = check_members(runs)
    token_width = check_tokens(runs, token_features)
    who, knows = ("this run", "the run knows") if len(runs) == 1 else ("the ensemble", "all its runs know")
    unknown = [language for language in languages if language not in known]
    if unknown:
        raise UsageError(f"--languages names {', '.join(unknown)}, but {who} knows only {', '.join(known)}: give some of these")
    labels = labels_of(open_dataset(captions, kind="encoded"))
    chosen = _chosen_splits(labels, splits, captions)
    portions_of = {split: portions_in(labels, split, languages or sorted(known), portion) for split in chosen}
    empty = [split for split in chosen if not portions_of[split]]
    if len(empty) == len(chosen) or (splits and empty):
        raise UsageError(f"nothing to evaluate: {_listing(labels, empty)}, but {knows} only {', '.join(known)}")
    lacking = [language for language in languages if not any(language in portions for portions in portions_of.values())]
    if lacking:
        raise UsageError(f"nothing to evaluate in {', '.join(lacking)}: {_listing(labels, chosen)}")
    scores: list[Score] = []
    for split, portions in portions_of.items():
        if portions:
            data = {
                l2: open_data(
                    captions,
                    features,
                    split=split,
                    portions=portions,
                    l2=l2,
                    memory_map=memory_map,
                    expected=expected_of(runs),
                    allow_missing_features=allow_missing_features,
                    token_features=token_features,
                    token_width=token_width,
                )
                for l2 in dict.fromkeys(run.config.data.l2_features for run in runs)
            }
            members = [(run.model, data[run.config.data.l2_features]) for run in runs]
            found = [_score(members, language, name, folds, count) for language, names in portions.items() for name in names]
            scores += _ranked_cross_lingual(members, found, count) if cross_lingual else found
    if cross_lingual and not any(score.cross_lingual for score in scores):
        raise UsageError(
            "nothing to rank across languages: no portion has captions of the same images in two of the languages that are "
            "evaluated. Leave --cross-lingual out, or choose others with --languages, --portion and --split"
        )
    return scores


def portions_in(
    labels: Iterable[tuple[str, str, str]], split: str, languages: Iterable[str], portion: str = ""
) -> dict[str, tuple[str, ...]]:
    """Return the portions of each language in a split, without languages that have none.

    The labels are those of all captions, see `train.data.labels_of`. Languages keep their order; an empty portion is any.
    """
    pairs = sorted((language, name) for other, language, name in labels if other == split and portion in ("", name))
    portions = {language: tuple(name for other, name in pairs if other == language) for language in languages}
    return {language: names for language, names in portions.items() if names}


def _chosen_splits(labels: Collection[tuple[str, str, str]], splits: Sequence[str], captions: str) -> list[str]:
    available = sorted({split for split, _, _ in labels})
    for split in splits:
        if split not in available:
            raise DatasetError(f"{captions!r} has no captions of split {split!r}. It has: {', '.join(available)}")
    chosen = list(splits) or [split for split in TEST_SPLITS if split in available]
    if not chosen:
        raise UsageError(f"{captions!r} has no split {' or '.join(TEST_SPLITS)}: choose with --split of {', '.join(available)}")
    return chosen


def _listing(labels: Collection[tuple[str, str, str]], splits: Sequence[str]) -> str:
    """List languages and portions of splits, for messages."""
    return "; ".join(
        f"split {split!r} has languages and portions "
        + ", ".join(f"{language} {portion}" for other, language, portion in sorted(labels) if other == split)
        for split in splits
    )


def _score(members: Sequence[tuple[RetrievalModel, SplitData]], language: str, portion: str, folds: int, count: Count) -> Score:
    data = members[0][1]
    captions = data.captions
    chosen = captions.select((captions.languages == captions.language_names.index(language)) & _of_portion(captions, portion))
    of_portion = [(model, replace(own, captions=chosen)) for model, own in members]  # All have the same captions.
    return Score(
        language=language,
        portion=portion,
        split=captions.split,
        retrieval=evaluate_folds(of_portion, folds, count=count)[language],
        chance=chance_in_folds(chosen, language, folds),
        missing_features=data.missing_features,
        folds=folds,
    )


def _ranked_cross_lingual(
    members: Sequence[tuple[RetrievalModel, SplitData]], scores: Sequence[Score], count: Count
) -> list[Score]:
    """Return scores with what captions find in the other languages of their portion."""
    captions = members[0][1].captions
    found: dict[tuple[str, str], dict[str, CrossLingual]] = {}
    for portion in dict.fromkeys(score.portion for score in scores):
        chosen = captions.select(_of_portion(captions, portion))
        of_portion = [(model, replace(own, captions=chosen)) for model, own in members]
        for (query, other), result in evaluate_cross_lingual(of_portion, count=count).items():
            found.setdefault((query, portion), {})[other] = result
    return [replace(score, cross_lingual=found.get((score.language, score.portion), {})) for score in scores]


def _of_portion(captions: Captions, portion: str) -> np.ndarray:
    return captions.portions == captions.portion_names.index(portion)


@dataclass(frozen=True)
class Average:
    """Means over languages of R@1, R@5 and R@10, in percent."""

    split: str
    portion: str
    languages: tuple[str, ...]
    image_to_text: tuple[float, ...]
    text_to_image: tuple[float, ...]

    @property
    def mean_recall(self) -> float:
        """Mean of the six recalls, 0 to 100, which papers call mR."""
        return mean(self.image_to_text + self.text_to_image)

    @property
    def sum_of_recalls(self) -> float:
        """Sum of the six recalls, 0 to 600: the mean of those of the languages."""
        return sum(self.image_to_text + self.text_to_image)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {**lists, "mean_recall": self.mean_recall, "sum_of_recalls": self.sum_of_recalls}


def averages(scores: Sequence[Score]) -> list[Average]:
    """Return averages over the languages of each split and portion that has several."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.split, score.portion), []).append(score)
    return [
        Average(
            split=split,
            portion=portion,
            languages=tuple(score.language for score in group),
            image_to_text=_mean_recalls([score.retrieval.image_to_text.recalls for score in group]),
            text_to_image=_mean_recalls([score.retrieval.text_to_image.recalls for score in group]),
        )
        for (split, portion), group in groups.items()
        if len(group) > 1
    ]


def evaluation_report(scores: Sequence[Score]) -> dict[str, Any]:
    """Return scores and their averages as plain values, for JSON."""
    return {
        "scores": [score.to_dict() for score in scores],
        "averages": [average.to_dict() for average in averages(scores)],
    }


def _mean_recalls(recalls: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(mean, zip(*recalls, strict=True)))

"""``imagepivot evaluate``: recall and median rank of a run on a split, by language and portion."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from train.data.captions import Captions, labels_of
from train.data.splits import TEST_SPLITS, LeftOut, TrainingData, open_data
from train.devices import check_device_name, resolve_device
from train.evaluation.across_languages import AcrossLanguages, evaluate_across_languages
from train.evaluation.evaluating import Count, chance, count_nothing, evaluate
from train.evaluation.metrics import Retrieval
from train.runs.run import Run, open_run

__all__ = ["EvaluateJob", "Score", "evaluate_run", "portions_in", "score_run"]


@dataclass(frozen=True)
class EvaluateJob:
    """One evaluation, as ``imagepivot evaluate`` runs it.

    Attributes:
        run: folder of the run.
        captions: folder of encoded captions.
        features: folder of image features.
        splits: splits to evaluate on, each of which must hold captions; if empty, those of ``TEST_SPLITS`` that do.
        languages: languages to evaluate; if empty, all that the captions have and the run knows.
        portion: portion to evaluate; if empty, every portion, each by itself.
        device: a name that `train.devices.resolve_device` knows.
        memory_map: folder for a copy of features that do not fit into memory.
        allow_missing_features: leave out the captions of images that lack features instead of raising an error. Fewer images
            are easier to retrieve from.
        across_languages: also rank the captions in each language among those of the same images in the others.

    Raises:
        UsageError: the name of the device is unknown.
    """

    run: str
    captions: str
    features: str
    splits: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    portion: str = ""
    device: str = "auto"
    memory_map: str | None = None
    allow_missing_features: bool = False
    across_languages: bool = False

    def __post_init__(self) -> None:
        check_device_name(self.device)


@dataclass(frozen=True)
class Score:
    """Retrieval with the captions of one language and portion.

    Attributes:
        language: language of the captions.
        portion: portion of the captions.
        split: split of the captions.
        retrieval: recalls and median ranks.
        chance: recalls that a random order reaches, by direction; see `train.evaluation.chance`.
        left_out: the images of the split that lack features and were left out; None if there are none.
        across_languages: by language, what these captions find among its captions; empty unless it was requested.
    """

    language: str
    portion: str
    split: str
    retrieval: Retrieval
    chance: Mapping[str, tuple[float, ...]]
    left_out: LeftOut | None = None
    across_languages: Mapping[str, AcrossLanguages] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        across = {language: result.to_dict() for language, result in self.across_languages.items()}
        return {
            "language": self.language,
            "portion": self.portion,
            "split": self.split,
            **self.retrieval.to_dict(),
            "chance": {direction: list(recalls) for direction, recalls in self.chance.items()},
            **({"left_out": self.left_out.to_dict()} if self.left_out else {}),
            **({"across_languages": across} if across else {}),
        }


def evaluate_run(job: EvaluateJob, count: Count = count_nothing) -> list[Score]:
    """Open a run and evaluate it; takes, returns and raises what `score_run` does, and raises what `open_run` does."""
    return score_run(
        open_run(job.run, device=resolve_device(job.device)),
        captions=job.captions,
        features=job.features,
        splits=job.splits,
        languages=job.languages,
        portion=job.portion,
        memory_map=job.memory_map,
        count=count,
        allow_missing_features=job.allow_missing_features,
        across_languages=job.across_languages,
    )


def score_run(
    run: Run,
    *,
    captions: str,
    features: str,
    splits: Sequence[str] = (),
    languages: Sequence[str] = (),
    portion: str = "",
    memory_map: str | None = None,
    count: Count = count_nothing,
    allow_missing_features: bool = False,
    across_languages: bool = False,
) -> list[Score]:
    """Evaluate an open run. The captions of each split and portion are a test of their own and are never mixed.

    Args:
        run: the run.
        captions: folder of encoded captions.
        features: folder of image features.
        splits: as in `EvaluateJob`.
        languages: as in `EvaluateJob`.
        portion: as in `EvaluateJob`.
        memory_map: folder for a copy of features that do not fit into memory.
        count: counts the captions and images that are embedded, for a display of progress.
        allow_missing_features: as in `EvaluateJob`.
        across_languages: as in `EvaluateJob`.

    Returns:
        One score per split, language and portion.

    Raises:
        DatasetError: the captions are in the ids of another vocabulary, the features come from another extractor, images lack
            features, or there is no such split.
        UsageError: the run does not know a language; there are no captions of the split, language or portion, or, with
            ``across_languages``, none of the same images in two languages.
    """
    known = run.model.languages
    unknown = [language for language in languages if language not in known]
    if unknown:
        raise UsageError(
            f"--languages names {', '.join(unknown)}, but this run knows only {', '.join(known)}: give some of these"
        )
    labels = labels_of(open_dataset(captions, kind="encoded"))
    chosen = _chosen_splits(labels, splits, captions)
    portions_of = {split: portions_in(labels, split, languages or sorted(known), portion) for split in chosen}
    empty = [split for split in chosen if not portions_of[split]]
    if len(empty) == len(chosen) or (splits and empty):
        raise UsageError(f"nothing to evaluate: {_listing(labels, empty)}, but the run knows only {', '.join(known)}")
    lacking = [language for language in languages if not any(language in portions for portions in portions_of.values())]
    if lacking:
        raise UsageError(f"nothing to evaluate in {', '.join(lacking)}: {_listing(labels, chosen)}")
    scores: list[Score] = []
    for split, portions in portions_of.items():
        if portions:
            data = open_data(
                captions,
                features,
                split=split,
                portions=portions,
                l2=run.config.data.l2_features,
                memory_map=memory_map,
                expected={name: run.fingerprints[name] for name in ("vocabulary", "extractor")},
                allow_missing_features=allow_missing_features,
            )
            found = [_score(run, data, language, name, count) for language, names in portions.items() for name in names]
            scores += _ranked_across_languages(run, data, found, count) if across_languages else found
    if across_languages and not any(score.across_languages for score in scores):
        raise UsageError(
            "nothing to rank across languages: no portion has captions of the same images in two of the languages that are "
            "evaluated. Leave --across-languages out, or choose others with --languages, --portion and --split"
        )
    return scores


def portions_in(
    labels: Iterable[tuple[str, str, str]], split: str, languages: Iterable[str], portion: str = ""
) -> dict[str, tuple[str, ...]]:
    """Return the portions of each language in a split, without languages that have none.

    Args:
        labels: split, language and portion of all captions; see `train.data.labels_of`.
        split: the split.
        languages: the languages to look for, in this order.
        portion: the portion to look for; any if empty.
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


def _score(run: Run, data: TrainingData, language: str, portion: str, count: Count) -> Score:
    captions = data.captions
    chosen = captions.select((captions.languages == captions.language_names.index(language)) & _of_portion(captions, portion))
    return Score(
        language=language,
        portion=portion,
        split=captions.split,
        retrieval=evaluate(run.model, replace(data, captions=chosen), count=count)[language],
        chance=chance(chosen, language),
        left_out=data.left_out,
    )


def _ranked_across_languages(run: Run, data: TrainingData, scores: Sequence[Score], count: Count) -> list[Score]:
    """Return scores with what captions find in the other languages of their portion."""
    captions = data.captions
    found: dict[tuple[str, str], dict[str, AcrossLanguages]] = {}
    for portion in dict.fromkeys(score.portion for score in scores):
        chosen = replace(data, captions=captions.select(_of_portion(captions, portion)))
        for (query, other), result in evaluate_across_languages([(run.model, chosen)], count=count).items():
            found.setdefault((query, portion), {})[other] = result
    return [replace(score, across_languages=found.get((score.language, score.portion), {})) for score in scores]


def _of_portion(captions: Captions, portion: str) -> np.ndarray:
    return captions.portions == captions.portion_names.index(portion)

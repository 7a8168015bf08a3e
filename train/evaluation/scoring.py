"""``imagepivot evaluate``: what a run retrieves on a split, by language and portion."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from train.data.captions import labels_of
from train.data.splits import TrainingData, open_data
from train.evaluation.evaluate import chance, evaluate
from train.evaluation.metrics import Retrieval
from train.reports.published import TEST_SPLITS
from train.runs.run import Run

__all__ = ["Score", "portions_in", "score_run"]


@dataclass(frozen=True)
class Score:
    """Retrieval with the captions of one language and portion.

    Attributes:
        language: of the captions.
        portion: of the captions.
        split: of the captions.
        retrieval: recalls and median ranks.
        chance: recalls that a random order reaches, by direction, see ``train.evaluation.evaluate.chance``.
    """

    language: str
    portion: str
    split: str
    retrieval: Retrieval
    chance: Mapping[str, tuple[float, ...]]

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {
            "language": self.language,
            "portion": self.portion,
            "split": self.split,
            **self.retrieval.to_dict(),
            "chance": {direction: list(recalls) for direction, recalls in self.chance.items()},
        }


def score_run(
    run: Run,
    *,
    captions: str,
    features: str,
    splits: Sequence[str] = (),
    languages: Sequence[str] = (),
    portion: str = "",
    memory_map: str | None = None,
) -> list[Score]:
    """Evaluates a run. Captions of each split and portion are a test of their own: they are never mixed.

    Args:
        run: a trained model.
        captions: folder of encoded captions.
        features: folder of features.
        splits: the splits, each of which must hold something; when not given those of ``TEST_SPLITS`` that do.
        languages: only these; when not given all that there are and the run knows.
        portion: only this; when not given each that there is.
        memory_map: folder for a copy of features that do not fit into memory.

    Returns:
        One score for each split, language and portion.

    Raises:
        DatasetError: the captions are in the ids of another vocabulary, the features are another extractor's, images lack
            features, or there is no such split.
        UsageError: the run does not know a language, or there are no captions of that split, language or portion.
    """
    known = run.model.config.languages
    unknown = [language for language in languages if language not in known]
    if unknown:
        raise UsageError(f"--languages names {', '.join(unknown)}, this run knows {', '.join(known)}")
    labels = labels_of(open_dataset(captions, kind="encoded"))
    chosen = _chosen_splits(labels, splits, captions)
    wanted = {split: portions_in(labels, split, languages or sorted(known), portion) for split in chosen}
    empty = [split for split in chosen if not wanted[split]]
    if len(empty) == len(chosen) or (splits and empty):
        raise UsageError(f"nothing to evaluate: {_listing(labels, empty)}, the run knows {', '.join(known)}")
    if lacking := [language for language in languages if not any(language in each for each in wanted.values())]:
        raise UsageError(f"nothing to evaluate in {', '.join(lacking)}: {_listing(labels, chosen)}")
    scores: list[Score] = []
    for split, portions in wanted.items():
        if portions:
            data = open_data(
                captions,
                features,
                split=split,
                portions=portions,
                l2=run.config.data.l2_features,
                memory_map=memory_map,
                expected={name: run.fingerprints[name] for name in ("vocabulary", "extractor")},
            )
            scores += [_score(run, data, language, each) for language in portions for each in portions[language]]
    return scores


def portions_in(
    labels: Iterable[tuple[str, str, str]], split: str, languages: Iterable[str], portion: str = ""
) -> dict[str, tuple[str, ...]]:
    """The portions that a split has, by language; languages without any are left out.

    Args:
        labels: split, language and portion of all captions, see ``train.data.captions.labels_of``.
        split: the split.
        languages: only these, in this order.
        portion: only this; each when empty.
    """
    there = sorted((language, name) for other, language, name in labels if other == split and portion in ("", name))
    found = {each: tuple(name for language, name in there if language == each) for each in languages}
    return {language: names for language, names in found.items() if names}


def _chosen_splits(labels: Collection[tuple[str, str, str]], splits: Sequence[str], captions: str) -> list[str]:
    there = sorted({split for split, _, _ in labels})
    for split in splits:
        if split not in there:
            raise DatasetError(f"{captions!r} has no captions of split {split!r}. It has: {', '.join(there)}")
    chosen = list(splits) or [split for split in TEST_SPLITS if split in there]
    if not chosen:
        raise UsageError(f"{captions!r} has no split {' or '.join(TEST_SPLITS)}: choose with --split of {', '.join(there)}")
    return chosen


def _listing(labels: Collection[tuple[str, str, str]], splits: Sequence[str]) -> str:
    """Languages and portions of splits, for messages."""
    return "; ".join(
        f"split {split!r} has languages and portions "
        + ", ".join(f"{language} {portion}" for other, language, portion in sorted(labels) if other == split)
        for split in splits
    )


def _score(run: Run, data: TrainingData, language: str, portion: str) -> Score:
    captions = data.captions
    chosen = captions.select(
        (captions.languages == captions.language_names.index(language))
        & (captions.portions == captions.portion_names.index(portion))
    )
    return Score(
        language=language,
        portion=portion,
        split=captions.split,
        retrieval=evaluate(run.model, replace(data, captions=chosen))[language],
        chance=chance(chosen, language),
    )

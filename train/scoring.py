"""``imagepivot evaluate``: what a run retrieves on a split, by language and portion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pyarrow.compute as pc

from schemas.dataset import Dataset, open_dataset
from schemas.errors import UsageError
from train.data import TrainingData, open_data
from train.evaluation import chance, evaluate
from train.metrics import Retrieval
from train.published import TEST_SPLITS
from train.runs import Run

__all__ = ["Score", "score_run", "splits_of"]


@dataclass(frozen=True)
class Score:
    """Retrieval with the captions of one language and portion.

    Attributes:
        language: of the captions.
        portion: of the captions.
        split: of the captions.
        retrieval: recalls and median ranks.
        chance: recalls that a random order reaches, by direction, see ``train.evaluation.chance``.
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
    run: Run, *, captions: str, features: str, splits: Sequence[str] = (), languages: Sequence[str] = (), portion: str = ""
) -> list[Score]:
    """Evaluates a run. Captions of each split and portion are a test of their own: they are never mixed.

    Args:
        run: a trained model.
        captions: folder of encoded captions.
        features: folder of features.
        splits: the splits; when not given those of ``TEST_SPLITS`` that there are.
        languages: only these; when not given all that the split has and the run knows.
        portion: only this; when not given each that the split has.

    Returns:
        One score for each split, language and portion.

    Raises:
        DatasetError: the captions are in the ids of another vocabulary, the features are another extractor's, images lack
            features, or a split has no such captions.
        UsageError: the run knows none of the languages, or there are no captions of that split or portion.
    """
    known = run.model.config.languages
    unknown = [language for language in languages if language not in known]
    if unknown:
        raise UsageError(f"--languages names {', '.join(unknown)}, this run knows {', '.join(known)}")
    there = splits_of(open_dataset(captions, kind="encoded"))
    chosen = splits or [split for split in TEST_SPLITS if split in there]
    if not chosen:
        raise UsageError(f"{captions!r} has no split {' or '.join(TEST_SPLITS)}: choose with --split of {', '.join(there)}")
    scores: list[Score] = []
    for split in chosen:
        data = open_data(
            captions,
            features,
            split=split,
            languages=languages or None,
            l2=run.config.data.l2_features,
            expected={name: run.fingerprints[name] for name in ("vocabulary", "extractor")},
        )
        names = data.captions.language_names, data.captions.portion_names
        found = [_score(run, data, *each) for each in product(*names) if each[0] in known and portion in ("", each[1])]
        scores += [score for score in found if score is not None]
        if not any(found):
            raise UsageError(
                f"nothing to evaluate: split {split!r} has languages {', '.join(names[0])} and portions {', '.join(names[1])}, the "
                f"run knows {', '.join(known)}"
            )
    return scores


def splits_of(captions: Dataset) -> list[str]:
    """The splits of encoded captions, sorted."""
    return sorted({name for table in captions.shards(["split"]) for name in pc.unique(table["split"]).to_pylist()})


def _score(run: Run, data: TrainingData, language: str, portion: str) -> Score | None:
    captions = data.captions
    chosen = captions.select(
        (captions.languages == captions.language_names.index(language))
        & (captions.portions == captions.portion_names.index(portion))
    )
    if not len(chosen):
        return None
    return Score(
        language=language,
        portion=portion,
        split=captions.split,
        retrieval=evaluate(run.model, replace(data, captions=chosen))[language],
        chance=chance(chosen, language),
    )

"""``imagepivot evaluate``: recall and median rank by language and portion."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa

from schemas.console.events import Remark
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.options import takes_fields
from schemas.overlaps import leakage_remark
from train.chance import DIRECTIONS
from train.data.captions import Captions, labels_of, no_captions
from train.data.splits import TEST_SPLITS, Exclusion, MissingFeatures, SplitData, default_test_splits, open_data
from train.devices import choose_device
from train.evaluation.compatibility import (
    check_languages,
    check_members,
    check_sample_outputs,
    check_tokens,
    expected_fingerprints,
)
from train.evaluation.cross_lingual import CrossLingualRetrieval, evaluate_cross_lingual
from train.evaluation.evaluation import Count, Members, chance, no_progress, rank_folds
from train.evaluation.metrics import RelevanceMetrics, RetrievalMetrics, mean_over_folds
from train.evaluation.pairs import HELD_OUT, UNKNOWN_TRAINING, JointSpace, open_members
from train.evaluation.protocols import ProtocolMatch, match_protocol
from train.evaluation.ranks import Queries, rank_table
from train.evaluation.relevance import OWN_CAPTIONS, RightItems, captions_of_images
from train.evaluation.relevance_files import read_relevance
from train.evaluation.statistics import MetricIntervals
from train.jobs import EvaluateJob, FiguresJob
from train.runs.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Retrieval metrics of the captions of one language and portion.

    Attributes:
        chance: recalls of a random order, in percent, by direction.
        missing_features: images of the split that were left out for lack of features; None if all have some.
        folds: number of folds of the images; all numbers are means over them.
        cross_lingual: retrieval of captions in other languages, by language; empty unless requested.
        protocol: comparison with the protocol of the field that has such a split; None without one.
        exclusion: duplicates of training items that were left out; None if not requested.
        relevance: measures over all correct items by their definition: ``captions`` for those of an image, or names of files.
        intervals: 95 % confidence intervals, by direction; with folds, of the ranks of all folds.
        space: name that the user gave to the joint space of two checkpoints; None for a run, and for vectors of one checkpoint.
        ranks: ranks of the queries in both directions, see `train.evaluation.ranks`.

    Examples:
        >>> score = imagepivot.evaluate("runs/demo", "encoded", "features", splits=["test"], languages=["de"])[0]
        >>> score.split, score.retrieval.image_to_text.recall_at_10
        ('test', 100.0)
    """

    language: str
    portion: str
    split: str
    retrieval: RetrievalMetrics
    chance: Mapping[str, tuple[float, ...]]
    missing_features: MissingFeatures | None
    folds: int
    protocol: ProtocolMatch | None
    untrained: tuple[str, ...]
    relevance: Mapping[str, Mapping[str, RelevanceMetrics]]
    intervals: Mapping[str, MetricIntervals]
    ranks: pa.Table = field(repr=False, compare=False)
    exclusion: Exclusion | None = None
    cross_lingual: Mapping[str, CrossLingualRetrieval] = field(default_factory=dict)
    space: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        cross_lingual = {language: result.to_dict() for language, result in self.cross_lingual.items()}
        return {
            "language": self.language,
            "portion": self.portion,
            "split": self.split,
            "protocol": None if self.protocol is None else self.protocol.to_dict(),
            **self.retrieval.to_dict(),
            "chance": {direction: list(recalls) for direction, recalls in self.chance.items()},
            **({"excluded": self.exclusion.to_dict()} if self.exclusion else {}),
            "intervals": {direction: asdict(intervals) for direction, intervals in self.intervals.items()},
            "relevance": {
                name: {direction: metrics.to_dict() for direction, metrics in relevance.items()}
                for name, relevance in self.relevance.items()
            },
            **({"folds": self.folds} if self.folds > 1 else {}),
            **({"missing_features": self.missing_features.to_dict()} if self.missing_features else {}),
            **({"cross_lingual": cross_lingual} if cross_lingual else {}),
            **({"untrained": list(self.untrained)} if self.untrained else {}),
            **({"space": self.space} if self.space else {}),
        }


@takes_fields(EvaluateJob)
def evaluate(job: EvaluateJob, on_progress: Count = no_progress, on_warning: Remark = logger.warning) -> list[Score]:
    """Evaluate a run, an ensemble of runs by their mean scores, or a pair of vectors.

    Each split and portion is a test of its own. Default languages are those that all runs know. Open runs remain on their device.
    ``on_warning`` receives a sentence about evaluated images that a run was trained on.

    Returns:
        One score per split, language and portion.

    Raises:
        DatasetError: a folder holds no run, the captions have another vocabulary or the features another extractor than the runs,
            images lack features, the split is unknown, or the runs cannot form an ensemble.
        UsageError: a run does not know a language; no captions have the split, language or portion; the
            images are fewer than the folds; the data have no correct items of a file of ``relevance``; or,
            with ``cross_lingual``, no image has captions in two languages.
        InputError: a file of ``relevance`` or ``annotations`` is missing or has another layout.
    """
    runs = open_members(job.members, job.captions, job.features, choose_device(job.device))
    known, languages = check_members(runs), job.languages
    files = read_relevance(job.relevance, job.annotations, runs[0].vocabulary.tokens)
    definitions: dict[str, RightItems] = {OWN_CAPTIONS: captions_of_images, **files}
    subject, knows = ("this run", "the run knows") if len(runs) == 1 else ("the ensemble", "all its runs know")
    if not job.members:
        subject, knows = "this pair", "the vectors are of"
    check_languages(languages, known, subject)
    captions = open_dataset(job.captions, kind=_captions_kind(runs))
    labels = labels_of(captions)
    chosen = _choose_splits(labels, job.splits, job.captions)
    trained = {split for run in runs for split in run.config.data.splits}
    evaluated = {*chosen} - trained
    if not job.members:
        on_warning(UNKNOWN_TRAINING)
    elif remark := leakage_remark(captions, lambda splits: bool(splits & trained) and bool(splits & evaluated)):
        on_warning(remark)
    split_portions = {split: portions_in(labels, split, languages or sorted(known), job.portions) for split in chosen}
    empty = [split for split in chosen if not split_portions[split]]
    if len(empty) == len(chosen) or (job.splits and empty):
        absent = no_captions(captions, f"split {' or '.join(map(repr, empty))} in these languages and portions")
        raise UsageError(f"nothing to evaluate: {absent}, but {knows} only {', '.join(known)}")
    lacking = [language for language in languages if not any(language in portions for portions in split_portions.values())]
    if lacking:
        absent = no_captions(captions, f"split {' or '.join(map(repr, chosen))} in these languages and portions")
        raise UsageError(f"nothing to evaluate in {', '.join(lacking)}: {absent}")
    scores: list[Score] = []
    for split, portions in split_portions.items():
        if portions:
            is_other = trained.__contains__ if job.members else lambda name: not name.startswith(HELD_OUT)
            exclusion = Exclusion.read(job.exclude, [split], is_other) if job.exclude else None
            data = {
                l2: open_split(runs, job, split, portions, l2=l2, exclusion=exclusion)
                for l2 in dict.fromkeys(run.config.data.l2_features for run in runs)
            }
            members = [(run.model, data[run.config.data.l2_features]) for run in runs]
            new = [
                _score_portion(members, language, name, job.folds, definitions, on_progress)
                for language, names in portions.items()
                for name in names
            ]
            scores += _add_cross_lingual(members, new, on_progress) if job.cross_lingual else new
    for name, file in files.items():
        if not any(name in score.relevance for score in scores):
            raise UsageError(
                f"{file.location!r} has no correct items among the images and captions of split {', '.join(chosen)}: evaluate "
                "COCO's test images, with ids that end in COCO's numbers, and give --annotations the captions' file"
            )
    if job.cross_lingual and not any(score.cross_lingual for score in scores):
        raise UsageError(
            "nothing to rank across languages: no portion has captions of the same images in two of the languages that are "
            "evaluated. Leave --cross-lingual out, or choose others with --languages, --portions and --splits"
        )
    return scores


def open_split(
    runs: Sequence[Run],
    job: EvaluateJob | FiguresJob,
    split: str,
    portions: Mapping[str, Sequence[str]],
    *,
    l2: bool,
    exclusion: Exclusion | None = None,
) -> SplitData:
    """Open a split of a job's data, and check that it fits the runs."""
    data = open_data(
        job.captions,
        job.features,
        split=split,
        portions=portions,
        l2=l2,
        memory_map=job.memory_map,
        expected=expected_fingerprints(runs),
        allow_missing_features=job.allow_missing_features,
        token_features=job.token_features,
        token_width=check_tokens(runs, job.token_features),
        exclusion=exclusion,
        kind=_captions_kind(runs),
    )
    for run in runs:
        check_sample_outputs(run, features=job.features, token_features=job.token_features)
    return data


def _captions_kind(runs: Sequence[Run]) -> Literal["encoded", "embeddings"]:
    """Return the kind of the captions that runs read."""
    return "embeddings" if isinstance(runs[0].model, JointSpace) else "encoded"


def portions_in(
    labels: Iterable[tuple[str, str, str]], split: str, languages: Iterable[str], selected: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the portions of each language with captions in a split.

    Labels are those of `train.data.captions.labels_of`. Languages keep their order, and an empty selection has all.
    """
    pairs = sorted(
        (language, name) for other, language, name in labels if other == split and (not selected or name in selected)
    )
    portions = {language: tuple(name for other, name in pairs if other == language) for language in languages}
    return {language: names for language, names in portions.items() if names}


def _choose_splits(labels: Collection[tuple[str, str, str]], splits: Sequence[str], captions: str) -> list[str]:
    available = sorted({split for split, _, _ in labels})
    for split in splits:
        if split not in available:
            raise DatasetError(f"{captions!r} has no captions of split {split!r}. It has: {', '.join(available)}")
    chosen = list(splits) or default_test_splits(available)
    if not chosen:
        raise UsageError(
            f"{captions!r} has no split test, {' or '.join(TEST_SPLITS)}: choose with --splits of {', '.join(available)}"
        )
    return chosen


def _score_portion(
    members: Members, language: str, portion: str, folds: int, definitions: Mapping[str, RightItems], on_progress: Count
) -> Score:
    model, data = members[0]
    captions = data.captions
    chosen = captions.select((captions.languages == captions.language_names.index(language)) & _in_portion(captions, portion))
    parts = rank_folds(_with_captions(members, chosen), language, folds, on_progress=on_progress, definitions=definitions)
    numbers = [None] if folds == 1 else range(1, folds + 1)
    tables = [rank_table(part, language, ranks, fold) for fold, (part, ranks) in zip(numbers, parts, strict=True)]
    table, chances = pa.concat_tables(tables), [chance(part, language) for part, _ in parts]
    return Score(
        language=language,
        portion=portion,
        split=captions.split,
        retrieval=mean_over_folds([RetrievalMetrics.of(ranks) for _, ranks in parts]),
        chance={name: mean_over_folds([getattr(fold, name) for fold in chances]) for name in DIRECTIONS},
        missing_features=data.missing_features,
        folds=folds,
        protocol=match_protocol(captions.split, chosen.compact().image_ids, len(chosen), folds),
        untrained=data.untrained,
        space=model.space if isinstance(model, JointSpace) else None,
        exclusion=data.exclusion,
        relevance=mean_over_folds([ranks.relevance for _, ranks in parts]),
        intervals={direction: Queries.of(table, direction=direction).intervals for direction in DIRECTIONS},
        ranks=table,
    )


def _add_cross_lingual(members: Members, scores: Sequence[Score], on_progress: Count) -> list[Score]:
    captions = members[0][1].captions
    results: dict[tuple[str, str], dict[str, CrossLingualRetrieval]] = {}
    for portion in dict.fromkeys(score.portion for score in scores):
        chosen = _with_captions(members, captions.select(_in_portion(captions, portion)))
        for (query, other), result in evaluate_cross_lingual(chosen, on_progress=on_progress).items():
            results.setdefault((query, portion), {})[other] = result
    return [replace(score, cross_lingual=results.get((score.language, score.portion), {})) for score in scores]


def _in_portion(captions: Captions, portion: str) -> np.ndarray:
    return captions.portions == captions.portion_names.index(portion)


def _with_captions(members: Members, captions: Captions) -> Members:
    return [(model, replace(data, captions=captions)) for model, data in members]

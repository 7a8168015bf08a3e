"""Runs and evaluations that ``imagepivot compare`` reads, with their scores."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pyarrow as pa

from schemas.errors import DatasetError, UsageError
from schemas.escapes import redact
from schemas.storage.folder import Folder
from train.chance import DIRECTIONS, MEASURES, RECALLS
from train.config.sections import parse_settings
from train.evaluation.ranks import RANKS, Queries, read_ranks
from train.reports.score_report import EVALUATION
from train.runs.checkpoints import BEST, LAST, checkpoint_settings, read_checkpoint
from train.runs.history import History, read_history
from train.runs.log import CONFIG, LOG

SCORES = tuple(product(DIRECTIONS, MEASURES))
"""Direction and measure of each score of a language."""

SUM = ("", "sum_of_recalls")
"""Direction (none) and measure of the sum of the six recalls."""

EVALUATED = "evaluation"
"""State of a folder of ``evaluate --output``."""

GalleryScores = Mapping[tuple[str, str], float]
"""Scores by direction and measure."""


class RankedGallery(NamedTuple):
    """Images and captions that are ranked together, in folds if several."""

    language: str
    portions: tuple[str, ...]
    split: str
    images: int
    captions: int
    folds: int = 1

    @property
    def name(self) -> str:
        """Language, portions, split and folds, for people."""
        folds = f"({self.folds} folds)" if self.folds > 1 else ""
        return " ".join(filter(None, (self.language, ", ".join(self.portions), self.split, folds)))

    @property
    def size(self) -> str:
        """Numbers of images and captions, for people."""
        return f"{self.images:,} images, {self.captions:,} captions"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**self._asdict(), "portions": list(self.portions)}


@dataclass(frozen=True)
class Measurement:
    """Scores of a model on a gallery.

    Attributes:
        scores: scores by `SCORES` and `SUM`.
        chance: scores of a random ranking, in older logs without median ranks; empty if unknown.
        queries: ranks of single queries, by direction; empty if not stored.
    """

    scores: GalleryScores
    chance: GalleryScores = field(default_factory=dict)
    queries: Mapping[str, Queries] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison.

    Attributes:
        name: the distinct end of its path.
        settings: configuration by dotted key; with a checkpoint those of `checkpoint_settings`.
        state: stop reason (``patience``, ``epochs`` or ``steps``); ``unfinished`` for a run that is still
            training or was stopped; ``evaluation`` for a folder of ``evaluate --output``.
        measured: scores at the best step, by gallery.
    """

    name: str
    folder: str
    settings: Mapping[str, Any]
    state: str
    history: History
    untrained: tuple[str, ...] = ()
    measured: Mapping[RankedGallery, Measurement] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        best = {key: value for key, value in (self.history.best or {}).items() if key != "event"}
        return {
            **{name: redact(getattr(self, name)) for name in ("name", "folder", "state")},
            "step": self.history.last_step,
            "settings": dict(self.settings),
            "best": best or None,
            "speed": self.history.speed,
            "untrained": list(self.untrained),
        }


def nested(scores: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Return values by direction and measure as a tree, for JSON."""
    tree: dict[str, Any] = {}
    for (direction, measure), value in scores.items():
        (tree.setdefault(direction, {}) if direction else tree)[measure] = value
    return tree


def read_compared_run(name: str, location: str, folder: Folder) -> ComparedRun:
    """Read a run, or a folder of ``evaluate --output``.

    Raises:
        DatasetError: the folder holds neither, or a damaged one.
    """
    files = [file for file in (LAST, BEST, CONFIG, LOG) if folder.stat(file) is not None]
    if not files and folder.stat(EVALUATION) is not None:
        return _read_evaluation(name, location, folder)
    if not files:
        raise DatasetError(
            f"{location!r} is not a run: it has none of {LAST}, {BEST}, {CONFIG} and {LOG}. Give runs, or "
            "folders of imagepivot evaluate --output"
        )
    checkpoint = read_checkpoint(folder, files[0]) if files[0] in (LAST, BEST) else None
    text = folder.read(CONFIG).decode(errors="replace") if CONFIG in files else ""
    try:
        settings = checkpoint_settings(checkpoint) if checkpoint else parse_settings(text)
    except UsageError as error:
        raise DatasetError(f"{folder.path_of(CONFIG)} is damaged ({error}): copy the run again, or leave it out") from error
    state = (checkpoint.progress.stop_reason if checkpoint else "") or "unfinished"
    history, untrained = read_history(folder), checkpoint.untrained if checkpoint else ()
    ranks = read_ranks(location) if history.best and folder.stat(RANKS) is not None else None
    return ComparedRun(name, location, settings, state, history, untrained, logged_scores(settings, history, ranks))


def _read_evaluation(name: str, location: str, folder: Folder) -> ComparedRun:
    try:
        content, measured = json.loads(folder.read(EVALUATION)), {}
        ranks = read_ranks(location) if folder.stat(RANKS) is not None else None
        for score in content["scores"]:
            images, captions = (score[direction]["queries"] for direction in DIRECTIONS)
            place = score["language"], (score["portion"],), score["split"]
            gallery = RankedGallery(*place, images, captions, score.get("folds", 1))
            measured[gallery] = _measurement(gallery, score, score["chance"], ranks)
        runs = content["runs"]
        settings = {"ensemble": [run["folder"] for run in runs]} if runs[1:] else runs[0].get("settings", {"pair": runs[0]})
        name += "".join({f" (space {score['space']})": None for score in content["scores"] if "space" in score})
        untrained = tuple(dict.fromkeys(feature for score in content["scores"] for feature in score.get("untrained", ())))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DatasetError(f"{folder.path_of(EVALUATION)} is damaged ({error}): evaluate again, or leave it out") from error
    return ComparedRun(name, location, settings, EVALUATED, History(()), untrained, measured)


def logged_scores(
    settings: Mapping[str, Any], history: History, ranks: pa.Table | None = None
) -> dict[RankedGallery, Measurement]:
    """Return scores of a run's best evaluation by gallery, with ranks of its step."""
    best, measured = history.best or {}, {}
    if ranks is not None and (ranks.schema.metadata or {}).get(b"step") != str(best["step"]).encode():
        ranks = None
    for language in history.languages:
        metrics, random = best.get(language), history.chance(language)
        if isinstance(metrics, Mapping):
            portions = tuple(sorted(settings.get("data.portions", {}).get(language, ())))
            sizes = (metrics[direction].get("queries", 0) for direction in DIRECTIONS)
            gallery = RankedGallery(language, portions, settings.get("data.validation_split", ""), *sizes)
            chance = {direction: tuple(random[direction].values()) for direction in DIRECTIONS if direction in random}
            measured[gallery] = _measurement(gallery, metrics, chance, ranks)
    return measured


def _measurement(
    gallery: RankedGallery, metrics: Mapping[str, Any], chance: Mapping[str, Sequence[float]], ranks: pa.Table | None
) -> Measurement:
    scores = {pair: metrics[pair[0]][pair[1]] for pair in SCORES} | {SUM: metrics[SUM[1]]}
    random = {(way, name): value for way, values in chance.items() for name, value in zip(MEASURES, values, strict=False)}
    random |= {SUM: sum(value for (_, name), value in random.items() if name in RECALLS)} if random else {}
    place = {"language": gallery.language, "portion": ",".join(gallery.portions), "split": gallery.split}
    queries = {way: Queries.of(ranks, **place, direction=way) for way in DIRECTIONS if ranks is not None}
    return Measurement(scores, random, queries)

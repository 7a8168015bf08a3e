"""``imagepivot compare``: settings, progress and scores of runs side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas.conversion import dump
from schemas.errors import DatasetError, UsageError
from schemas.escapes import redact
from schemas.parameters import untrained_remark
from schemas.storage.folder import Folder
from train.chance import DIRECTIONS, MEASURES, RECALLS, Chance, is_above_chance
from train.config.sections import parse_settings
from train.evaluation.ranks import RANKS, read_ranks
from train.evaluation.statistics import MetricIntervals
from train.reports.evaluation_folder import EVALUATION
from train.reports.significance import Difference, Queries, adjust, compare_rows, join_runs
from train.runs.checkpoints import BEST, LAST, checkpoint_settings, read_checkpoint
from train.runs.history import History, read_history
from train.runs.log import CONFIG, LOG

SCORES = tuple(product(DIRECTIONS, MEASURES))
"""Direction and measure of each score of a language."""

SUM = ("", "sum_of_recalls")
"""Direction (none) and measure of the sum of the six recalls."""

_SEED, EVALUATED = "seed", "evaluation"

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
        state: stop reason (``patience``, ``epochs`` or ``steps``); ``unfinished`` for a run that is still training or was stopped;
            ``evaluation`` for a folder of ``evaluate --output``.
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


@dataclass(frozen=True, eq=False)
class ComparedRow:
    """Runs that differ only in their seeds, or a single run.

    Rows are keys. Their distinct names are for people: the common prefix of those of the runs, unless another row has it.
    """

    name: str
    runs: tuple[ComparedRun, ...]

    @property
    def label(self) -> str:
        """Name, with the number of seeds if several."""
        return self.name if len(self.runs) == 1 else f"{self.name} ({len(self.runs)} seeds)"

    def scores(self, gallery: RankedGallery, statistic: Callable[[list[float]], float]) -> GalleryScores:
        """Return a statistic of the scores of the runs; empty if a run has none."""
        measured = [run.measured[gallery].scores for run in self.runs if gallery in run.measured]
        is_complete = len(measured) == len(self.runs)
        return {pair: statistic([scores[pair] for scores in measured]) for pair in (*SCORES, SUM) if is_complete}

    def queries(self, gallery: RankedGallery, direction: str) -> Queries | None:
        """Return the ranks of measured runs; None unless all rank the same queries."""
        return join_runs([run.measured[gallery].queries.get(direction) for run in self.runs])


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        differences: settings that differ, by key, in the order of the runs; None for a run without the setting.
        rows: all runs, those that differ only in their seeds together.
        notes: warnings about scores that cannot be compared.
        intervals: 95 % confidence intervals by gallery and direction, then by row.
        tests: tests between rows; their place is gallery and direction.

    Examples:
        >>> comparison = imagepivot.compare_runs(["runs/demo"])
        >>> [run.name for run in comparison.runs], dict(comparison.differences)
        (['demo'], {})
    """

    runs: tuple[ComparedRun, ...]
    differences: Mapping[str, tuple[Any, ...]]
    rows: tuple[ComparedRow, ...] = ()
    notes: tuple[str, ...] = ()
    intervals: Mapping[tuple[RankedGallery, str], Mapping[ComparedRow, MetricIntervals]] = field(default_factory=dict)
    tests: tuple[Difference, ...] = ()

    @property
    def groups(self) -> tuple[ComparedRow, ...]:
        """Rows of several runs."""
        return tuple(row for row in self.rows if len(row.runs) > 1)

    @property
    def galleries(self) -> tuple[RankedGallery, ...]:
        """All galleries of the runs; those of a language follow each other."""
        galleries = dict.fromkeys(gallery for run in self.runs for gallery in run.measured)
        languages = list(dict.fromkeys(gallery.language for gallery in galleries))
        return tuple(sorted(galleries, key=lambda gallery: languages.index(gallery.language)))

    def chance(self, gallery: RankedGallery) -> GalleryScores:
        """Return the scores of a random ranking; empty if unknown."""
        measured = (run.measured[gallery] for run in self.runs if gallery in run.measured)
        return next((measurement.chance for measurement in measured if measurement.chance), {})

    def row_of(self, run: ComparedRun) -> ComparedRow:
        """Return the row of a run."""
        return next(row for row in self.rows if run in row.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "runs": [run.to_dict() for run in self.runs],
            "differences": {key: list(values) for key, values in self.differences.items()},
            "galleries": [
                {**gallery.to_dict(), "chance": nested(self.chance(gallery)), "scores": self._scores_of(gallery)}
                for gallery in self.galleries
            ],
            "intervals": [
                {**gallery.to_dict(), "direction": direction}
                | {"rows": [{"name": row.name, **asdict(value)} for row, value in rows.items()]}
                for (gallery, direction), rows in self.intervals.items()
            ],
            "tests": [{**test.place[0].to_dict(), "direction": test.place[1], **test.to_dict()} for test in self.tests],
            "groups": [{"name": group.name, "runs": [run.name for run in group.runs]} for group in self.groups],
            "notes": list(self.notes),
        }

    def _scores_of(self, gallery: RankedGallery) -> list[dict[str, Any]]:
        scores = [{"name": run.name, **nested(run.measured[gallery].scores)} for run in self.runs if gallery in run.measured]
        for group in self.groups:
            if means := group.scores(gallery, mean):
                scores.append({"name": group.name, "mean": nested(means), "deviation": nested(group.scores(gallery, stdev))})
        return scores


def nested(scores: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Return values by direction and measure as a tree, for JSON."""
    tree: dict[str, Any] = {}
    for (direction, measure), value in scores.items():
        (tree.setdefault(direction, {}) if direction else tree)[measure] = value
    return tree


def compare_runs(folders: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Compare runs of any kinds of model and languages, also during their training.

    Raises:
        UsageError: no folder is given, or one twice.
        DatasetError: a folder holds no run, or a damaged one.
    """
    locations = [os.fspath(folder).rstrip("/") or "/" for folder in folders]
    if not locations:
        raise UsageError("there is nothing to compare: give the folders of runs")
    opened = [Folder(location) for location in locations]
    paths = [str(folder.local_path) if folder.is_local else folder.location for folder in opened]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UsageError(f"{locations[index]!r} is given twice: leave it out once")
    runs = tuple(_read_run(*item) for item in zip(_short_names(locations), locations, opened, strict=True))
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    settings = {key: tuple(run.settings.get(key) for run in runs) for key in keys if _differ(key, runs)}
    return with_tests(Comparison(runs, settings, _group_by_seeds(runs), tuple(_comparison_notes(runs))))


def with_tests(comparison: Comparison) -> Comparison:
    """Add intervals of rows with ranks, and tests between rows of the same queries."""
    intervals: dict[tuple[RankedGallery, str], dict[ComparedRow, MetricIntervals]] = {}
    tests: list[Difference] = []
    untested: dict[ComparedRow, None] = {}
    for place in product(comparison.galleries, DIRECTIONS):
        measured = {row: row.queries(*place) for row in comparison.rows if row.scores(place[0], mean)}
        ranked = {row: queries for row, queries in measured.items() if queries is not None}
        intervals[place] = {row: queries.intervals for row, queries in ranked.items()}
        first = next(iter(ranked.values()), None)
        same = {row: queries for row, queries in ranked.items() if first and np.array_equal(queries.ids, first.ids)}
        tests += compare_rows(place, same)
        if len(measured) > 1:
            untested |= dict.fromkeys(row for row in measured if row not in same)
    names = ", ".join(row.name for row in untested)
    notes = [f"not tested, without {RANKS} of the best step or of other queries: {names}"] if untested else []
    return replace(comparison, intervals=intervals, tests=tuple(adjust(tests)), notes=(*comparison.notes, *notes))


def _short_names(locations: Sequence[str]) -> list[str]:
    """Return the paths without their common parent folders."""
    parts = [location.split("/") for location in locations]
    common = min(len(os.path.commonprefix(parts)), *(len(names) - 1 for names in parts))  # noqa: RUF071 -- of any bucket
    return ["/".join(names[common:]) for names in parts]


def _read_run(name: str, location: str, folder: Folder) -> ComparedRun:
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
        settings = runs[0]["settings"] if len(runs) == 1 else {"ensemble": [run["folder"] for run in runs]}
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


def _differ(key: str, runs: Sequence[ComparedRun]) -> bool:
    """Return whether runs differ in a setting; runs of unknown settings do not count."""
    # The configuration exists from the start, other settings since the first checkpoint.
    with_setting = [run for run in runs if _SEED in run.settings or ("." in key and run.settings)]
    return len({dump(run.settings[key]) if key in run.settings else "" for run in with_setting}) > 1


def _group_by_seeds(runs: Sequence[ComparedRun]) -> tuple[ComparedRow, ...]:
    """Return groups of several runs, then single ones, by distinct names."""
    by_settings: dict[str, list[ComparedRun]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key != _SEED} | {"evaluated": run.state == EVALUATED}
        if _SEED in run.settings:
            by_settings.setdefault(json.dumps(same), []).append(run)
    groups = [group for group in by_settings.values() if len({run.settings[_SEED] for run in group}) > 1]
    names = [_common_name([run.name for run in group]) for group in groups]
    taken = [*(run.name for run in runs), *names]
    for index, group in enumerate(groups):
        if taken.count(names[index]) > 1:
            names[index] = f"{group[0].name}, …"
            while names[index] in taken:
                names[index] += ", …"
            taken.append(names[index])
    singles = ((run.name, [run]) for run in runs if not any(run in group for group in groups))
    return tuple(ComparedRow(name, tuple(row)) for name, row in chain(zip(names, groups, strict=True), singles))


def _common_name(names: Sequence[str]) -> str:
    """Return the common prefix of names, without a number or the word seed at its end."""
    common = os.path.commonprefix(names).rstrip("0123456789/-_. ")  # noqa: RUF071 -- characters are compared
    return common.removesuffix("seed").rstrip("/-_. ") or "all"


def _comparison_notes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return warnings about other data, chance, untrained features, unfinished runs."""
    notes = []
    for data in ("captions", "features", "extractor", "vocabulary"):
        for key in (f"data: {data}", f"content: {data}"):
            if names := _names_by_value((run.settings[key], run.name) for run in runs if key in run.settings):
                notes.append(f"not the same {data} ({key.partition(':')[0]}): {names}")
                break
    places = {gallery: gallery._replace(images=0, captions=0) for run in runs for gallery in run.measured}
    for place in dict.fromkeys(places.values()):
        if names := _names_by_value((item.size, run.name) for run in runs for item in run.measured if places[item] == place):
            notes.append(f"not the same gallery of {place.name}: {names}")
    for run in runs:
        for gallery, measurement in run.measured.items():
            texts, images = (tuple(measurement.chance.get((way, name), 0.0) for name in RECALLS) for way in DIRECTIONS)
            chance = Chance(texts, images, gallery.images)
            if measurement.chance and not is_above_chance(measurement.scores[SUM], [chance]):
                text = f"the recalls on {gallery.name} are not better than chance ({chance.sum_of_recalls:.1f})"
                notes.append(f"{run.name}: {text}")
    if remark := untrained_remark(name for run in runs for name in run.untrained):
        notes.append(f"{', '.join(run.name for run in runs if run.untrained)}: {remark}")
    if any(run.state == "unfinished" for run in runs) and len(runs) > 1:
        notes.append("unfinished runs are shown as far as they have come")
    return notes


def _names_by_value(pairs: Iterable[tuple[str, str]]) -> str:
    """List values with the names that have them; empty if all values are equal."""
    names: dict[str, list[str]] = {}
    for value, name in pairs:
        names.setdefault(value, []).append(name)
    return "; ".join(f"{value} ({', '.join(members)})" for value, members in names.items()) if len(names) > 1 else ""

"""``imagepivot compare``: settings, progress and scores of runs side by side."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from statistics import mean, stdev
from typing import Any

import numpy as np

from schemas.console.tables import ABSENT, Cell, Column, Row, Table, number_columns
from schemas.conversion import dump
from schemas.errors import UsageError
from schemas.parameters import untrained_remark
from schemas.storage.folder import Folder
from train.chance import DIRECTIONS, RECALLS, Chance, is_above_chance
from train.evaluation.pairs import UNKNOWN_TRAINING
from train.evaluation.ranks import RANKS, Queries, join_runs
from train.evaluation.statistics import MetricIntervals, interval_notes
from train.reports.compared_runs import (
    EVALUATED,
    SCORES,
    SUM,
    ComparedRun,
    GalleryScores,
    RankedGallery,
    nested,
    read_compared_run,
)
from train.reports.significance import LEVEL, Difference, adjust, compare_rows, not_worse

_SEED = "seed"
SHORT = {"recall_at_1": "R@1", "recall_at_5": "R@5", "recall_at_10": "R@10", "median_rank": "med"}
ARROWS = {"image_to_text": "i→t", "text_to_image": "t→i"}
_NOT_WORSE = "≈"


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

    def to_tables(self) -> list[Table]:
        """Return tables of differing settings, progress, scores and tests."""
        return [_settings_table(self), _progress(self), _scores(self), _tests(self)]

    def _scores_of(self, gallery: RankedGallery) -> list[dict[str, Any]]:
        scores = [{"name": run.name, **nested(run.measured[gallery].scores)} for run in self.runs if gallery in run.measured]
        for group in self.groups:
            if means := group.scores(gallery, mean):
                scores.append({"name": group.name, "mean": nested(means), "deviation": nested(group.scores(gallery, stdev))})
        return scores


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
    runs = tuple(read_compared_run(*item) for item in zip(_relative_names(locations), locations, opened, strict=True))
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


def _relative_names(locations: Sequence[str]) -> list[str]:
    """Return the paths without their common parent folders."""
    parts = [location.split("/") for location in locations]
    common = min(len(os.path.commonprefix(parts)), *(len(names) - 1 for names in parts))  # noqa: RUF071 -- of any bucket
    return ["/".join(names[common:]) for names in parts]


def _differ(key: str, runs: Sequence[ComparedRun]) -> bool:
    """Return whether runs differ in a setting; runs of unknown settings do not count."""
    # The configuration exists from the start, other settings since the first checkpoint.
    with_setting = [run for run in runs if _SEED in run.settings or ("." in key and any("." in name for name in run.settings))]
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
    if pairs := ", ".join(run.name for run in runs if "pair" in run.settings):
        notes.append(f"{pairs}: {UNKNOWN_TRAINING}")
    if any(run.state == "unfinished" for run in runs) and len(runs) > 1:
        notes.append("unfinished runs are shown as far as they have come")
    return notes


def _names_by_value(pairs: Iterable[tuple[str, str]]) -> str:
    """List values with the names that have them; empty if all values are equal."""
    names: dict[str, list[str]] = {}
    for value, name in pairs:
        names.setdefault(value, []).append(name)
    return "; ".join(f"{value} ({', '.join(members)})" for value, members in names.items()) if len(names) > 1 else ""


def _settings_table(comparison: Comparison) -> Table:
    # Runs that differ only in their seeds share a column.
    columns: dict[ComparedRow, list[int]] = {}
    for index, run in enumerate(comparison.runs):
        columns.setdefault(comparison.row_of(run), []).append(index)
    rows: list[Row] = []
    for key, values in comparison.differences.items():
        settings = (dict.fromkeys(_setting(values[index]) for index in indices) for indices in columns.values())
        rows.append((key, *map(", ".join, settings)))
    return Table(["", *(row.label for row in columns)], rows, "what differs")


def _setting(value: Any) -> str:
    """Format a setting compactly."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_setting(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_setting, value))
    return ABSENT if value is None else value if isinstance(value, str) else dump(value)


def _progress(comparison: Comparison) -> Table:
    columns = (
        *("run", "ended by", Column("steps", ","), Column("best step", ",")),
        *(Column("steps/s", ".2f"), Column("pairs/s", ",.0f")),
    )
    rows: list[Row] = []
    for run in (run for run in comparison.runs if run.state != EVALUATED):
        best, speed = run.history.best or {}, run.history.speed
        numbers = (best.get("step"), speed.get("steps_per_second"), speed.get("pairs_per_second"))
        rows.append((run.name, run.state, run.history.last_step, *(ABSENT if value is None else value for value in numbers)))
    return Table(columns, rows, "progress")


def _scores(comparison: Comparison) -> Table:
    headings = [f"{ARROWS[direction]}\n{SHORT[measure]}" for direction, measure in SCORES]
    rows: list[Row] = []
    marked = not_worse(comparison.tests)
    for gallery in comparison.galleries:
        rows.append((Cell((gallery.name, gallery.size), style="bold"),))
        lines: list[tuple[ComparedRow | None, str, GalleryScores, str]] = []
        for run in (run for run in comparison.runs if gallery in run.measured):
            row = comparison.row_of(run)
            lines.append((None if len(row.runs) > 1 else row, run.name, run.measured[gallery].scores, ""))
        for group in comparison.groups:
            label = f"{group.name}, mean of {len(group.runs)}"
            lines.append((group, label, group.scores(gallery, mean), "italic"))
            lines.append((None, "  deviation", group.scores(gallery, stdev), "italic"))
        lines.append((None, "chance", comparison.chance(gallery), "dim"))
        for owner, label, scores, style in (line for line in lines if line[2]):
            specs = {} if label == "  deviation" else {"median_rank": "g"}
            texts = {pair: format(round(value, 1), specs.get(pair[1], ".1f")) for pair, value in scores.items()}
            for pair in texts if comparison.tests else ():  # Marked and other digits are aligned.
                texts[pair] += _NOT_WORSE if ((gallery, pair[0]), pair[1], owner) in marked else " "
            cells = (f" {label}", *(texts.get(pair, "") for pair in (*SCORES, SUM)))
            rows.append([Cell(text, style=style) for text in cells])
            intervals = {way: owner and comparison.intervals.get((gallery, way), {}).get(owner) for way in DIRECTIONS}
            if any(intervals.values()):
                ends = [getattr(intervals[way], measure, None) for way, measure in SCORES]
                bounds = [Cell(end and (f"{round(end.low, 1)}–", f"{round(end.high, 1)} "), style="dim") for end in ends]
                rows.append((Cell("  95 % interval", style="dim"), *bounds))
    notes = ["recalls in percent; med: median rank; i→t: image to text, t→i: text to image; sum: of the six recalls, 0 to 600"]
    if any(comparison.intervals.values()):
        notes += interval_notes(gallery.images for gallery in comparison.galleries)
    if comparison.tests:
        notes.append(
            f"{_NOT_WORSE}: not significantly worse than the best of its column (p of at least {LEVEL}, over seeds if any)"
        )
    return Table(["", *number_columns(*headings, "sum")], rows, "scores at the best step", notes)


def _tests(comparison: Comparison) -> Table:
    rows: list[Row] = []
    tests: dict[tuple[Any, ...], dict[str, Difference]] = {}
    for test in comparison.tests:
        tests.setdefault((*test.place, *sorted(test.rows, key=lambda row: row.name)), {})[test.measure] = test
    for (gallery, direction, first, second), by_measure in tests.items():
        signs = {measure: 1 if test.rows[0] == first else -1 for measure, test in by_measure.items()}
        texts = {name: f"{signs[name] * test.difference:+.1f}  p {test.p_value:.3f}" for name, test in by_measure.items()}
        seeds = {name: f"p {test.seed_p_value:.3f}" for name, test in by_measure.items() if test.seed_p_value is not None}
        pair = f" {first.name} - {second.name}"
        rows.append(((f"{gallery.name} {ARROWS[direction]}", pair), *map(texts.get, RECALLS)))
        rows += [("  over seeds", *map(seeds.get, RECALLS))] if seeds else []
    notes = [
        f"p: paired randomization over images, two-sided, Holm's correction over these {len(comparison.tests)} tests; up to four "
        "rows are tested in all pairs, more rows each against the best of the column",
    ]
    if any(test.seed_p_value is not None for test in comparison.tests):
        notes.append(
            "over seeds: permutations of runs, two-sided, Holm's correction; a few runs allow no small p, so all are marked"
        )
    return Table(["", *number_columns("R@1", "R@5", "R@10")], rows, "differences in percentage points", notes)

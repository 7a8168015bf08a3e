"""``imagepivot compare``: settings, progress and scores of runs side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from statistics import mean, stdev
from typing import Any

from schemas.conversion import dump
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from schemas.untrained import untrained_remark
from train.config.sections import settings_of
from train.runs.checkpoints import BEST, LAST, read_checkpoint
from train.runs.history import History, read_history
from train.runs.log import CONFIG, LOG

DIRECTIONS = ("image_to_text", "text_to_image")
MEASURES = ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank")

SCORES = tuple(product(DIRECTIONS, MEASURES))
"""Direction and measure of each score of a language."""

SUM = ("", "sum_of_recalls")
"""Direction (none) and measure of the sum of the six recalls."""

_SEED = "seed"


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison.

    Attributes:
        name: the distinct end of its path.
        settings: configuration by dotted key. Runs with a checkpoint also have ``seed``, ``precision``, numbers of images without
            features, and the first digits of fingerprints (``data: captions``) and content digests (``content: captions``).
        state: stop reason (``patience``, ``epochs`` or ``steps``); ``unfinished`` for a run that is still training or was stopped.
        untrained: features of random weights that the run was trained on.
    """

    name: str
    folder: str
    settings: Mapping[str, Any]
    state: str
    history: History
    untrained: tuple[str, ...] = ()

    def scores(self, language: str) -> dict[tuple[str, str], float]:
        """Return a language's validation scores at the best step; empty if not evaluated.

        Keys are `SCORES` and `SUM`.
        """
        metrics = (self.history.best or {}).get(language)
        if not isinstance(metrics, Mapping) or language not in self.history.languages:
            return {}
        return {pair: metrics[pair[0]][pair[1]] for pair in SCORES} | {SUM: metrics[SUM[1]]}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        best = self.history.best
        return {
            "name": self.name,
            "folder": self.folder,
            "state": self.state,
            "step": self.history.last_step,
            "settings": dict(self.settings),
            "best": None if best is None else {key: value for key, value in best.items() if key != "event"},
            "speed": self.history.speed,
            "untrained": list(self.untrained),
        }


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seeds, with the common prefix of their names."""

    name: str
    runs: tuple[ComparedRun, ...]

    def scores(self, language: str, statistic: Callable[[list[float]], float]) -> dict[tuple[str, str], float]:
        """Return a statistic of `ComparedRun.scores`; empty if a run has none."""
        scores = [run.scores(language) for run in self.runs]
        return {pair: statistic([values[pair] for values in scores]) for pair in scores[0]} if all(scores) else {}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        differences: settings that differ, by key, in the order of the runs; None for a run without the setting.
        notes: warnings about scores that cannot be compared.
    """

    runs: tuple[ComparedRun, ...]
    differences: Mapping[str, tuple[Any, ...]]
    groups: tuple[SeedGroup, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def languages(self) -> tuple[str, ...]:
        """All languages in which a run was evaluated."""
        return tuple(dict.fromkeys(language for run in self.runs for language in run.history.languages))

    def label(self, run: ComparedRun) -> str:
        """Return the name of a run, or of its group."""
        group = next((group for group in self.groups if run in group.runs), None)
        return run.name if group is None else f"{group.name} ({len(group.runs)} seeds)"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""

        def nested(scores: Mapping[tuple[str, str], float]) -> dict[str, Any]:
            tree: dict[str, Any] = {}
            for (direction, measure), value in scores.items():
                (tree.setdefault(direction, {}) if direction else tree)[measure] = value
            return tree

        return {
            "runs": [run.to_dict() for run in self.runs],
            "differences": {key: list(values) for key, values in self.differences.items()},
            "groups": [
                {
                    "name": group.name,
                    "runs": [run.name for run in group.runs],
                    "mean": {language: nested(group.scores(language, mean)) for language in self.languages},
                    "deviation": {language: nested(group.scores(language, stdev)) for language in self.languages},
                }
                for group in self.groups
            ],
            "notes": list(self.notes),
        }


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
    runs = tuple(_read(*item) for item in zip(_names(locations), locations, opened, strict=True))
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    columns = {key: tuple(run.settings.get(key) for run in runs) for key in keys}
    return Comparison(
        runs=runs,
        differences={key: values for key, values in columns.items() if _differ(key, runs)},
        groups=_groups(runs),
        notes=tuple(_notes(runs)),
    )


def _names(locations: Sequence[str]) -> list[str]:
    """Return the paths without their common parent folders."""
    parts = [location.split("/") for location in locations]
    common = 0
    while all(len(names) > common + 1 for names in parts) and len({names[common] for names in parts}) == 1:
        common += 1
    return ["/".join(names[common:]) for names in parts]


def _read(name: str, location: str, folder: Folder) -> ComparedRun:
    files = [file for file in (LAST, BEST, CONFIG, LOG) if folder.size(file) is not None]
    if not files:
        raise DatasetError(
            f"{location!r} is not a run: it has none of {LAST}, {BEST}, {CONFIG} and {LOG}. Give folders that "
            "imagepivot train wrote"
        )
    checkpoint = read_checkpoint(folder, files[0]) if files[0] in (LAST, BEST) else None
    text = checkpoint.config if checkpoint else folder.read(CONFIG).decode(errors="replace") if CONFIG in files else ""
    try:
        settings = settings_of(text)
    except UsageError as error:
        raise DatasetError(f"{folder.path_of(CONFIG)} is damaged ({error}): copy the run again, or leave it out") from error
    state = "unfinished"
    if checkpoint is not None:
        state = checkpoint.progress.stop_reason or state
        settings |= {_SEED: checkpoint.seed, "precision": checkpoint.precision}
        settings |= {f"missing features: {split}": item.get("images") for split, item in checkpoint.missing_features.items()}
        settings |= {f"data: {name}": fingerprint[:12] for name, fingerprint in checkpoint.fingerprints.items()}
        settings |= {f"content: {name}": content[:12] for name, content in checkpoint.contents.items()}
    return ComparedRun(name, location, settings, state, read_history(folder), checkpoint.untrained if checkpoint else ())


def _differ(key: str, runs: Sequence[ComparedRun]) -> bool:
    """Return whether runs differ in a setting; runs of unknown settings do not count."""
    # The configuration exists from the start, other settings since the first checkpoint.
    with_setting = [run for run in runs if _SEED in run.settings or ("." in key and run.settings)]
    return len({dump(run.settings[key]) if key in run.settings else "" for run in with_setting}) > 1


def _groups(runs: Sequence[ComparedRun]) -> tuple[SeedGroup, ...]:
    by_settings: dict[str, list[ComparedRun]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key != _SEED}
        if _SEED in run.settings:
            by_settings.setdefault(json.dumps(same), []).append(run)
    groups = [group for group in by_settings.values() if len({run.settings[_SEED] for run in group}) > 1]
    return tuple(SeedGroup(_common_name([run.name for run in group]), tuple(group)) for group in groups)


def _common_name(names: Sequence[str]) -> str:
    """Return the common prefix of names, without a number or the word seed at its end."""
    equal = takewhile(lambda characters: len(set(characters)) == 1, zip(*names, strict=False))
    common = "".join(characters[0] for characters in equal).rstrip("0123456789/-_. ")
    return common.removesuffix("seed").rstrip("/-_. ") or "all"


def _notes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return warnings about runs on different captions, and unfinished runs."""
    notes = []
    for language in dict.fromkeys(language for run in runs for language in run.history.languages):
        captions = set()
        for run in runs:
            metrics = (run.history.best or {}).get(language)
            if isinstance(metrics, Mapping) and language in run.history.languages:
                portions = tuple(run.settings.get("data.portions", {}).get(language, ()))
                sources = [run.settings.get(key) for key in ("data: captions", "data.validation_split")]
                captions.add((*sources, portions, *(metrics[direction].get("queries") for direction in DIRECTIONS)))
        if len(captions) > 1:
            notes.append(
                f"{language}: the runs were not measured on the same captions, so that their scores cannot be compared"
            )
    if untrained := [run for run in runs if run.untrained]:
        remark = untrained_remark(name for run in untrained for name in run.untrained)
        notes.append(f"{', '.join(run.name for run in untrained)}: {remark}")
    if any(run.state == "unfinished" for run in runs) and len(runs) > 1:
        notes.append("unfinished runs are shown as far as they have come")
    return notes

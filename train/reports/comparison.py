"""``imagepivot compare``: runs side by side. What was set differently, how far they came, and what they retrieve."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import mean, stdev
from typing import Any

from schemas.conversion import dump
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from train.config.sections import settings_of
from train.runs.checkpoints import BEST, LAST, Checkpoint, read_checkpoint
from train.runs.history import History, read_history
from train.runs.log import CONFIG, LOG

MEASURES = tuple(
    (direction, measure)
    for direction in ("image_to_text", "text_to_image")
    for measure in ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank")
)
"""Direction and name of each score of a language."""

SUM = ("", "sum_of_recalls")
"""Likewise of the sum of the six recalls, which is of both directions."""

_SEED = "seed"


@dataclass(frozen=True)
class ComparedRun:
    """A run, as its folder tells of it.

    Attributes:
        name: the end of its path that tells it from the others.
        settings: its configuration by dotted key, with ``seed``, ``precision``, the images that were left out, and the first digits
            of the fingerprints (``data: captions``) and of the content of its data (``content: captions``); without these, and the
            seed, where it has no checkpoint yet.
        state: why it ended (``patience``, ``epochs`` or ``steps``); ``unfinished`` where it is still training or was stopped.
    """

    name: str
    folder: str
    settings: Mapping[str, Any]
    state: str
    history: History

    def scores(self, language: str) -> dict[tuple[str, str], float]:
        """Return the scores of a language on the validation split at the best step, by `MEASURES` and `SUM`.

        Empty where the language was not evaluated.
        """
        found = (self.history.best or {}).get(language)
        if not isinstance(found, Mapping) or language not in self.history.languages:
            return {}
        return {pair: found[pair[0]][pair[1]] for pair in MEASURES} | {SUM: found[SUM[1]]}

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
        }


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in nothing but their seeds; ``name`` is what their names have in common."""

    name: str
    runs: tuple[ComparedRun, ...]

    def mean(self, language: str) -> dict[tuple[str, str], float]:
        """Return the means of the runs' scores of a language, as `ComparedRun.scores`; empty where a run has none."""
        return {pair: mean(values) for pair, values in self._scores(language).items()}

    def deviation(self, language: str) -> dict[tuple[str, str], float]:
        """Return likewise their standard deviations, with n - 1."""
        return {pair: stdev(values) for pair, values in self._scores(language).items()}

    def _scores(self, language: str) -> dict[tuple[str, str], list[float]]:
        scores = [run.scores(language) for run in self.runs]
        return {pair: [values[pair] for values in scores] for pair in scores[0]} if all(scores) else {}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        differences: by key the settings of the runs, in their order, where they are not all the same; None where a run has none.
        groups: runs of which several differ in their seeds alone.
    """

    runs: tuple[ComparedRun, ...]
    differences: Mapping[str, tuple[Any, ...]]
    groups: tuple[SeedGroup, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def languages(self) -> tuple[str, ...]:
        """All languages that a run was evaluated in."""
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
                    "mean": {language: nested(group.mean(language)) for language in self.languages},
                    "deviation": {language: nested(group.deviation(language)) for language in self.languages},
                }
                for group in self.groups
            ],
            "notes": list(self.notes),
        }


def compare_runs(folders: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Put runs side by side, whatever their kinds of model and languages, and also while they train.

    Raises:
        UsageError: no folder is given, or one twice.
        DatasetError: a folder holds no run, or a damaged one.
    """
    locations = [os.fspath(folder).rstrip("/") or "/" for folder in folders]
    if not locations:
        raise UsageError("there is nothing to compare: give the folders of runs")
    opened = [Folder(location) for location in locations]
    paths = [str(folder.local_path) if folder.is_local else folder.location for folder in opened]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise UsageError(f"{locations[number]!r} is given twice: leave it out once")
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
    """Return the paths without the folders that all have in common."""
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
    if checkpoint is not None:
        settings |= _facts(checkpoint)
    stopped = checkpoint.progress.stop_reason if checkpoint else ""
    return ComparedRun(name, location, settings, stopped or "unfinished", read_history(folder))


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    missing = {f"missing features: {split}": values.get("images") for split, values in checkpoint.missing_features.items()}
    fingerprints = {f"data: {name}": fingerprint[:12] for name, fingerprint in checkpoint.fingerprints.items()}
    contents = {f"content: {name}": content[:12] for name, content in checkpoint.contents.items()}
    return {_SEED: checkpoint.seed, "precision": checkpoint.precision, **missing, **fingerprints, **contents}


def _differ(key: str, runs: Sequence[ComparedRun]) -> bool:
    """Tell whether runs differ in a setting; those of which it is not known do not count."""
    # The configuration is there from the start, the rest since the first checkpoint.
    known = [run for run in runs if _SEED in run.settings or ("." in key and run.settings)]
    return len({dump(run.settings[key]) if key in run.settings else "" for run in known}) > 1


def _groups(runs: Sequence[ComparedRun]) -> tuple[SeedGroup, ...]:
    by_settings: dict[str, list[ComparedRun]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key != _SEED}
        if _SEED in run.settings:
            by_settings.setdefault(json.dumps(same), []).append(run)
    groups = [group for group in by_settings.values() if len({run.settings[_SEED] for run in group}) > 1]
    return tuple(SeedGroup(_common_name([run.name for run in group]), tuple(group)) for group in groups)


def _common_name(names: Sequence[str]) -> str:
    """Return what names begin with, without a number, or the word seed, that it ends in."""
    alike = takewhile(lambda characters: len(set(characters)) == 1, zip(*names, strict=False))
    common = "".join(characters[0] for characters in alike).rstrip("0123456789/-_. ")
    return common.removesuffix("seed").rstrip("/-_. ") or "all"


def _notes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return what keeps the scores from being compared: other captions, or other numbers of them."""
    notes = []
    for language in dict.fromkeys(language for run in runs for language in run.history.languages):
        measured = {}
        for run in runs:
            found = (run.history.best or {}).get(language)
            if isinstance(found, Mapping) and language in run.history.languages:
                portions = run.settings.get("data.portions", {}).get(language, ())
                measured[run.name] = (
                    *(run.settings.get(key) for key in ("data: captions", "data.validation_split")),
                    *(tuple(portions), *(found[direction].get("queries") for direction in ("image_to_text", "text_to_image"))),
                )
        if len(set(measured.values())) > 1:
            notes.append(
                f"{language}: the runs were not measured on the same captions, so that their scores cannot be compared"
            )
    if any(run.state == "unfinished" for run in runs) and len(runs) > 1:
        notes.append("unfinished runs are shown as far as they have come")
    return notes

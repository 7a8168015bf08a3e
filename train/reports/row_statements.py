"""What the runs of each row were trained on, and which of them failed, as the results in a folder say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.reports.failures import Failure, read_failure
from train.reports.results import read_result, results_folder

ABSENT = "–"
"""Text for a number that there is none of."""

_ONE_CAUSE = ("diverged", "memory", "killed", "disk")
"""Kinds of failures of which each is one cause, whatever numbers and files its reason names."""


@dataclass(frozen=True)
class FailedRun:
    """A run without a result.

    Attributes:
        preset: preset of the row.
        seed: seed of the run.
        failure: why it failed.
    """

    preset: str
    seed: int
    failure: Failure

    @property
    def name(self) -> str:
        """Preset and seed, as messages name a run."""
        return f"{self.preset}, seed {self.seed}"

    @property
    def cause(self) -> tuple[str, ...]:
        """What it has in common with other runs that failed for the same cause."""
        failure = self.failure
        reason = failure.reason.replace(f"{self.preset}/seed-{self.seed}", "RUN").replace(self.preset, "ROW")
        return (failure.kind,) if failure.kind in _ONE_CAUSE else (failure.kind, reason)


def causes_of(failed: Iterable[FailedRun]) -> list[tuple[FailedRun, ...]]:
    """Return failed runs together with those that failed for the same cause."""
    causes: dict[tuple[str, ...], list[FailedRun]] = {}
    for run in failed:
        causes.setdefault(run.cause, []).append(run)
    return [tuple(runs) for runs in causes.values()]


@dataclass(frozen=True)
class RowStatement:
    """What the runs of a row were trained on.

    Attributes:
        preset: preset of the row.
        results: the results of its runs.
        failed: its runs that have none.
    """

    preset: str
    results: tuple[Mapping[str, Any], ...]
    failed: tuple[FailedRun, ...]

    @property
    def seeds(self) -> str:
        """Number of runs that were measured, of how many."""
        return f"{len(self.results)} of {len(self.results) + len(self.failed)}"

    @property
    def feature(self) -> str:
        """Name and source of the feature, and that it is untrained, if it is."""
        return self._stated(lambda result: f"{result['feature']}{', untrained' if result.get('untrained') else ''}")

    @property
    def recipe(self) -> str:
        """How the text of the captions became tokens."""
        return self._stated(lambda result: result.get("recipe", ""))

    @property
    def vocabulary(self) -> str:
        """Number of words in the vocabulary."""
        return _range(result.get("vocabulary") for result in self.results)

    @property
    def words(self) -> str:
        """Number of words that are frequent enough in the captions to have a vector, by sentence encoder if there are several."""
        return self._by_language("words")

    @property
    def pretrained(self) -> str:
        """Number of these words that began with a pretrained vector, likewise."""
        return self._by_language("pretrained")

    @property
    def members(self) -> tuple[str, ...]:
        """Presets of an ensemble, whose scores are the means of theirs; none if it is trained itself."""
        return next((tuple(result["members"]) for result in self.results if "members" in result), ())

    @property
    def captions(self) -> str:
        """Number of captions that were trained on, by language if there are several."""
        return self._by_language("captions")

    @property
    def steps(self) -> str:
        """Number of steps in all."""
        return _range(result.get("steps") for result in self.results)

    @property
    def best(self) -> str:
        """Number of steps after which the model that was measured was reached."""
        return _range(result.get("step") for result in self.results)

    def _stated(self, text: Callable[[Mapping[str, Any]], str]) -> str:
        return "; ".join(sorted({text(result) for result in self.results} - {""})) or ABSENT

    def _by_language(self, name: str) -> str:
        numbers = [result[name] for result in self.results if name in result]
        languages = list(dict.fromkeys(language for by_language in numbers for language in by_language))
        ranges = {language: _range(by_language.get(language) for by_language in numbers) for language in languages}
        if len(ranges) < 2:
            return next(iter(ranges.values()), ABSENT)
        return ", ".join(f"{language} {number}" for language, number in ranges.items())


def read_row(output: str, preset: str) -> RowStatement:
    """Read the results of a row, and why runs of it have none.

    Raises:
        DatasetError: a result is damaged.
    """
    folder = results_folder(output, preset)
    results = {path.stem: read_result(path) for path in sorted(folder.glob("seed-*.json"), key=_seed)}
    failed = []
    for path in sorted(folder.glob("failed-seed-*.json"), key=_seed):
        stored = read_failure(path)
        if stored is not None and path.stem.removeprefix("failed-") not in results:
            failed.append(FailedRun(preset, _seed(path), stored[0]))
    return RowStatement(preset, tuple(results.values()), tuple(failed))


def _seed(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _range(values: Iterable[int | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ABSENT
    return f"{known[0]:,}" if known[0] == known[-1] else f"{known[0]:,}–{known[-1]:,}"

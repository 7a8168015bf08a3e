"""Results and failures of ``imagepivot reproduce``, and summaries of rows."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.console.tables import ABSENT
from schemas.errors import DatasetError
from schemas.escapes import to_json
from schemas.fingerprints import sha256_of_json
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors
from train.evaluation.ranks import RANKS, Queries, join_runs, read_ranks
from train.runs.checkpoints import BEST

FAILURE_KINDS = {
    "diverged": "a loss, gradient or weight is no longer finite",
    "memory": "memory ran out, that of the machine or of the GPU",
    "killed": "the process of the run was killed, or crashed",
    "disk": "the disk is full, or its quota used up",
    "refused": "the message says what is wrong, and what to do",
    "fault": "an error that is not foreseen; its traceback is kept in the folder of the run",
}
"""The closed list of kinds of failures, with their meanings."""

_DIGEST = "sha256"
_ONE_CAUSE = ("diverged", "memory", "killed", "disk")
"""Kinds of failures with the same cause even if their reasons differ."""


@dataclass(frozen=True)
class Failure:
    """Failure of a run.

    Attributes:
        kind: one of `FAILURE_KINDS`.
        reason: description and advice in one line.
        traceback: traceback of a ``fault``, or the output of a crashed process.
    """

    kind: str
    reason: str
    traceback: str = ""


def results_folder(output: str, preset: str) -> Path:
    """Return the folder of ``seed-*.json`` and ``failed-seed-*.json`` of a row."""
    return Folder(output).local_path / "results" / preset


def finished_runs(output: str, preset: str) -> list[Path]:
    """Return the folders of a preset's measured runs, sorted by seed."""
    results = sorted(results_folder(output, preset).glob("seed-*.json"), key=_seed)
    runs = [Folder(output).local_path / "runs" / preset / path.stem for path in results]
    return [run for run in runs if (run / BEST).exists()]


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its digest, atomically."""
    _write_json(path, {**result, _DIGEST: sha256_of_json(result)})


def read_result(path: Path) -> dict[str, Any]:
    """Read a result.

    Raises:
        DatasetError: the file is damaged.
    """
    try:
        with storage_errors(str(path)):
            result = json.loads(path.read_bytes())
        if result.pop(_DIGEST) != sha256_of_json(result):
            raise ValueError("its content is not what was written")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(
            f"{str(path)!r} is damaged, or not a result of imagepivot reproduce ({type(error).__name__}: "
            f"{error}): delete it and the run of the same name, and give the same command again"
        ) from error
    return result


def write_failure(path: Path, failure: Failure, context: Mapping[str, Any]) -> None:
    """Write a failure without its traceback, and its context, e.g. the configuration."""
    _write_json(path, {"kind": failure.kind, "reason": failure.reason, **context})


def write_report(output: str, name: str, markdown: str, content: Mapping[str, Any]) -> list[str]:
    """Write ``NAME.md`` and ``NAME.json`` into a folder, and return their paths."""
    Folder(output).put(f"{name}.md", markdown.encode())
    _write_json(Path(output, f"{name}.json"), content)
    return [f"{output}/{name}.md", f"{output}/{name}.json"]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    Folder(str(path.parent)).put(path.name, (to_json(content, indent=2) + "\n").encode())


def read_failure(path: Path) -> Failure | None:
    """Read a failure; None if the file does not exist.

    A damaged file is itself a failure, of the kind ``refused``.
    """
    try:
        content = json.loads(path.read_bytes())
        kind, reason = content["kind"], " ".join(content["reason"].split())
        if kind not in FAILURE_KINDS:
            raise ValueError(kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Failure("refused", f"{str(path)!r} is damaged: the next command replaces it")
    return Failure(kind, reason)


@dataclass(frozen=True)
class FailedRun:
    """A run of a row without a result."""

    preset: str
    seed: int
    failure: Failure

    @property
    def name(self) -> str:
        """Preset and seed, for messages."""
        return f"{self.preset}, seed {self.seed}"


def causes_of(failed: Iterable[FailedRun]) -> list[tuple[FailedRun, ...]]:
    """Group failed runs by cause."""
    causes: dict[tuple[str, str], list[FailedRun]] = {}
    for run in failed:
        reason = run.failure.reason.replace(f"{run.preset}/seed-{run.seed}", "RUN").replace(run.preset, "ROW")
        cause = run.failure.kind, "" if run.failure.kind in _ONE_CAUSE else reason
        causes.setdefault(cause, []).append(run)
    return [tuple(runs) for runs in causes.values()]


@dataclass(frozen=True)
class RowSummary:
    """Summary of the runs of a row.

    Attributes:
        failed: the runs without results.
        ranks: ranks by language, portion, split and direction; without places where the queries of the runs
            differ, and empty if a run has no ranks. Not compared, as their arrays have no single truth value.
    """

    preset: str
    results: tuple[Mapping[str, Any], ...]
    failed: tuple[FailedRun, ...]
    ranks: Mapping[tuple[str, ...], Queries] = field(compare=False)

    @property
    def seeds(self) -> str:
        """Number of measured runs and of all."""
        return f"{len(self.results)} of {len(self.results) + len(self.failed)}"

    @property
    def scores(self) -> list[Mapping[str, Any]]:
        """Scores of all runs, see `train.evaluation.scores.Score.to_dict`."""
        return [score for result in self.results for score in result["scores"]]

    @property
    def feature(self) -> str:
        """Name and source of the feature, marked if it is untrained."""
        return self._texts(lambda result: f"{result['feature']}{', untrained' if result['untrained'] else ''}")

    @property
    def untrained(self) -> tuple[str, ...]:
        """Features of random weights, see `schemas.dataset.Dataset.untrained`."""
        return tuple(dict.fromkeys(name for result in self.results for name in result["untrained"]))

    @property
    def recipe(self) -> str:
        """Text recipe of the captions."""
        return self._texts(lambda result: result.get("recipe", ""))

    @property
    def members(self) -> tuple[str, ...]:
        """Presets of the members of an ensemble; empty for a single model."""
        return next((tuple(result["members"]) for result in self.results if "members" in result), ())

    def number(self, name: str) -> str:
        """Return the range of a number, by language or text encoder if several.

        ``words`` have a vector, ``pretrained`` a pretrained one; ``step`` is that of the best model, which is measured.
        """
        values = [result[name] for result in self.results if name in result]
        by_language = [value if isinstance(value, Mapping) else {"": value} for value in values]
        languages = dict.fromkeys(language for numbers in by_language for language in numbers)
        ranges = {language: _range(numbers.get(language) for numbers in by_language) for language in languages}
        if len(ranges) < 2:
            return next(iter(ranges.values()), ABSENT)
        return ", ".join(f"{language} {number}" for language, number in ranges.items())

    def _texts(self, text: Callable[[Mapping[str, Any]], str]) -> str:
        return "; ".join(sorted({text(result) for result in self.results} - {""})) or ABSENT


def read_row(output: str, preset: str) -> RowSummary:
    """Read the results, ranks and failures of a row.

    Raises:
        DatasetError: a result or its ranks are damaged.
    """
    folder = results_folder(output, preset)
    results = {path.stem: read_result(path) for path in sorted(folder.glob("seed-*.json"), key=_seed)}
    ranks = _read_ranks([folder / name for name in results])
    failed = []
    for path in sorted(folder.glob("failed-seed-*.json"), key=_seed):
        stored = read_failure(path)
        if stored is not None and path.stem.removeprefix("failed-") not in results:
            failed.append(FailedRun(preset, _seed(path), stored))
    return RowSummary(preset, tuple(results.values()), tuple(failed), ranks)


def _read_ranks(folders: Sequence[Path]) -> dict[tuple[str, ...], Queries]:
    if not folders or not all((folder / RANKS).exists() for folder in folders):
        return {}
    tables, ranks = [read_ranks(folder) for folder in folders], {}
    for place in tables[0].group_by(["language", "portion", "split", "direction"]).aggregate([]).to_pylist():
        if queries := join_runs([Queries.of(table, **place) for table in tables]):
            ranks[tuple(place.values())] = queries
    return ranks


def _seed(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _range(values: Iterable[int | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ABSENT
    return f"{known[0]:,}" if known[0] == known[-1] else f"{known[0]:,}–{known[-1]:,}"

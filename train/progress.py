"""Displays of the progress of a training, and of counted work."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schemas.console.progress import Monitoring, ProgressDisplay, Snapshot, format_rate

if TYPE_CHECKING:
    from rich.console import Console

    from train.chance import Chance


@dataclass(frozen=True)
class Report:
    """The state of a training, reported every few steps and after each evaluation.

    Attributes:
        steps: maximum number of steps; None without a limit, with early stopping alone.
        loss: mean loss of the last logged steps, per query.
        scores: sum of recalls on the validation split by language; empty except directly after an evaluation.
        best: best sum of recalls so far, over all monitored languages; -1 before the first evaluation.
        chance: recalls of a random ranking by language; empty if unknown.
        monitored: languages of ``best``.
        validation_loss: loss on the validation split, per query; None except directly after an evaluation.
        stops_early: early stopping may end the training before ``steps``.
    """

    step: int
    steps: int | None
    epoch: int
    loss: float
    scores: dict[str, float]
    best: float
    chance: Mapping[str, Chance] = field(default_factory=dict)
    monitored: tuple[str, ...] = ()
    validation_loss: float | None = None
    stops_early: bool = False

    @property
    def line(self) -> str:
        """Epoch, loss and best score, for people."""
        best = f", best {self._best}" if self.best >= 0 else ""
        return f"epoch {self.epoch}, loss {self.loss:.4g}{best}"

    @property
    def evaluation(self) -> str:
        """Scores of the evaluation, for people."""
        scores = ", ".join(f"{language} {score:.1f}" for language, score in self.scores.items())
        loss = "" if self.validation_loss is None else f"; validation loss {self.validation_loss:.4f}"
        return f"step {self.step:,}: sum of recalls {scores}; best {self._best}{loss}"

    @property
    def _best(self) -> str:
        return format_score(self.best, [self.chance[language] for language in self.monitored if language in self.chance])


def format_score(score: float, chances: Collection[Chance]) -> str:
    """Format a sum of recalls with its maximum and that of chance, if known.

    >>> from train.chance import Chance
    >>> format_score(217.34, [Chance((5.0, 25.0, 50.0), (5.0, 25.0, 50.0), images=20)])
    '217.3 of 600 (chance 160.0)'
    """
    if not chances:
        return f"{score:.1f}"
    chance = sum(chance.sum_of_recalls for chance in chances)
    return f"{score:.1f} of {600 * len(chances):,} (chance {chance:.1f})"


class TrainingDisplay(ProgressDisplay):
    """Display of the reports of a training."""

    _first: tuple[int, float] | None = None

    def __call__(self, report: Report) -> None:
        """Show a report."""
        now = time.monotonic()
        first_step, first_time = self._first = self._first or (report.step, now)
        more = {name: getattr(report, name) for name in ("epoch", "loss", "scores", "best", "validation_loss")}
        more["chance"] = {language: chance.sum_of_recalls for language, chance in report.chance.items()}
        counts = {"steps": report.step}
        snapshot = _TrainingSnapshot("train", "steps", counts, now - first_time, report.steps, first_step, more, report=report)
        if report.scores and not self._log_json:
            self._print(report.evaluation)
        self.show(snapshot, immediately=self._log_json and bool(report.scores))


@dataclass(frozen=True, kw_only=True)
class _TrainingSnapshot(Snapshot):
    report: Report

    @property
    def details(self) -> str:
        rate = f"{format_rate(self.rate).removesuffix('/s')} steps/s" if self.rate >= 1 else format_rate(self.rate)
        return ", ".join(part for part in (self.report.line, rate) if part)

    @property
    def left(self) -> str:
        left = super().left
        return f"at most {left}" if left and self.report.stops_early else left

    def to_line(self) -> str:
        count = f"step {self.done:,}{f' of {self.total:,}' if self.total else ''}"
        return f"{count}: {', '.join(part for part in (self.left, self.details) if part)}"


class CountDisplay(ProgressDisplay):
    """Display of counted work."""

    def __init__(
        self, console: Console, task: str, *, unit: str, total: int | None = None, monitoring: Monitoring = Monitoring()
    ) -> None:
        super().__init__(console, monitoring)
        self._task, self._unit, self._total = task, unit, total
        self._done = self._failed = self._earlier = 0
        self._started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.last = self._snapshot()
        super().__exit__(*error)

    def __call__(self, done: int, *, failed: int = 0) -> None:
        """Count more units, and the failed ones among them."""
        self._done += done
        self._failed += failed
        self.show(self._snapshot())

    def count_earlier(self) -> None:
        """Count the units of an earlier run as done, after the work is complete."""
        self._earlier = max(0, (self._total or 0) - self._done)
        self._done += self._earlier

    def _snapshot(self) -> Snapshot:
        counts, seconds = {self._unit: self._done, "failed": self._failed}, time.monotonic() - self._started
        return Snapshot(self._task, self._unit, counts, seconds, self._total, self._earlier)

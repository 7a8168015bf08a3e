"""Progress of a training, and of work that is counted, shown by `schemas.console.progress`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.console.progress import ProgressDisplay, Snapshot, format_rate

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Report:
    """The state of a training, reported every few steps and after each evaluation.

    Attributes:
        step: number of steps done.
        steps: maximum number of steps; None if only the stopping criterion ends the training.
        epoch: number of epochs done.
        loss: loss of the last batch, per query.
        scores: sum of recalls on the validation split by language; empty except directly after an evaluation.
        best: greatest sum of recalls so far, over all monitored languages; -1 before the first evaluation.
        validation_loss: loss on the validation split, per query; None except directly after an evaluation that measures it.
    """

    step: int
    steps: int | None
    epoch: int
    loss: float
    scores: dict[str, float]
    best: float
    validation_loss: float | None = None

    @property
    def line(self) -> str:
        """Epoch, loss and best score in a few words."""
        best = f", best sum of recalls {self.best:.1f}" if self.best >= 0 else ""
        return f"epoch {self.epoch}, loss {self.loss:.4f}{best}"

    @property
    def evaluation(self) -> str:
        """Scores of the evaluation in a few words."""
        scores = ", ".join(f"{language} {score:.1f}" for language, score in self.scores.items())
        loss = "" if self.validation_loss is None else f"; validation loss {self.validation_loss:.4f}"
        return f"step {self.step:,}: sum of recalls {scores}; best {self.best:.1f}{loss}"


class TrainingDisplay(ProgressDisplay):
    """Display of the reports of a training."""

    _first: tuple[int, float] | None = None

    def __call__(self, report: Report) -> None:
        """Show a report."""
        now = time.monotonic()
        first_step, first_time = self._first = self._first or (report.step, now)
        more = {name: getattr(report, name) for name in ("epoch", "loss", "scores", "best", "validation_loss")}
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

    def to_line(self) -> str:
        return f"step {self.done:,}{f' of {self.total:,}' if self.total else ''}: {self.details}"


class CountDisplay(ProgressDisplay):
    """Display of work that is counted: called with the number of units that were done."""

    def __init__(self, console: Console, task: str, *, unit: str, total: int | None = None, log_json: bool = False) -> None:
        super().__init__(console, log_json=log_json)
        self._task, self._unit, self._total = task, unit, total
        self._done = self._failed = self._earlier = 0
        self._started = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.last = self._snapshot()
        super().__exit__(*error)

    def __call__(self, done: int, *, failed: int = 0) -> None:
        """Count units that are done, and how many of them failed."""
        self._done += done
        self._failed += failed
        self.show(self._snapshot())

    def settle(self) -> None:
        """Count as done, once the work is complete, what an earlier run did of it."""
        self._earlier = max(0, (self._total or 0) - self._done)
        self._done += self._earlier

    def _snapshot(self) -> Snapshot:
        counts, seconds = {self._unit: self._done, "failed": self._failed}, time.monotonic() - self._started
        return Snapshot(self._task, self._unit, counts, seconds, self._total, self._earlier)

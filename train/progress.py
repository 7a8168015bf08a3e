"""The progress of a training, and of work that is counted: a live line on a terminal, elsewhere a line from time to time.

For programs each report is an event instead, see `schemas.events`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from schemas.progress import Snapshot, pace

__all__ = ["Counter", "ProgressLine", "Report"]

_PLAIN_SECONDS = 10.0
_JSON_SECONDS = 1.0
_WIDE = 120  # Columns of a terminal on which bar and details fit into one line.


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


class _Display:
    """Shows snapshots; a context manager.

    Args:
        console: where to show them to people.
        log_json: write events instead, one every second.
    """

    def __init__(self, console: Console, *, log_json: bool = False) -> None:
        self._console = console
        self._log_json = log_json
        self._live: Live | None = None
        self._lines: list[Progress] = []
        self._shown = self._now = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def _show(self, snapshot: Snapshot, line: str, details: str, *, at_once: bool = False) -> None:
        """Show a snapshot where it is time to; to people as a line, or its details beside a bar."""
        if not self._log_json and self._console.is_terminal:
            self._update(snapshot, details)
        elif at_once or self._now - self._shown >= (_JSON_SECONDS if self._log_json else _PLAIN_SECONDS):
            self._shown = self._now
            if not self._log_json:
                self._print(line)
            else:
                snapshot.emit()

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _update(self, snapshot: Snapshot, details: str) -> None:
        if self._live is None:
            count = MofNCompleteColumn() if snapshot.total else TextColumn("{task.completed:,.0f}")
            head = SpinnerColumn(), TextColumn(snapshot.task), BarColumn(20), count, TextColumn(snapshot.unit)
            tail = TextColumn("{task.fields[details]}"), TimeElapsedColumn(), TextColumn("{task.fields[left]}")
            wide = self._console.width >= _WIDE
            self._lines = [Progress(*head, *tail)] if wide else [Progress(*head), Progress(TextColumn(" "), *tail)]
            for progress in self._lines:
                progress.add_task(snapshot.task, total=snapshot.total, details="", left="")
            self._live = Live(Group(*self._lines), console=self._console, transient=True, refresh_per_second=5)
            self._live.start()
        for progress in self._lines:
            progress.update(progress.task_ids[0], completed=snapshot.done, details=details, left=snapshot.left)


class ProgressLine(_Display):
    """Line of progress that shows the reports of a training; a context manager.

    Args:
        console: console for the reports.
        log_json: write events instead.
    """

    def __init__(self, console: Console, *, log_json: bool = False) -> None:
        super().__init__(console, log_json=log_json)
        self._first: tuple[int, float] | None = None
        self._last: Snapshot | None = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self._log_json and self._last is not None:
            self._last.emit()

    def __call__(self, report: Report) -> None:
        """Show a report."""
        self._now = time.monotonic()
        first_step, first_time = self._first = self._first or (report.step, self._now)
        more = {name: getattr(report, name) for name in ("epoch", "loss", "scores", "best", "validation_loss")}
        self._last = snapshot = Snapshot(
            "train", "steps", {"steps": report.step}, self._now - first_time, report.steps, first_step, more=more
        )
        rate = f"{pace(snapshot.rate).removesuffix('/s')} steps/s" if snapshot.rate >= 1 else pace(snapshot.rate)
        details = ", ".join(part for part in (report.line, rate) if part)
        if report.scores and not self._log_json:
            self._print(report.evaluation)
        line = f"step {report.step:,}{f' of {report.steps:,}' if report.steps else ''}: {details}"
        self._show(snapshot, line, details, at_once=self._log_json and bool(report.scores))


class Counter(_Display):
    """Line of progress for work that is counted: called with the number of units that were done; a context manager.

    Args:
        console: where to show it.
        task: name of the work.
        unit: what is counted, e.g. ``images``.
        total: number of units in the whole work, if known.
        log_json: write events instead.
    """

    def __init__(self, console: Console, task: str, *, unit: str, total: int | None = None, log_json: bool = False) -> None:
        super().__init__(console, log_json=log_json)
        self._task, self._unit, self._total = task, unit, total
        self._done = self._failed = self._earlier = 0
        self._started = time.monotonic()

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._now = time.monotonic()
        if self._log_json:
            self._snapshot().emit()

    def __call__(self, done: int, *, failed: int = 0) -> None:
        """Count units that are done, and how many of them failed."""
        self._done += done
        self._failed += failed
        self._now = time.monotonic()
        snapshot = self._snapshot()
        self._show(snapshot, snapshot.to_line(), snapshot.details)

    def settle(self) -> None:
        """Count as done, once the work is complete, what an earlier run did of it."""
        self._earlier = max(0, (self._total or 0) - self._done)
        self._done += self._earlier

    def _snapshot(self) -> Snapshot:
        counts, seconds = {self._unit: self._done, "failed": self._failed}, self._now - self._started
        return Snapshot(self._task, self._unit, counts, seconds, self._total, self._earlier)

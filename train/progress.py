"""The progress of a training, for people: a live line on a terminal, elsewhere a line from time to time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["ProgressLine", "Report"]

_PLAIN_SECONDS = 10.0


@dataclass(frozen=True)
class Report:
    """The state of a training, reported every few steps and after each evaluation.

    Attributes:
        step: number of steps done.
        steps: maximum number of steps; None if only the stopping criterion ends the training.
        epoch: number of epochs done.
        loss: loss of the last batch.
        scores: sum of recalls on the validation split by language; empty except directly after an evaluation.
        best: greatest sum of recalls so far, over all monitored languages; -1 before the first evaluation.
    """

    step: int
    steps: int | None
    epoch: int
    loss: float
    scores: dict[str, float]
    best: float

    @property
    def line(self) -> str:
        """Epoch, loss and best score in a few words."""
        best = f", best sum of recalls {self.best:.1f}" if self.best >= 0 else ""
        return f"epoch {self.epoch}, loss {self.loss:.2f}{best}"

    @property
    def evaluation(self) -> str:
        """Scores of the evaluation in a few words."""
        scores = ", ".join(f"{language} {score:.1f}" for language, score in self.scores.items())
        return f"step {self.step:,}: sum of recalls {scores}; best {self.best:.1f}"


class ProgressLine:
    """Line of progress that shows reports; a context manager.

    Args:
        console: console for the reports.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Progress | None = None
        self._first: tuple[int, float] | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, report: Report) -> None:
        """Show a report."""
        now = time.monotonic()
        first_step, first_time = self._first = self._first or (report.step, now)
        rate = (report.step - first_step) / (now - first_time) if report.step > first_step else 0.0
        line = f"{report.line}, {rate:.1f} steps/s"
        if report.scores:
            self._print(report.evaluation)
        if self._console.is_terminal:
            self._update(report, line)
        elif now - self._shown >= _PLAIN_SECONDS:
            self._shown = now
            self._print(f"step {report.step:,}{f' of {report.steps:,}' if report.steps else ''}: {line}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _update(self, report: Report, line: str) -> None:
        if self._live is None:
            left = [TextColumn("left"), TimeRemainingColumn()] if report.steps else []
            count = MofNCompleteColumn() if report.steps else TextColumn("{task.completed:,.0f}")
            text = TextColumn("train"), BarColumn(), count, TextColumn("{task.fields[line]}")
            self._live = Progress(SpinnerColumn(), *text, TimeElapsedColumn(), *left, console=self._console, transient=True)
            self._live.add_task("train", total=report.steps, completed=report.step, line=line)
            self._live.start()
        self._live.update(self._live.task_ids[0], completed=report.step, line=line)

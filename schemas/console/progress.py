"""Progress of a run: the counts of one moment, shown as a line to people and as an event to programs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from schemas.console.events import emit, line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_JSON_SECONDS = 1.0
_WIDE = 120  # Columns of a terminal on which bar and details fit into one line.
_LONGEST_NAME = 30


def pace(rate: float) -> str:
    """Return a rate in words that are never zero: ``12.5/s``, or ``2.4 s each`` if it is less than one; empty for none."""
    if rate <= 0:
        return ""
    if rate >= 1:
        return f"{rate:,.1f}/s"
    return f"{1 / rate:.1f} s each" if rate > 1 / 60 else f"{duration(1 / rate)} each"


def duration(seconds: float) -> str:
    """Return a time as ``45 s``, ``12 min 30 s`` or ``3 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


@dataclass(frozen=True)
class Snapshot:
    """Progress of a run at one moment.

    Attributes:
        task: name of the work, e.g. that of the extractor.
        unit: name of the count that is shown, e.g. ``images``.
        counts: counts of all workers, by name.
        total: number of units in the whole run, if known.
        earlier: number of the units that were done before the run began, or that no worker counted.
        more: other values of the event.
        is_known: whether the counts say how far the run is; a runner on other machines may not tell before the end.
    """

    task: str
    unit: str
    counts: Mapping[str, int]
    seconds: float
    total: int | None = None
    earlier: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True

    @property
    def done(self) -> int:
        """Number of units that are done."""
        return self.counts.get(self.unit, 0)

    @property
    def failed(self) -> int:
        """Number of units that failed."""
        return self.counts.get("failed", 0)

    @property
    def rate(self) -> float:
        """Units per second since the run began."""
        return max(0, self.done - self.earlier) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at this rate; None while the total is unknown or nothing is done."""
        return max(0, self.total - self.done) / self.rate if self.total and self.rate else None

    @property
    def bottleneck(self) -> str | None:
        """``decoding`` if the model spends more than a tenth of its time waiting for images, else ``model``.

        None if no worker reports its times.
        """
        waiting, working = self.counts.get("wait_msec", 0), self.counts.get("forward_msec", 0)
        if not working:
            return None
        return "decoding" if waiting > 0.1 * (waiting + working) else "model"

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the event ``progress``; the rate has three significant digits."""
        return {
            "what": self.task,
            "unit": self.unit,
            "done": self.done if self.is_known else None,
            "failed": self.failed if self.is_known else None,
            "total": self.total,
            "seconds": round(self.seconds, 1),
            "per_second": float(f"{self.rate:.3g}"),
            "seconds_left": None if self.seconds_left is None else round(self.seconds_left, 1),
            "bottleneck": self.bottleneck,
            **self.more,
        }

    @property
    def details(self) -> str:
        """Rate, failures and bottleneck, in words."""
        if not self.is_known:
            return "running"
        failed = f"{self.failed:,} failed" if self.failed else ""
        bound = f"bound by {self.bottleneck}" if self.bottleneck else ""
        return ", ".join(part for part in (pace(self.rate), failed, bound) if part)

    @property
    def left(self) -> str:
        """Time left, in words; empty if it is unknown."""
        return f"{duration(self.seconds_left)} left" if self.seconds_left is not None else ""

    def to_line(self) -> str:
        """Return the snapshot as a line for people."""
        if not self.is_known:
            return f"{self.task}: running for {duration(self.seconds)}, the runner does not say how far it is"
        count = f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}"
        return f"{self.task}: {', '.join(part for part in (count, self.left, self.details) if part)}"


class ProgressDisplay:
    """Display of snapshots: on a terminal a live line, elsewhere a line every ten seconds; a context manager.

    Args:
        console: console for people.
        log_json: write an event every second and one at the end instead, for programs.

    Attributes:
        interval: seconds between two snapshots that are shown.
        last: snapshot of the event at the end; None writes none.
    """

    def __init__(self, console: Console, *, log_json: bool = False) -> None:
        self.interval = _JSON_SECONDS if log_json else _LIVE_SECONDS if console.is_terminal else _PLAIN_SECONDS
        self.last: Snapshot | None = None
        self._console = console
        self._log_json = log_json
        self._shown = time.monotonic()
        self._live: Live | None = None
        self._lines: list[Progress] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._log_json and self.last is not None:
            self._write(self.last)

    def show(self, snapshot: Snapshot, *, immediately: bool = False) -> None:
        """Update the live line; elsewhere write the snapshot if it is due, or immediately."""
        self.last = snapshot
        if self._console.is_terminal and not self._log_json:
            self._draw(snapshot)
        elif immediately or time.monotonic() - self._shown >= self.interval:
            self._shown = time.monotonic()
            self._write(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        if not self._log_json:
            self._print(snapshot.to_line())
        elif not emit("progress", **snapshot.to_fields()):
            self._print(line("progress", **snapshot.to_fields()))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, snapshot: Snapshot) -> None:
        """Update the live line, or two lines on a terminal that is narrow."""
        if self._live is None:
            from rich.console import Group
            from rich.live import Live
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            name = snapshot.task if len(snapshot.task) <= _LONGEST_NAME else f"…{snapshot.task[1 - _LONGEST_NAME :]}"
            label, counter = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[count]}")
            head = (SpinnerColumn(), label, BarColumn(20), counter, TextColumn(snapshot.unit))
            tail = (TextColumn("{task.fields[details]}"), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
            is_wide = self._console.width >= _WIDE
            self._lines = [Progress(*head, *tail)] if is_wide else [Progress(*head), Progress(TextColumn(" "), *tail)]
            for progress in self._lines:
                progress.add_task(name, total=snapshot.total, count="", details="", left="")
            self._live = Live(Group(*self._lines), console=self._console, transient=True, refresh_per_second=5)
            self._live.start()
        count = "" if not snapshot.is_known else f"{snapshot.done}/{snapshot.total}" if snapshot.total else f"{snapshot.done:,}"
        for progress in self._lines:
            progress.update(
                progress.task_ids[0], completed=snapshot.done, count=count, details=snapshot.details, left=snapshot.left
            )

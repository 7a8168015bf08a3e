"""Progress of a run, shown as a line on a terminal or as JSON events."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from schemas.console.events import emit, line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_JSON_SECONDS = 1.0
_WIDE = 140  # Columns of a terminal that fit bar and details into one line.
_MAX_NAME = 30
_MIN_TIME_CONSTANT = 60.0  # Seconds.


def format_rate(rate: float) -> str:
    """Format a rate as ``12.5/s``, or as ``2.4 s each`` if low; empty for 0."""
    if rate <= 0:
        return ""
    if rate >= 1:
        return f"{rate:,.1f}/s"
    return f"{1 / rate:.1f} s each" if rate > 1 / 60 else f"{format_duration(1 / rate)} each"


def format_duration(seconds: float) -> str:
    """Format a time as ``45 s``, ``12 min 30 s`` or ``3 h 20 min``."""
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
        task: name of the work, e.g. of the extractor.
        unit: name of the main count, e.g. ``images``.
        counts: counts of all workers, by name.
        total: number of units in the whole run, if known.
        earlier: number of units done before the run began, or not counted by a worker.
        more: further fields of the event.
        is_known: whether counts are known; some runners report them only at the end.
        smoothed_seconds_left: time left by a smoothed rate; None to use the mean rate.
    """

    task: str
    unit: str
    counts: Mapping[str, int]
    seconds: float
    total: int | None = None
    earlier: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True
    smoothed_seconds_left: float | None = None

    @property
    def done(self) -> int:
        """Number of finished units."""
        return self.counts.get(self.unit, 0)

    @property
    def failed(self) -> int:
        """Number of failed units."""
        return self.counts.get("failed", 0)

    @property
    def rate(self) -> float:
        """Units per second since the run began."""
        return max(0, self.done - self.earlier) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time left in seconds; None while the total is unknown or nothing is done."""
        if self.smoothed_seconds_left is not None:
            return self.smoothed_seconds_left
        return max(0, self.total - self.done) / self.rate if self.total and self.rate else None

    @property
    def bottleneck(self) -> str | None:
        """``decoding`` if the model waits over a tenth of the time, else ``model``."""
        waiting, working = self.counts.get("wait_msec", 0), self.counts.get("forward_msec", 0)
        if not working:
            return None
        return "decoding" if waiting > 0.1 * (waiting + working) else "model"

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the event ``progress``."""
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
        """Rate, failures and bottleneck as text."""
        if not self.is_known:
            return "running"
        failed = f"{self.failed:,} failed" if self.failed else ""
        bound = f"bound by {self.bottleneck}" if self.bottleneck else ""
        return ", ".join(part for part in (format_rate(self.rate), failed, bound) if part)

    @property
    def left(self) -> str:
        """Time left as text; empty if unknown."""
        return f"{format_duration(self.seconds_left)} left" if self.seconds_left is not None else ""

    def to_line(self) -> str:
        """Return the snapshot as a line of text."""
        if not self.is_known:
            return f"{self.task}: running for {format_duration(self.seconds)}, the runner does not say how far it is"
        count = f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}"
        return f"{self.task}: {', '.join(part for part in (count, self.left, self.details) if part)}"


class _TimeLeft:
    """Estimate of the time left from an exponential moving average of the rate.

    Units arrive in bursts (batches, shards). The average therefore has one interval per burst, which lasts since the burst
    before, and the estimate counts down in between. Its time constant is a minute at first, later half of the elapsed time.
    """

    def __init__(self) -> None:
        self._done, self._seconds, self._gap = 0, 0.0, 0.0
        self._units, self._weight = 0.0, 0.0

    def update(self, snapshot: Snapshot) -> float | None:
        """Return the time left in seconds; None while it is unknown."""
        done = snapshot.done - snapshot.earlier
        idle = snapshot.seconds - self._seconds
        if done > self._done and idle > 0:
            self._units, self._weight = self._average(idle, done - self._done)
            self._done, self._seconds, self._gap, idle = done, snapshot.seconds, idle, 0.0
        if not snapshot.total or not self._units:
            return None
        units, weight = self._average(max(0.0, idle - self._gap), 0)  # A pause longer than the gap between bursts slows down.
        return max(0.0, max(0, snapshot.total - snapshot.done) * weight / units - min(idle, self._gap))

    def _average(self, seconds: float, units: int) -> tuple[float, float]:
        """Return decayed units and decayed seconds; their ratio is the average rate."""
        time_constant = max(_MIN_TIME_CONSTANT, self._seconds / 2)
        decay = math.exp(-seconds / time_constant)
        added = time_constant * (1 - decay)
        return self._units * decay + units * (added / seconds if seconds else 0), self._weight * decay + added


class ProgressDisplay:
    """Context manager that shows a live line, or without a terminal plain lines.

    Args:
        console: console for text.
        log_json: write a JSON event every second and at the end instead.

    Attributes:
        interval: seconds between two updates.
        last: snapshot of the last event; None writes none.
    """

    def __init__(self, console: Console, *, log_json: bool = False) -> None:
        self.interval = _JSON_SECONDS if log_json else _LIVE_SECONDS if console.is_terminal else _PLAIN_SECONDS
        self.last: Snapshot | None = None
        self._console = console
        self._log_json = log_json
        self._shown = time.monotonic()
        self._live: Live | None = None
        self._lines: list[Progress] = []
        self._time_left = _TimeLeft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._log_json and self.last is not None:
            self._write(self._smooth(self.last))

    def show(self, snapshot: Snapshot, *, immediately: bool = False) -> None:
        """Update the live line, or write the snapshot if it is due or ``immediately``."""
        self.last = snapshot
        snapshot = self._smooth(snapshot)
        if self._console.is_terminal and not self._log_json:
            self._draw(snapshot)
        elif immediately or time.monotonic() - self._shown >= self.interval:
            self._shown = time.monotonic()
            self._write(snapshot)

    def _smooth(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, smoothed_seconds_left=self._time_left.update(snapshot))

    def _write(self, snapshot: Snapshot) -> None:
        if not self._log_json:
            self._print(snapshot.to_line())
        elif not emit("progress", **snapshot.to_fields()):
            self._print(line("progress", **snapshot.to_fields()))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, snapshot: Snapshot) -> None:
        """Update the live line, or two lines on a narrow terminal."""
        if self._live is None:
            from rich.console import Group
            from rich.live import Live
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            name = snapshot.task if len(snapshot.task) <= _MAX_NAME else f"…{snapshot.task[1 - _MAX_NAME :]}"
            label, counter = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[count]}")
            head = (SpinnerColumn(), label, BarColumn(20), counter, TextColumn(snapshot.unit))
            details, times = TextColumn("{task.fields[details]}"), (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
            is_wide = self._console.width >= _WIDE
            columns = [(*head, details, *times)] if is_wide else [(*head, *times), (TextColumn(" "), details)]
            self._lines = [Progress(*line) for line in columns]
            for progress in self._lines:
                progress.add_task(name, total=snapshot.total, count="", details="", left="")
            self._live = Live(Group(*self._lines), console=self._console, transient=True, refresh_per_second=5)
            self._live.start()
        count = "" if not snapshot.is_known else f"{snapshot.done}/{snapshot.total}" if snapshot.total else f"{snapshot.done:,}"
        for progress in self._lines:
            progress.update(
                progress.task_ids[0], completed=snapshot.done, count=count, details=snapshot.details, left=snapshot.left
            )

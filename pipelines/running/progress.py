"""Progress of a local run: workers write their counts to small files, and the launcher adds them up and displays the sum.

Beam's local runner reports counters only at the end of a stage, and workers are separate processes; one file per process is
the simplest scheme that works for all of them. A remote runner has no such folder, and Beam's own counters take its place.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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

__all__ = ["Meter", "Snapshot", "bound_by", "show_progress"]

_WRITE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_JSON_SECONDS = 1.0

_counts: dict[str, dict[str, int]] = {}
_written: dict[str, float] = {}
_lock = threading.Lock()


def _write(folder: str, counts: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # The launcher may have deleted the folder; the work goes on.
        temporary = Path(folder, f"{os.getpid()}.tmp")
        temporary.write_text(json.dumps(counts))
        temporary.replace(Path(folder, f"{os.getpid()}.json"))


@dataclass(frozen=True)
class Meter:
    """Counter of the work that a worker has done; it travels with the functions of the pipeline.

    Attributes:
        folder: folder to which the workers of this run write their counts; None counts nothing.
    """

    folder: str | None = None

    def add(self, **counts: int) -> None:
        """Add to the counts of this process."""
        if self.folder is None:
            return
        with _lock:
            totals = _counts.setdefault(self.folder, {})
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
            now = time.monotonic()
            # The first counts are written at once; the monotonic clock may start anywhere, even close to zero.
            if now - _written.get(self.folder, -math.inf) >= _WRITE_SECONDS:
                _written[self.folder] = now
                _write(self.folder, totals)

    def flush(self) -> None:
        """Write the counts of this process, no matter how recently they were written."""
        with _lock:
            if self.folder is not None and self.folder in _counts:
                _write(self.folder, _counts[self.folder])

    def total(self) -> dict[str, int]:
        """Return the counts of all processes so far."""
        total: dict[str, int] = {}
        for path in Path(self.folder or "").glob("*.json") if self.folder else ():
            with contextlib.suppress(OSError, ValueError):
                for name, count in json.loads(path.read_text()).items():
                    total[name] = total.get(name, 0) + count
        return total


def bound_by(waiting: float, working: float) -> str:
    """Return ``decoding`` if the model spends more than a tenth of its time waiting for images, else ``model``."""
    return "decoding" if waiting > 0.1 * (waiting + working) else "model"


@dataclass(frozen=True)
class Snapshot:
    """Progress of a run at one moment.

    Attributes:
        task: name of the work, e.g. that of the extractor.
        unit: name of the count that is shown, e.g. ``images``.
        counts: counts of all workers, by name.
        seconds: seconds since the run began.
        total: number of units in the whole run, if known.
    """

    task: str
    unit: str
    counts: Mapping[str, int]
    seconds: float
    total: int | None = None

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
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at this rate; None while the total is unknown or nothing is done."""
        return (self.total - self.done) / self.rate if self.total and self.rate else None

    @property
    def bottleneck(self) -> str | None:
        """What limits the speed of the run, see `bound_by`; None if no worker reports its times."""
        waiting, working = self.counts.get("wait_msec", 0), self.counts.get("forward_msec", 0)
        if not working:
            return None
        return bound_by(waiting, working)

    def to_json(self) -> str:
        """Return the snapshot as one line of JSON."""
        return json.dumps(
            {
                "event": "progress",
                "what": self.task,
                "unit": self.unit,
                "done": self.done,
                "failed": self.failed,
                "total": self.total,
                "seconds": round(self.seconds, 1),
                "per_second": round(self.rate, 2),
                "seconds_left": None if self.seconds_left is None else round(self.seconds_left, 1),
                "bottleneck": self.bottleneck,
            }
        )

    def to_line(self) -> str:
        """Return the snapshot as a line for people."""
        parts = [f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}", f"{self.rate:,.1f}/s"]
        if self.seconds_left is not None:
            parts.append(f"{self.seconds_left:,.0f} s left")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.bottleneck:
            parts.append(f"bound by {self.bottleneck}")
        return f"{self.task}: {', '.join(parts)}"


@contextlib.contextmanager
def show_progress(
    console: Console, task: str, *, unit: str, total: int | None = None, log_json: bool = False
) -> Iterator[Meter]:
    """Display the progress of a run until the block ends.

    Args:
        console: console to print to: a live line on a terminal, elsewhere a line every ten seconds.
        task: name of the work, shown in front of the counts.
        unit: name of the count that is shown, e.g. ``images``; the count ``failed`` is shown next to it.
        total: number of units in the whole run, if known.
        log_json: print a line of JSON every second and one at the end instead, for programs that watch the run.

    Yields:
        The meter that the run counts with.
    """
    with tempfile.TemporaryDirectory(prefix="imagepivot-progress-") as folder:
        meter, stop, started = Meter(folder), threading.Event(), time.monotonic()

        def snapshot() -> Snapshot:
            return Snapshot(task, unit, meter.total(), time.monotonic() - started, total)

        def display() -> None:
            if log_json:
                while not stop.wait(_JSON_SECONDS):
                    _print_plain(console, snapshot().to_json())
            elif console.is_terminal:
                _show_live(console, snapshot, stop)
            else:
                while not stop.wait(_PLAIN_SECONDS):
                    _print_plain(console, snapshot().to_line())

        thread = threading.Thread(target=display, daemon=True)
        thread.start()
        try:
            yield meter
        finally:
            stop.set()
            thread.join()
            meter.flush()
            if log_json:
                _print_plain(console, snapshot().to_json())


def _print_plain(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _show_live(console: Console, snapshot: Callable[[], Snapshot], stop: threading.Event) -> None:
    total = snapshot().total
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if total else TextColumn("{task.completed:,.0f}"),
        TextColumn("{task.fields[details]}"),
        TimeElapsedColumn(),
        *([TextColumn("left"), TimeRemainingColumn()] if total else []),
    ]
    with Progress(*columns, console=console, transient=True) as progress:
        row = progress.add_task(snapshot().task, total=total, details="")
        while not stop.wait(0.2):
            current = snapshot()
            failed = f"  [red]{current.failed:,} failed[/red]" if current.failed else ""
            bound = f"  bound by {current.bottleneck}" if current.bottleneck else ""
            progress.update(row, completed=current.done, details=f"{current.unit}  {current.rate:,.1f}/s{bound}{failed}")

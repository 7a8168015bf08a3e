"""Progress of a local run: workers count into small files, the launcher adds them up and shows them.

Beam's local runner reports counters only at the end of a stage, and workers are processes of their own; a file a process is
the simplest thing that works for all of them. On a remote runner there is no such folder, and Beam's counters serve.
"""

from __future__ import annotations

import contextlib
import json
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
    with contextlib.suppress(OSError):  # Whoever watched may have gone; the work goes on.
        temporary = Path(folder, f"{os.getpid()}.tmp")
        temporary.write_text(json.dumps(counts))
        temporary.replace(Path(folder, f"{os.getpid()}.json"))


@dataclass(frozen=True)
class Meter:
    """Counts what a worker has done; travels with the pipeline's functions.

    Attributes:
        folder: where the workers of this run write their counts; None counts nothing.
    """

    folder: str | None = None

    def add(self, **counts: int) -> None:
        """Adds to this process's counts."""
        if self.folder is None:
            return
        with _lock:
            mine = _counts.setdefault(self.folder, {})
            for name, count in counts.items():
                mine[name] = mine.get(name, 0) + count
            if time.monotonic() - _written.get(self.folder, 0.0) >= _WRITE_SECONDS:
                _written[self.folder] = time.monotonic()
                _write(self.folder, mine)

    def flush(self) -> None:
        """Writes this process's counts, however short ago that was."""
        with _lock:
            if self.folder is not None and self.folder in _counts:
                _write(self.folder, _counts[self.folder])

    def total(self) -> dict[str, int]:
        """Counts of all processes so far."""
        total: dict[str, int] = {}
        for path in Path(self.folder or "").glob("*.json") if self.folder else ():
            with contextlib.suppress(OSError, ValueError):
                for name, count in json.loads(path.read_text()).items():
                    total[name] = total.get(name, 0) + count
        return total


def bound_by(waiting: float, working: float) -> str:
    """``decoding`` where the model waits for images in more than a tenth of its time, else ``model``."""
    return "decoding" if waiting > 0.1 * (waiting + working) else "model"


@dataclass(frozen=True)
class Snapshot:
    """How far a run is.

    Attributes:
        what: what is being done.
        unit: what is counted.
        counts: counts of all workers.
        seconds: since the run began.
        total: how many there are in all, if known.
    """

    what: str
    unit: str
    counts: Mapping[str, int]
    seconds: float
    total: int | None = None

    @property
    def done(self) -> int:
        """How many are done."""
        return self.counts.get(self.unit, 0)

    @property
    def failed(self) -> int:
        """How many of them failed."""
        return self.counts.get("failed", 0)

    @property
    def rate(self) -> float:
        """Done a second, since the run began."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time left at this rate, if the total is known and anything is done."""
        return (self.total - self.done) / self.rate if self.total and self.rate else None

    @property
    def bottleneck(self) -> str | None:
        """What bounds the run, see ``bound_by``; None if nobody says."""
        waiting, working = self.counts.get("wait_msec", 0), self.counts.get("forward_msec", 0)
        if not working:
            return None
        return bound_by(waiting, working)

    def to_json(self) -> str:
        """The snapshot as one line of JSON."""
        return json.dumps(
            {
                "event": "progress",
                "what": self.what,
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
        """The snapshot as a line for people."""
        parts = [f"{self.done:,}{f' of {self.total:,}' if self.total else ''} {self.unit}", f"{self.rate:,.1f}/s"]
        if self.seconds_left is not None:
            parts.append(f"{self.seconds_left:,.0f} s left")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.bottleneck:
            parts.append(f"bound by {self.bottleneck}")
        return f"{self.what}: {', '.join(parts)}"


@contextlib.contextmanager
def show_progress(
    console: Console, what: str, *, unit: str, total: int | None = None, log_json: bool = False
) -> Iterator[Meter]:
    """Shows how far a run is, until the block ends.

    Args:
        console: where to show it. On a terminal a live line, elsewhere a line every ten seconds.
        what: what is being done.
        unit: name of the count that is shown, e.g. ``images``; ``failed`` is shown beside it.
        total: how many there are in all, if known.
        log_json: instead of either, a line of JSON every second and one at the end, for programs that watch.

    Yields:
        The meter that the run counts with.
    """
    with tempfile.TemporaryDirectory(prefix="imagepivot-progress-") as folder:
        meter, stop, started = Meter(folder), threading.Event(), time.monotonic()

        def snapshot() -> Snapshot:
            return Snapshot(what, unit, meter.total(), time.monotonic() - started, total)

        def show() -> None:
            if log_json:
                while not stop.wait(_JSON_SECONDS):
                    _print_plain(console, snapshot().to_json())
            elif console.is_terminal:
                _show_live(console, snapshot, stop)
            else:
                while not stop.wait(_PLAIN_SECONDS):
                    _print_plain(console, snapshot().to_line())

        thread = threading.Thread(target=show, daemon=True)
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
        TextColumn("{task.fields[rest]}"),
        TimeElapsedColumn(),
        *([TextColumn("left"), TimeRemainingColumn()] if total else []),
    ]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(snapshot().what, total=total, rest="")
        while not stop.wait(0.2):
            now = snapshot()
            failed = f"  [red]{now.failed:,} failed[/red]" if now.failed else ""
            bound = f"  bound by {now.bottleneck}" if now.bottleneck else ""
            progress.update(task, completed=now.done, rest=f"{now.unit}  {now.rate:,.1f}/s{bound}{failed}")

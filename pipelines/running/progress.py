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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from schemas.events import line
from schemas.progress import Snapshot, bound_by

__all__ = ["Meter", "Snapshot", "bound_by", "show_progress"]

_WRITE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_JSON_SECONDS = 1.0
_WIDE = 120  # Columns of a terminal on which bar and details fit into one line.
_LONGEST_NAME = 30

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

    def settle(self, **counts: int) -> None:
        """Replace the counts by those of the finished dataset, when the work is done and no worker counts any more.

        The last counts of workers in other processes may be missing, and a run that continued an earlier one counted only its
        own part.
        """
        if self.folder is None:
            return
        self.flush()
        total = self.total()
        earlier = {f"earlier_{name}": max(0, count - total.get(name, 0)) for name, count in counts.items()}
        with _lock:
            for path in Path(self.folder).glob("*.json"):
                path.unlink()
            _counts[self.folder] = {**total, **counts, **earlier}
            _write(self.folder, _counts[self.folder])

    def total(self) -> dict[str, int]:
        """Return the counts of all processes so far."""
        total: dict[str, int] = {}
        for path in Path(self.folder or "").glob("*.json") if self.folder else ():
            with contextlib.suppress(OSError, ValueError):
                for name, count in json.loads(path.read_text()).items():
                    total[name] = total.get(name, 0) + count
        return total


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
            counts = meter.total()
            earlier = counts.get(f"earlier_{unit}")
            whole = total if earlier is None else counts[unit]  # Once the run has settled, all of it is done.
            return Snapshot(task, unit, counts, time.monotonic() - started, whole, earlier or 0)

        def report() -> None:
            current = snapshot()
            if not current.emit():
                _print_plain(console, line("progress", **current.to_fields()))

        def display() -> None:
            if log_json:
                while not stop.wait(_JSON_SECONDS):
                    report()
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
                report()


def _print_plain(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _show_live(console: Console, snapshot: Callable[[], Snapshot], stop: threading.Event) -> None:
    """Show a line with a bar, or two lines on a terminal that is narrow."""
    first = snapshot()
    name = first.task if len(first.task) <= _LONGEST_NAME else f"…{first.task[1 - _LONGEST_NAME :]}"
    count = MofNCompleteColumn() if first.total else TextColumn("{task.completed:,.0f}")
    head = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), count, TextColumn(first.unit))
    tail = (TextColumn("{task.fields[details]}"), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    lines = [Progress(*head, *tail)] if console.width >= _WIDE else [Progress(*head), Progress(TextColumn(" "), *tail)]
    rows = [progress.add_task(name, total=first.total, details="", left="") for progress in lines]
    with Live(Group(*lines), console=console, transient=True, refresh_per_second=5):
        while not stop.wait(0.2):
            current = snapshot()
            for progress, row in zip(lines, rows, strict=True):
                progress.update(row, completed=current.done, details=current.details, left=current.left)

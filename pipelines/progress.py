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
from collections.abc import Iterator
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

__all__ = ["Meter", "show_progress"]

_WRITE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0

_counts: dict[str, dict[str, int]] = {}
_written: dict[str, float] = {}
_lock = threading.Lock()


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
            if time.monotonic() - _written.get(self.folder, 0.0) < _WRITE_SECONDS:
                return
            _written[self.folder] = time.monotonic()
            with contextlib.suppress(OSError):  # Whoever watched may have gone; the work goes on.
                temporary = Path(self.folder, f"{os.getpid()}.tmp")
                temporary.write_text(json.dumps(mine))
                temporary.replace(Path(self.folder, f"{os.getpid()}.json"))

    def total(self) -> dict[str, int]:
        """Counts of all processes so far."""
        total: dict[str, int] = {}
        for path in Path(self.folder or "").glob("*.json") if self.folder else ():
            with contextlib.suppress(OSError, ValueError):
                for name, count in json.loads(path.read_text()).items():
                    total[name] = total.get(name, 0) + count
        return total


@contextlib.contextmanager
def show_progress(console: Console, what: str, *, unit: str, total: int | None = None) -> Iterator[Meter]:
    """Shows how far a run is, until the block ends.

    Args:
        console: where to show it. On a terminal a live line, elsewhere a line every ten seconds.
        what: what is being done.
        unit: name of the count that is shown, e.g. ``images``; ``failed`` is shown beside it.
        total: how many there are in all, if known.

    Yields:
        The meter that the run counts with.
    """
    with tempfile.TemporaryDirectory(prefix="imagepivot-progress-") as folder:
        meter = Meter(folder)
        stop = threading.Event()
        show = _show_live if console.is_terminal else _show_lines
        thread = threading.Thread(target=show, args=(console, what, unit, total, meter, stop), daemon=True)
        thread.start()
        try:
            yield meter
        finally:
            stop.set()
            thread.join()


def _show_live(console: Console, what: str, unit: str, total: int | None, meter: Meter, stop: threading.Event) -> None:
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if total else TextColumn("{task.completed:,.0f}"),
        TextColumn(unit + "  {task.fields[rate]}  {task.fields[failed]}"),
        TimeElapsedColumn(),
        *([TextColumn("left"), TimeRemainingColumn()] if total else []),
    ]
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, rate="", failed="")
        while not stop.wait(0.2):
            counts = meter.total()
            failed = f"[red]{counts['failed']:,} failed[/red]" if counts.get("failed") else ""
            rate = f"{counts.get(unit, 0) / (time.monotonic() - started):,.1f}/s"
            progress.update(task, completed=counts.get(unit, 0), failed=failed, rate=rate)


def _show_lines(console: Console, what: str, unit: str, total: int | None, meter: Meter, stop: threading.Event) -> None:
    started = time.monotonic()
    while not stop.wait(_PLAIN_SECONDS):
        counts = meter.total()
        done, seconds = counts.get(unit, 0), time.monotonic() - started
        of = f" of {total:,}" if total else ""
        left = f", {(total - done) * seconds / done:,.0f} s left" if total and done else ""
        failed = f", {counts['failed']:,} failed" if counts.get("failed") else ""
        console.print(f"{what}: {done:,}{of} {unit}, {done / seconds:,.1f}/s{left}{failed}", highlight=False)

"""Progress of a run: workers count, and the launcher adds up what they have counted and displays the sum.

On this machine they write their counts to small files: Beam's local runner reports counters only at the end of a stage, and workers
are separate processes; one file per process is the simplest scheme that works for all of them. Workers on other machines share no
such folder: they count with Beam's counters as well, the launcher asks the runner for these, and the answer is one more file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.console.progress import ProgressDisplay, Snapshot

if TYPE_CHECKING:
    from rich.console import Console

NAMESPACE = "imagepivot"
"""Namespace of Beam's counters of what a `Meter` counts."""

_RUNNERS = "runner.json"
_WRITE_SECONDS = 0.2

_counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
_written: dict[str, float] = {}
_lock = threading.Lock()


def counts_of(metrics: Iterable[Any]) -> dict[str, int]:
    """Return the sums of our counters of several steps: committed values, or attempted ones where the runner has no others."""
    counts: Counter[str] = Counter()
    for metric in metrics:
        if metric.key.metric.namespace == NAMESPACE:
            counts[metric.key.metric.name] += metric.committed or metric.attempted or 0
    return counts


def _write(folder: str, counts: Mapping[str, int], name: str = "") -> None:
    path = Path(folder, name or f"{os.getpid()}.json")
    with contextlib.suppress(OSError):  # The launcher may have deleted the folder; the work goes on.
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(counts))
        temporary.replace(path)


@dataclass(frozen=True)
class Meter:
    """Counter of the work that a worker has done; it travels with the functions of the pipeline.

    Attributes:
        folder: folder to which the workers of this run write their counts; None counts nothing.
    """

    folder: str | None = None

    def add(self, **counts: int) -> None:
        """Add to the counts of this process, and in a worker of Beam's to its counters of the same names."""
        if "apache_beam" in sys.modules:  # Elsewhere nobody would ask for them, and the import takes a second.
            from apache_beam.metrics import Metrics

            for name, count in counts.items():
                Metrics.counter(NAMESPACE, name).inc(count)
        if self.folder is None:
            return
        with _lock:
            totals = _counts[self.folder]
            totals.update(counts)
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

    def report(self, counts: Mapping[str, int]) -> None:
        """Put what a runner says of all its workers in the place of the counts of processes; nothing if it says nothing yet."""
        if self.folder is not None:
            _write(self.folder, counts, _RUNNERS)

    @property
    def is_known(self) -> bool:
        """Whether the counts say how far the run is: not while a runner says nothing."""
        if self.folder is None or not Path(self.folder, _RUNNERS).exists():
            return True
        return bool(self.total())

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
            _counts[self.folder] = Counter({**total, **counts, **earlier})
            _write(self.folder, _counts[self.folder])

    def total(self) -> dict[str, int]:
        """Return the counts of all processes so far; those of the runner, if it is asked for them."""
        total: Counter[str] = Counter()
        paths = list(Path(self.folder).glob("*.json")) if self.folder else []
        runners = [path for path in paths if path.name == _RUNNERS]
        for path in runners or paths:
            with contextlib.suppress(OSError, ValueError):
                total.update(json.loads(path.read_text()))
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
    with (
        tempfile.TemporaryDirectory(prefix="imagepivot-progress-") as folder,
        ProgressDisplay(console, log_json=log_json) as display,
    ):
        meter, stop, started = Meter(folder), threading.Event(), time.monotonic()

        def snapshot() -> Snapshot:
            counts = meter.total()
            earlier = counts.get(f"earlier_{unit}")
            whole = total if earlier is None else counts[unit]  # Once the run has settled, all of it is done.
            return Snapshot(task, unit, counts, time.monotonic() - started, whole, earlier or 0, is_known=meter.is_known)

        def watch() -> None:
            display.show(snapshot())
            while not stop.wait(display.interval):
                display.show(snapshot(), immediately=True)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield meter
        finally:
            stop.set()
            thread.join()
            meter.flush()
            display.last = snapshot()

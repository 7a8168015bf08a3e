"""Progress meter: workers count their work, and the launcher displays the sums.

Local workers write counts to a file per process. The launcher polls the counters of remote workers and writes them to a file.
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

from schemas.console.progress import FAILED, Monitoring, ProgressDisplay, Snapshot

if TYPE_CHECKING:
    from rich.console import Console

    from schemas.manifest import Manifest

NAMESPACE = "imagepivot"
"""Namespace of the Beam counters of a `Meter`."""

_RUNNERS = "runner.json"
_SHARD = ".shard"
_WRITE_SECONDS = 0.2

_counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
_written: dict[str, float] = {}
_lock = threading.Lock()


def counts_of(metrics: Iterable[Any]) -> dict[str, int]:
    """Sum our counters over steps: committed values, or else attempted ones."""
    counts: Counter[str] = Counter()
    for metric in metrics:
        if metric.key.metric.namespace == NAMESPACE:
            counts[metric.key.metric.name] += metric.committed or metric.attempted or 0
    return counts


def failure_counts(reasons: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of failures, in total and by reason.

    Absent reasons count 0: a count that appears with its first failure would have no rate before.
    """
    from schemas.kinds import FAILURE_REASONS  # Loads pyarrow, which a command's start does not need.

    by_reason = {f"{FAILED}{reason}": reasons.get(reason, 0) for reason in FAILURE_REASONS}
    return {"failed": sum(reasons.values()), **by_reason}


def dataset_counts(manifest: Manifest) -> dict[str, int]:
    """Return the counts of shards and failures of a finished dataset."""
    return {"shards": len(manifest.shards), **failure_counts(manifest.failure_reasons)}


def _write_counts(folder: str, counts: Mapping[str, int], name: str = "") -> None:
    path = Path(folder, name or f"{os.getpid()}.json")
    with contextlib.suppress(OSError):  # The launcher may have deleted the folder.
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(counts))
        temporary.replace(path)


@dataclass(frozen=True)
class Meter:
    """Counter of a worker's progress, pickled with the functions of the pipeline.

    Attributes:
        folder: folder for counts of local workers; None for none.
    """

    folder: str | None = None

    def add(self, **counts: int) -> None:
        """Add to the counts of this process, and to Beam's counters if it is loaded."""
        if "apache_beam" in sys.modules:
            from apache_beam.metrics import Metrics

            for name, count in counts.items():
                Metrics.counter(NAMESPACE, name).inc(count)
        if self.folder is None:
            return
        with _lock:
            totals = _counts[self.folder]
            totals.update(counts)
            now = time.monotonic()
            # The first counts are written immediately; a monotonic clock may start near zero.
            if now - _written.get(self.folder, -math.inf) >= _WRITE_SECONDS:
                _written[self.folder] = now
                _write_counts(self.folder, totals)

    def start_shard(self, shard: int) -> None:
        """Note the shard that this process writes."""
        if self.folder is not None:
            with contextlib.suppress(OSError):  # The launcher may have deleted the folder.
                Path(self.folder, f"{os.getpid()}{_SHARD}").write_text(str(shard))

    def finish_shard(self, **counts: int) -> None:
        """Count a written shard, add to other counts, and write them now."""
        self.add(shards=1, **counts)
        self.flush()

    def current_shards(self) -> tuple[int, ...]:
        """Return the last shard that each local process has started."""
        shards = []
        for path in sorted(Path(self.folder).glob(f"*{_SHARD}")) if self.folder else ():
            with contextlib.suppress(OSError, ValueError):  # It may be half written.
                shards.append(int(path.read_text()))
        return tuple(shards)

    def flush(self) -> None:
        """Write the counts of this process now."""
        with _lock:
            if self.folder is not None and self.folder in _counts:
                _write_counts(self.folder, _counts[self.folder])

    def report(self, counts: Mapping[str, int]) -> None:
        """Replace the processes' counts by a remote runner's; empty if still unknown."""
        if self.folder is not None:
            _write_counts(self.folder, counts, _RUNNERS)

    @property
    def is_known(self) -> bool:
        """Whether counts are known; a remote runner may report none yet."""
        if self.folder is None or not Path(self.folder, _RUNNERS).exists():
            return True
        return bool(self.total())

    def finalize(self, **counts: int) -> None:
        """Replace counts by those of the finished dataset, after all workers.

        The last counts of other processes may be missing, and a resumed run counts only its own part.
        """
        if self.folder is None:
            return
        self.flush()
        total = self.total()
        earlier = {f"earlier_{name}": max(0, count - total.get(name, 0)) for name, count in counts.items()}
        with _lock:
            for path in (*Path(self.folder).glob("*.json"), *Path(self.folder).glob(f"*{_SHARD}")):
                path.unlink()
            _counts[self.folder] = Counter({**total, **counts, **earlier})
            _write_counts(self.folder, _counts[self.folder])

    def total(self) -> dict[str, int]:
        """Return the sum over processes, or the remote runner's counts."""
        total: Counter[str] = Counter()
        paths = list(Path(self.folder).glob("*.json")) if self.folder else []
        runners = [path for path in paths if path.name == _RUNNERS]
        for path in runners or paths:
            with contextlib.suppress(OSError, ValueError):
                total.update(json.loads(path.read_text()))
        return total


@contextlib.contextmanager
def show_progress(
    console: Console,
    task: str,
    *,
    unit: str,
    total: int | None = None,
    monitoring: Monitoring = Monitoring(),
) -> Iterator[Meter]:
    """Display the progress of a run until the block ends.

    Args:
        console: a live line on a terminal, otherwise a line every ten seconds.
        task: name of the work, before the counts.
        unit: name of the displayed count, e.g. ``images``; the count ``failed`` follows it.
        total: number of units in the whole run, if known.
        monitoring: prints JSON events instead, or writes a file of metrics as well.

    Yields:
        The meter of the run.
    """
    with (
        # A worker of a runner may still count while the folder is deleted.
        tempfile.TemporaryDirectory(prefix="imagepivot-progress-", ignore_cleanup_errors=True) as folder,
        ProgressDisplay(console, monitoring) as display,
    ):
        meter, stop, started = Meter(folder), threading.Event(), time.monotonic()

        def snapshot() -> Snapshot:
            counts = meter.total()
            earlier = counts.get(f"earlier_{unit}")
            whole = total if earlier is None else counts[unit]  # A settled run is complete.
            return Snapshot(
                *(task, unit, counts, time.monotonic() - started, whole, earlier or 0),
                is_known=meter.is_known,
                current_shards=meter.current_shards(),
            )

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

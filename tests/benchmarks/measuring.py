"""Ratios of rates, peak memory and the test data of the benchmarks."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path


def test_data(name: str) -> Path | None:
    """A folder of the real data, as the tests find it, or None."""
    root = Path(os.environ.get("IMAGEPIVOT_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    return root / name if (root / name).is_dir() else None


def rate_of(call: Callable[[], object], items: int = 1) -> float:
    """Return items per second of a call that processes so many."""
    started = time.perf_counter()
    call()
    return items / (time.perf_counter() - started)


def ratio(
    what: str, ours: Callable[[], float], baseline: Callable[[], float], *, unit: str, at_least: float, runs: int = 3
) -> None:
    """Measure in turn, and print the rates and the median of their ratios: in pairs, so that a drift of the machine cancels.

    Args:
        what: what is measured.
        ours: runs once and returns a rate in ``unit``.
        baseline: runs once and returns a rate in ``unit``.
        unit: e.g. ``images/s``.
        at_least: the target.
        runs: number of pairs.
    """
    pairs = [(ours(), baseline()) for _ in range(runs)]
    ratios = sorted(a / b for a, b in pairs)
    rates = [_rate(statistics.median(side)) for side in zip(*pairs, strict=True)]
    print(
        f"{what}: {rates[0]} {unit}, baseline {rates[1]}; ratio {statistics.median(ratios):.2f} (target: at least {at_least}), "
        f"from {ratios[0]:.2f} to {ratios[-1]:.2f} in {runs} pairs",
        flush=True,
    )


def _rate(number: float) -> str:
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


class PeakMemory:
    """Peak memory of a process and all its children while a block runs, in bytes: the sum of their proportional sets."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0
        self.largest = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            sizes = [_proportional_set(pid) for pid in _tree(self._pid)]
            self.peak = max(self.peak, sum(sizes))
            self.largest = max(self.largest, *sizes, 0)
            time.sleep(0.05)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            found += _tree(int(child))
    return found


def _proportional_set(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0

"""What the benchmarks share: how a ratio is measured, and on what machine."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from processor import cores, machine

__all__ = ["PeakMemory", "cores", "machine", "ratio", "test_data"]


def test_data(name: str) -> Path | None:
    """A folder of the real data, as the tests find it, or None."""
    root = Path(os.environ.get("IMAGEPIVOT_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    return root / name if (root / name).is_dir() else None


def ratio(
    what: str, ours: Callable[[], float], yardstick: Callable[[], float], *, unit: str, at_least: float | None, runs: int = 3
) -> float:
    """Measures in turn and prints the rates and their ratio.

    Args:
        what: what is measured.
        ours: runs once and returns a rate in ``unit``.
        yardstick: likewise.
        unit: e.g. ``images/s``.
        at_least: the aim, if there is one.
        runs: pairs of runs; each pair gives a ratio, so that a drift of the machine cancels.

    Returns:
        The median of the pairs' ratios.
    """
    pairs = [(ours(), yardstick()) for _ in range(runs)]
    ratios = sorted(a / b for a, b in pairs)
    median = statistics.median(ratios)
    aim = "" if at_least is None else f" (aim: at least {at_least})"
    rates = [_rate(statistics.median(side)) for side in zip(*pairs, strict=True)]
    print(
        f"{what}: {rates[0]} {unit}, yardstick {rates[1]}; "
        f"ratio {median:.2f}{aim}, from {ratios[0]:.2f} to {ratios[-1]:.2f} in {runs} pairs",
        flush=True,
    )
    return median


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

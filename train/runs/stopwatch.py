"""Where the time of a training goes, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Measures a training, a lap at a time; a lap ends with each evaluation.

    On a GPU, which computes while the program goes on, what waits for it is charged for the wait: ``data``, where features are
    copied to it, or ``training``. A lap as a whole is exact, since an evaluation begins when the last step has ended.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin the first lap, or begin the lap again."""
        self._started = time.perf_counter()
        self._spent = {"data": 0.0, "evaluation": 0.0, "checkpoints": 0.0, "curves": 0.0}
        self._steps = self._pairs = 0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Charge the time of a block to ``data``, ``evaluation``, ``checkpoints`` or ``curves``; the rest is training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[part] += time.perf_counter() - started

    def count(self, pairs: int) -> None:
        """Count a step, and the pairs in its batches."""
        self._steps += 1
        self._pairs += pairs

    def lap(self) -> dict[str, Any]:
        """Return what was measured since the last lap, as plain values, and begin the next.

        Returns:
            ``steps`` and ``pairs`` done in ``seconds``; ``steps_per_second`` and ``pairs_per_second`` while training, that is
            without evaluations, checkpoints and curves; and the ``shares`` of time, which add up to 1.
        """
        seconds = time.perf_counter() - self._started
        spent = {"training": seconds - sum(self._spent.values()), **self._spent}
        stepping = spent["training"] + spent["data"]
        lap = {
            "steps": self._steps,
            "pairs": self._pairs,
            "seconds": round(seconds, 3),
            "steps_per_second": float(f"{self._steps / stepping:.4g}"),
            "pairs_per_second": float(f"{self._pairs / stepping:.4g}"),
            "shares": {part: round(time / seconds, 4) for part, time in spent.items()},
        }
        self.begin()
        return lap

from contextlib import suppress

import pytest

from train.runs import stopwatch
from train.runs.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; a function that puts it on."""
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_a_lap(clock):
    watch = Stopwatch()
    for _ in range(4):
        with watch.measure("data"):
            clock(0.5)
        clock(1.5)
        watch.count(32)
    with watch.measure("evaluation"):
        clock(6.0)
    with watch.measure("checkpoints"):
        clock(2.0)
    assert watch.lap() == {
        "steps": 4,
        "pairs": 128,
        "seconds": 16.0,
        "steps_per_second": 0.5,
        "pairs_per_second": 16.0,
        "shares": {"training": 0.375, "data": 0.125, "evaluation": 0.375, "checkpoints": 0.125, "curves": 0.0},
    }
    with suppress(KeyboardInterrupt), watch.measure("curves"):
        clock(1.0)
        raise KeyboardInterrupt
    clock(3.0)
    watch.count(10)
    lap = watch.lap()  # Of what came after the first.
    assert (lap["steps"], lap["pairs"], lap["seconds"]) == (1, 10, 4.0)
    assert lap["shares"] == {"training": 0.75, "data": 0.0, "evaluation": 0.0, "checkpoints": 0.0, "curves": 0.25}

import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from schemas.console import events
from schemas.console.progress import Monitoring
from train import progress
from train.chance import Chance
from train.progress import Report, TrainingDisplay

JSON = Monitoring(log_json=True)
CHANCE = {name: Chance((1.0, 5.0, 10.0), (2.0, 10.0, 20.0), images=50) for name in ("en", "de", "fr")}
REPORT = Report(step=1200, steps=5000, epoch=1, loss=12.345, scores={}, best=-1.0)
EVALUATED = Report(step=1210, steps=None, epoch=1, loss=12.0, scores={"en": 100.0, "de": 55.55}, best=155.55)
EVALUATED = replace(EVALUATED, chance=CHANCE, monitored=("en", "de"))

SCORES = "en 100.0, de 55.5; best 155.6 of 1,200 (chance 96.0)"


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def displayed(clock, times: list[float], *reports: Report) -> list[str]:
    """Return the lines of reports at some times, after the start of the display."""
    output, clock.now = io.StringIO(), times[0]
    with TrainingDisplay(Console(file=output, width=120)) as watch:
        for clock.now, report in zip(times[1:], reports, strict=True):
            watch(report)
    return output.getvalue().splitlines()


def test_training_display_without_a_terminal(clock):
    assert displayed(clock, [0.0, 5.0, 15.0], REPORT, EVALUATED) == [
        f"step 1,210: sum of recalls {SCORES}",
        "step 1,210: epoch 1, loss 12, best 155.6 of 1,200 (chance 96.0), 1.0 steps/s",
    ]
    assert displayed(clock, [0.0, 5.0, 9.0], REPORT, EVALUATED) == [f"step 1,210: sum of recalls {SCORES}"]


@pytest.fixture
def written(monkeypatch):
    """Turn standard error into events; a function that returns them, the last one left out."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    events.start()

    def read():
        events.finish(0)
        return [json.loads(text) for text in stream.getvalue().splitlines()[:-1]]

    yield read
    events.finish(0)


def test_training_display_events(clock, written):
    output = io.StringIO()
    with TrainingDisplay(Console(file=output), JSON) as watch:
        for step, seconds, scores in ((10, 0.5, {}), (20, 1.0, {}), (30, 0.1, {"en": 60.0}), (40, 0.1, {})):
            clock.now += seconds
            watch(Report(step=step, steps=50, epoch=1, loss=float("nan"), scores=scores, best=60.0))
    found = written()
    assert output.getvalue() == ""
    assert [(event["event"], event["done"], event["scores"]) for event in found] == [
        ("progress", 20, {}),
        ("progress", 30, {"en": 60.0}),
        ("progress", 40, {}),
    ]
    expected = {"task": "train", "unit": "steps", "total": 50, "epoch": 1, "best": 60.0, "loss": None}
    assert found[-1] == found[-1] | expected

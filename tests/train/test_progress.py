import io

from rich.console import Console

from train import progress
from train.progress import ProgressLine, Report

REPORT = Report(step=1200, steps=5000, epoch=1, loss=12.345, scores={}, best=-1.0)
EVALUATED = Report(step=1210, steps=None, epoch=1, loss=12.0, scores={"en": 100.0, "de": 55.55}, best=155.55)


def test_words():
    assert REPORT.line == "epoch 1, loss 12.35"
    assert EVALUATED.line == "epoch 1, loss 12.00, best sum of recalls 155.6"
    assert EVALUATED.evaluation == "step 1,210: sum of recalls en 100.0, de 55.5; best 155.6"


def shown(monkeypatch, *, terminal: bool, times: list[float]) -> str:
    clock = iter(times)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    output = io.StringIO()
    with ProgressLine(Console(file=output, force_terminal=terminal, width=120)) as watch:
        watch(REPORT)
        watch(EVALUATED)
    return output.getvalue()


def test_without_a_terminal_a_line_appears_from_time_to_time(monkeypatch):
    text = shown(monkeypatch, terminal=False, times=[0.0, 5.0, 15.0])
    assert text.splitlines() == [
        "step 1,210: sum of recalls en 100.0, de 55.5; best 155.6",
        "step 1,210: epoch 1, loss 12.00, best sum of recalls 155.6, 1.0 steps/s",
    ]
    quick = shown(monkeypatch, terminal=False, times=[0.0, 5.0, 9.0])
    assert quick.splitlines() == ["step 1,210: sum of recalls en 100.0, de 55.5; best 155.6"]


def test_a_live_line_on_a_terminal(monkeypatch):
    monkeypatch.undo()
    output = io.StringIO()
    with ProgressLine(Console(file=output, force_terminal=True, width=120)) as watch:
        watch(REPORT)
        watch(EVALUATED)
    assert "1200/5000" in output.getvalue()
    assert "loss 12.35" in output.getvalue()
    assert "sum of recalls en 100.0" in output.getvalue()

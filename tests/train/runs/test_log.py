import json
import sys
from contextlib import nullcontext

import pytest

from schemas.errors import DatasetError, UsageError
from train.runs import log as run_log
from train.runs.log import CURVES, LOG, METRICS, RunLog, Stopwatch


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / LOG).read_text().splitlines()]


def test_lines(tmp_path):
    with RunLog(tmp_path, step=0, tensorboard=False) as log:
        log.write("step", 10, {"loss": 1.5})
        assert steps(tmp_path) == [10]  # Written at once, not at the end.
        log.write("evaluation", 20, {"score": 3.0, "en": {"é": [1, None]}})
    first, second = (json.loads(line) for line in (tmp_path / LOG).read_text(encoding="utf-8").splitlines())
    assert first == {"event": "step", "step": 10, "loss": 1.5}
    assert second == {"event": "evaluation", "step": 20, "score": 3.0, "en": {"é": [1, None]}}
    table = (tmp_path / METRICS).read_text(encoding="utf-8")
    assert table == "event,step,loss,score,en.é\nstep,10,1.5,,\nevaluation,20,,3.0,1 mixed\n"


def test_lines_of_steps_to_be_repeated_are_dropped_before_anything_is_written(tmp_path):
    with RunLog(tmp_path, step=0, tensorboard=False) as log:
        for step in (10, 20, 30):
            log.write("step", step, {})
    with (tmp_path / LOG).open("a") as file:
        file.write('{"event": "st')  # Killed here.
    for _ in range(2):
        with RunLog(tmp_path, step=20, tensorboard=False):
            assert steps(tmp_path) == [10, 20]  # These lines are left if the process is killed here.
    with RunLog(tmp_path, step=20, tensorboard=False) as log:
        log.write("step", 30, {"again": True})
    assert steps(tmp_path) == [10, 20, 30]
    assert (tmp_path / LOG).read_text().count("again") == 1
    assert {path.name for path in tmp_path.iterdir()} == {LOG, METRICS}


@pytest.mark.parametrize("line", ["{", '{"step": "x"}', "", "\udcff"])
def test_damaged_line_is_an_error(tmp_path, line):
    text = f'{{"event": "step", "step": 10}}\n{line}\n{{"event": "step", "step": 20}}\n'
    (tmp_path / LOG).write_bytes(text.encode(errors="surrogateescape"))
    before = (tmp_path / LOG).read_bytes()
    with pytest.raises(DatasetError, match=r"log\.jsonl, line 2, is damaged"):
        RunLog(tmp_path, step=20, tensorboard=False)
    assert (tmp_path / LOG).read_bytes() == before


def test_line_may_hold_unicode_line_separators(tmp_path):
    with RunLog(tmp_path, step=0, tensorboard=False) as log:
        log.write("evaluation", 10, {"a\u2028b\x85": 1})
    before = (tmp_path / LOG).read_bytes()
    with RunLog(tmp_path, step=10, tensorboard=False):
        assert (tmp_path / LOG).read_bytes() == before


@pytest.fixture
def events_of():
    """Read the events of a folder."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return lambda folder: reading.EventAccumulator(str(folder / "tensorboard")).Reload()


def test_missing_library_is_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'imagepivot\[train\]', or leave the picture out with --no-curves"):
        RunLog(tmp_path, step=0, tensorboard=False, curves=True)
    assert not (tmp_path / LOG).exists()


def test_numbers_and_best_scores_for_tensorboard(tmp_path, events_of):
    with RunLog(tmp_path, step=0, tensorboard=True) as log:
        log.write("step", 10, {"loss": 1.5, "name": "no curve"})
        for step, score in ((10, 100.0), (20, 300.0), (30, 300.0)):
            log.write("evaluation", step, {"score": score, "en": {"sum_of_recalls": score}})
    events = events_of(tmp_path)
    points = {tag: [(scalar.step, scalar.value) for scalar in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    measured = [(10, 100.0), (20, 300.0), (30, 300.0)]
    assert points == {
        "step/loss": [(10, 1.5)],
        **dict.fromkeys(("evaluation/score", "evaluation/en/sum_of_recalls"), measured),
        **{name: [(20, 300.0)] for name in ("best/score", "best/en/sum_of_recalls")},  # Of equal ones the first.
        "best/step": [(20, 20.0)],
    }


# --- table and picture -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, DatasetError])
def test_table_and_picture_are_written_however_it_ends(tmp_path, ending):
    with pytest.raises(ending) if ending else nullcontext(), RunLog(tmp_path, step=0, tensorboard=False, curves=True) as log:
        log.write("step", 10, {"loss": 1.5})
        if ending is not None:
            raise ending
    assert (tmp_path / METRICS).read_text() == "event,step,loss\nstep,10,1.5\n"
    assert (tmp_path / CURVES).read_bytes().startswith(b"\x89PNG")


def test_error_is_not_hidden_by_another_at_the_end(tmp_path):
    (tmp_path / METRICS).mkdir()
    with pytest.raises(DatasetError, match="the first"), RunLog(tmp_path, step=0, tensorboard=False):
        raise DatasetError("the first")
    with pytest.raises(DatasetError, match=r"metrics\.csv"), RunLog(tmp_path, step=0, tensorboard=False):
        pass


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; a function that puts it on."""
    now = [100.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_lap(clock):
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


def test_sinks_receive_each_line_after_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "_sinks", [])
    lines, counts = [], []
    run_log.register_log_sink(lines.append)
    with RunLog(tmp_path, step=0, tensorboard=False, sinks=[lambda line: counts.append(len(steps(tmp_path)))]) as log:
        log.write("step", 10, {"loss": 1.5})
        log.write("evaluation", 20, {"score": 3.0, "en": {"text_to_image": {"recall_at_1": 50, "name": "a"}}})
    assert counts == [1, 2]
    assert [line[:3] for line in lines] == [(str(tmp_path), "step", 10), (str(tmp_path), "evaluation", 20)]
    assert lines[1].numbers == {"evaluation/score": 3.0, "evaluation/en/text_to_image/recall_at_1": 50.0}

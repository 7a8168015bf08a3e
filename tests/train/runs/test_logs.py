import json
import sys

import pytest

from schemas.errors import DatasetError, UsageError
from train.runs.logs import LOG, RunLog


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / LOG).read_text().splitlines()]


def test_lines(tmp_path):
    with RunLog(tmp_path, step=0, tensorboard=False) as log:
        log.write("step", 10, {"loss": 1.5})
        assert steps(tmp_path) == [10]  # Written at once, not at the end.
        log.write("evaluation", 20, {"score": 3.0, "en": {"é": [1, 2]}})
    first, second = (json.loads(line) for line in (tmp_path / LOG).read_text(encoding="utf-8").splitlines())
    assert first == {"event": "step", "step": 10, "loss": 1.5}
    assert second == {"event": "evaluation", "step": 20, "score": 3.0, "en": {"é": [1, 2]}}


def test_lines_of_steps_to_be_repeated_are_dropped(tmp_path):
    with RunLog(tmp_path, step=0, tensorboard=False) as log:
        for step in (10, 20, 30):
            log.write("step", step, {})
    with (tmp_path / LOG).open("a") as file:
        file.write('{"event": "st')  # Killed here.
    with RunLog(tmp_path, step=20, tensorboard=False) as log:
        log.write("step", 30, {"again": True})
    assert steps(tmp_path) == [10, 20, 30]
    assert (tmp_path / LOG).read_text().count("again") == 1


def test_kept_lines_are_on_disk_before_anything_is_written(tmp_path):
    with RunLog(tmp_path, step=0, tensorboard=False) as log:
        for step in (10, 20, 30):
            log.write("step", step, {})
    for _ in range(2):
        with RunLog(tmp_path, step=20, tensorboard=False):
            assert steps(tmp_path) == [10, 20]  # These lines are left if the process is killed here.
    with RunLog(tmp_path, step=20, tensorboard=False) as log:
        log.write("step", 30, {})
    assert steps(tmp_path) == [10, 20, 30]
    assert [path.name for path in tmp_path.iterdir()] == [LOG]


@pytest.mark.parametrize("line", ["{", "[1]", '{"event": "step"}', '{"step": "x"}', "\x00\x00", "", "\udcff"])
def test_a_damaged_line_is_an_error(tmp_path, line):
    text = f'{{"event": "step", "step": 10}}\n{line}\n{{"event": "step", "step": 20}}\n'
    (tmp_path / LOG).write_bytes(text.encode(errors="surrogateescape"))
    before = (tmp_path / LOG).read_bytes()
    with pytest.raises(DatasetError, match=r"log\.jsonl, line 2, is damaged"):
        RunLog(tmp_path, step=20, tensorboard=False)
    assert (tmp_path / LOG).read_bytes() == before


def test_a_line_may_hold_unicode_line_separators(tmp_path):
    with RunLog(tmp_path, step=0, tensorboard=False) as log:
        log.write("evaluation", 10, {"a\u2028b\x85": 1})
    before = (tmp_path / LOG).read_bytes()
    with RunLog(tmp_path, step=10, tensorboard=False):
        assert (tmp_path / LOG).read_bytes() == before


def test_events_for_tensorboard(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunLog(tmp_path, step=0, tensorboard=True) as log:
        log.write("step", 10, {"loss": 1.5, "name": "no curve"})
        log.write("evaluation", 10, {"en": {"text_to_image": {"recall_at_1": 12.0}}})
    events = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"step/loss", "evaluation/en/text_to_image/recall_at_1"}
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("step/loss")] == [(10, 1.5)]


def test_missing_tensorboard_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(UsageError, match=r"pip install 'imagepivot\[train\]', or leave its events out with --no-tensorboard"):
        RunLog(tmp_path, step=0, tensorboard=True)
    assert not (tmp_path / LOG).exists()

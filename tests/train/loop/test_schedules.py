from math import cos, pi

import pytest

from schemas.errors import DatasetError
from tests.train.trainings import CONFIG, events
from train.config.sections import ScheduleConfig, from_toml
from train.loop.schedules import learning_rate, max_total_steps, stop_reason
from train.runs.checkpoints import TrainingProgress

EPOCH = 10


def rates(keys: str, steps: range | list[int]) -> list[float]:
    """The learning rates of some steps, with a rate of 0.01 and epochs of ten steps."""
    config = from_toml(CONFIG + keys, "test")
    return [learning_rate(config, step=step, epoch=step // EPOCH, epoch_steps=EPOCH) for step in steps]


@pytest.mark.parametrize(
    ("progress", "schedule", "reason", "total"),
    [
        (TrainingProgress(step=9, evals_since_best=1), ScheduleConfig(patience=2, max_steps=10), "", 10),
        (TrainingProgress(step=9, evals_since_best=2), ScheduleConfig(patience=2, max_steps=10), "patience", 10),
        (TrainingProgress(step=9, evals_since_best=2), ScheduleConfig(patience=0, max_steps=10), "", 10),
        (TrainingProgress(step=10), ScheduleConfig(max_steps=10, max_epochs=3), "steps", 10),
        (TrainingProgress(step=10), ScheduleConfig(max_steps=0), "", None),
        (TrainingProgress(step=19), ScheduleConfig(max_epochs=2), "", 20),
        (TrainingProgress(step=20), ScheduleConfig(max_epochs=2, max_steps=70), "epochs", 20),
    ],
)
def test_stop_reason_and_maximum_of_steps(progress, schedule, reason, total):
    assert stop_reason(progress, schedule, EPOCH) == reason
    assert max_total_steps(schedule, EPOCH) == total


COSINE = 'lr_schedule = "cosine"\n'
HALVES = [0.005 * (1 + cos(pi * step / 44)) for step in range(45)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", dict.fromkeys(range(60), 0.01)),
        ("lr_step_epochs = 2\nlr_step_factor = 0.5", {0: 0.01, 19: 0.01, 20: 0.005, 39: 0.005, 40: 0.0025}),
        (COSINE, dict(enumerate(HALVES)) | {0: 0.01, 22: 0.005, 44: 0}),
        ("lr_warmup_steps = 4", {0: 0.0025, 1: 0.005, 2: 0.0075, 3: 0.01, 4: 0.01, 5: 0.01}),
        (COSINE + "lr_warmup_steps = 4", {1: 0.5 * HALVES[1]}),
    ],
    ids=["constant", "steps", "cosine", "warm-up", "both"],
)
def test_learning_rate(keys, expected):
    assert rates(keys, list(expected)) == pytest.approx(list(expected.values()))


@pytest.mark.slow
def test_training_uses_scheduled_rates(train_toy, tmp_path):
    text = CONFIG + 'lr_schedule = "cosine"\nlr_warmup_steps = 15'
    train_toy(text, "whole")
    used = {line["step"]: line["learning_rate"] for line in events(tmp_path / "whole", "step")}
    assert list(used.values()) == pytest.approx(rates('lr_schedule = "cosine"\nlr_warmup_steps = 15', [9, 19, 29, 39]))
    assert len(used) == 4
    # Another budget means other rates from the first step on.
    with pytest.raises(DatasetError, match=r"schedule\.max_steps: was 44, now 50"):
        train_toy(text.replace("44", "50"), "whole", resume=True)

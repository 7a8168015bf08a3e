from math import cos, pi

import pytest

from schemas.errors import DatasetError, UsageError
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
    ("progress", "schedule", "reason"),
    [
        (TrainingProgress(step=9, evals_since_best=1), ScheduleConfig(patience=2, max_steps=10), ""),
        (TrainingProgress(step=9, evals_since_best=2), ScheduleConfig(patience=2, max_steps=10), "patience"),
        (TrainingProgress(step=9, evals_since_best=2), ScheduleConfig(patience=0, max_steps=10), ""),
        (TrainingProgress(step=10), ScheduleConfig(max_steps=10), "steps"),
        (TrainingProgress(step=10), ScheduleConfig(max_steps=0), ""),
        (TrainingProgress(step=19), ScheduleConfig(max_epochs=2), ""),
        (TrainingProgress(step=20), ScheduleConfig(max_epochs=2), "epochs"),
    ],
)
def test_stop_reason(progress, schedule, reason):
    assert stop_reason(progress, schedule, 10) == reason


@pytest.mark.parametrize(("max_steps", "max_epochs", "expected"), [(7, 0, 7), (0, 3, 30), (7, 3, 7), (70, 3, 30), (0, 0, None)])
def test_max_total_steps(max_steps, max_epochs, expected):
    assert max_total_steps(ScheduleConfig(max_steps=max_steps, max_epochs=max_epochs), EPOCH) == expected


def test_learning_rate_is_constant_by_default():
    assert set(rates("", range(60))) == {0.01}


def test_learning_rate_steps():
    keys = "lr_step_epochs = 2\nlr_step_factor = 0.5"
    assert rates(keys, [0, 19, 20, 39, 40]) == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025])


def test_learning_rate_cosine():
    expected = [0.005 * (1 + cos(pi * step / 44)) for step in range(45)]
    assert rates('lr_schedule = "cosine"', range(45)) == pytest.approx(expected)
    assert (expected[0], expected[22], expected[44]) == pytest.approx((0.01, 0.005, 0))


def test_learning_rate_warmup():
    assert rates("lr_warmup_steps = 4", range(6)) == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    both = rates('lr_warmup_steps = 4\nlr_schedule = "cosine"', [1])
    assert both == pytest.approx([0.5 * 0.005 * (1 + cos(pi / 44))])


def test_cosine_without_a_limit_is_refused():
    with pytest.raises(UsageError, match=r"falls to 0 at the last step: give schedule\.max_steps or schedule\.max_epochs"):
        ScheduleConfig(lr_schedule="cosine")
    with pytest.raises(UsageError, match=r"schedule\.lr_step_epochs is 3, but schedule\.lr_schedule is 'cosine'"):
        ScheduleConfig(lr_schedule="cosine", max_steps=10, lr_step_epochs=3)


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

"""The schedule of a training: the learning rate of each step, and when to stop."""

from __future__ import annotations

from math import cos, pi

from train.config.sections import Config, ScheduleConfig
from train.runs.checkpoints import TrainingProgress


def steps_per_epoch(schedule: ScheduleConfig, batches: int) -> int:
    """Return the number of steps of an epoch of so many batches; the last one takes what is left."""
    return -(-batches // schedule.grad_accum_steps)


def steps_in_all(schedule: ScheduleConfig, epoch_steps: int) -> int | None:
    """Return the number of steps after which a training ends at the latest; None if nothing limits it."""
    return min((limit for limit in (schedule.max_steps, schedule.max_epochs * epoch_steps) if limit), default=None)


def learning_rate(config: Config, *, step: int, epoch: int, epoch_steps: int) -> float:
    """Return the learning rate of a step.

    ``step`` and ``epoch`` count what was done before it.
    """
    schedule, rate = config.schedule, config.optimizer.learning_rate
    if schedule.lr_schedule == "cosine":
        total = steps_in_all(schedule, epoch_steps)
        assert total is not None  # `ScheduleConfig` insists.
        rate *= (1 + cos(pi * min(step / total, 1))) / 2
    elif schedule.lr_step_epochs:
        rate *= schedule.lr_step_factor ** (epoch // schedule.lr_step_epochs)
    return rate * min(1, (step + 1) / schedule.lr_warmup_steps) if schedule.lr_warmup_steps else rate


def stop_reason(progress: TrainingProgress, schedule: ScheduleConfig, epoch_steps: int) -> str:
    """Return why a training is over: ``patience``, ``steps`` or ``epochs``; an empty string if it is not."""
    if schedule.patience and progress.evals_since_best >= schedule.patience:
        return "patience"
    if schedule.max_steps and progress.step >= schedule.max_steps:
        return "steps"
    if schedule.max_epochs and progress.step >= schedule.max_epochs * epoch_steps:
        return "epochs"
    return ""

"""Learning-rate schedule and stopping criteria."""

from math import cos, pi

from train.config.sections import Config, ScheduleConfig
from train.runs.checkpoints import TrainingProgress


def max_total_steps(schedule: ScheduleConfig, epoch_steps: int) -> int | None:
    """Return the maximum number of steps; None without a limit."""
    return min((limit for limit in (schedule.max_steps, schedule.max_epochs * epoch_steps) if limit), default=None)


def learning_rate(config: Config, *, step: int, epoch: int, epoch_steps: int) -> float:
    """Return the learning rate after some complete steps and epochs."""
    schedule, rate = config.schedule, config.optimizer.learning_rate
    if schedule.lr_schedule == "cosine":
        total = max_total_steps(schedule, epoch_steps)
        assert total is not None  # Checked by `ScheduleConfig`.
        rate *= (1 + cos(pi * min(step / total, 1))) / 2
    elif schedule.lr_step_epochs:
        rate *= schedule.lr_step_factor ** (epoch // schedule.lr_step_epochs)
    return rate * min(1, (step + 1) / schedule.lr_warmup_steps) if schedule.lr_warmup_steps else rate


def stop_reason(progress: TrainingProgress, schedule: ScheduleConfig, epoch_steps: int) -> str:
    """Return the reason to stop training; an empty string to continue."""
    if schedule.patience and progress.evals_since_best >= schedule.patience:
        return "patience"
    if schedule.max_steps and progress.step >= schedule.max_steps:
        return "steps"
    if schedule.max_epochs and progress.step >= schedule.max_epochs * epoch_steps:
        return "epochs"
    return ""

"""The folder of a run: checkpoints, logs, resuming, opening."""

from train.runs.checkpoints import BEST, LAST, Checkpoint, TrainingProgress, read_checkpoint, write_checkpoint
from train.runs.logs import LOG, RunLog
from train.runs.run import Run, open_run

__all__ = [
    "BEST",
    "LAST",
    "LOG",
    "Checkpoint",
    "Run",
    "RunLog",
    "TrainingProgress",
    "open_run",
    "read_checkpoint",
    "write_checkpoint",
]

"""The folder of a run: checkpoints, logs, resuming, opening."""

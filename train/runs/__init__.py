"""The folder of a run: checkpoints, log, curves, resuming, opening."""

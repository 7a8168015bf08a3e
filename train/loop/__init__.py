"""The training loop, its data and batches, schedules, several processes."""

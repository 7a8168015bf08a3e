"""Running a job: the runner, worker processes, progress."""

"""Running a job: local workers, Beam's runners, progress."""

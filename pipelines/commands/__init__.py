"""The command line: each module turns arguments into jobs, and nothing else."""

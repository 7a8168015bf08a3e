"""The commands of training: each module turns arguments into jobs, and nothing else."""

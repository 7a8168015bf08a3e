"""What a worker process may use of its machine: GPUs and decoding threads."""

from __future__ import annotations

import os
import re

from pipelines.features.job import FeaturesJob

__all__ = ["count_gpus", "decoding_threads", "device_of_worker"]


def count_gpus(job: FeaturesJob) -> int:
    """Return the number of GPUs of this machine that a job may use: all, unless it names a device."""
    import torch

    return torch.cuda.device_count() if job.device in ("auto", "cuda") and torch.cuda.is_available() else 0


def device_of_worker(job: FeaturesJob, worker_id: str) -> str:
    """Return the device of a worker process: of several GPUs the numbered workers take theirs in turn.

    Args:
        job: the job.
        worker_id: the name that Beam gives a local worker, e.g. ``worker_3``.

    Returns:
        ``cuda:N``, or the job's own device if there are not several.
    """
    number = re.search(r"(\d+)$", worker_id)
    gpus = count_gpus(job)
    return f"cuda:{int(number[1]) % gpus}" if gpus > 1 and number else job.device


def decoding_threads(job: FeaturesJob, cores: int = 0) -> int:
    """Return the number of threads that decode in a worker; others read, as many as the source of the images says.

    On a CPU the model needs the cores, and decoding takes a tenth of its time: one thread is enough.

    Args:
        job: the job.
        cores: cores of the worker; 0 for all of the machine.
    """
    import torch

    uses_gpu = torch.cuda.is_available() and job.device != "cpu"
    return (cores or os.cpu_count() or 1) if uses_gpu else 1

"""What a worker process may use of its machine: GPUs and decoding threads."""

from __future__ import annotations

import os
import re

from pipelines.features.job import FeaturesJob

__all__ = ["decoding_threads", "device_of_worker", "gpus_of"]


def gpus_of(job: FeaturesJob) -> int:
    """Return the number of GPUs of this machine that a job may use: all, unless it names a device."""
    import torch

    return torch.cuda.device_count() if job.device in ("auto", "cuda") and torch.cuda.is_available() else 0


def device_of_worker(job: FeaturesJob, worker_id: str) -> str | None:
    """The GPU of a worker process where there are several: workers are numbered, and take them in turn.

    Args:
        job: the job.
        worker_id: as Beam names its local workers, e.g. ``worker_3``.

    Returns:
        ``cuda:N``, or None where the job's own device will do.
    """
    number = re.search(r"(\d+)$", worker_id)
    gpus = gpus_of(job)
    return f"cuda:{int(number[1]) % gpus}" if gpus > 1 and number else None


def decoding_threads(job: FeaturesJob, cores: int = 0) -> int:
    """Threads that decode in a worker: on a CPU the model needs the cores, and decoding takes a tenth of its time.

    Args:
        job: the job.
        cores: of the worker; 0 for all of the machine.
    """
    import torch

    on_gpu = torch.cuda.is_available() and job.device != "cpu"
    return (cores or os.cpu_count() or 1) if on_gpu else 1

"""What a worker process may use of its machine, GPUs and decoding threads, and whether it makes what was planned."""

from __future__ import annotations

import re
from dataclasses import replace

from extractors import Extractor
from pipelines.features.decoding_processes import DecodingProcesses
from pipelines.jobs import FeaturesJob
from schemas.errors import InputError
from schemas.limits import CORES_TO_A_DECODER, usable_cores
from schemas.parameters import FeaturesParameters
from schemas.writing.output import OutputDataset

PROCESSES_FROM = 12
"""Cores of a worker with a GPU from which processes decode. Threads, by the time that they hold Python's lock, do the work of four
to six cores at most (``tests/benchmarks/bench_lock.py``); with a dozen cores half of them would be idle, and not before is that
worth the memory that the processes take."""


def count_gpus(job: FeaturesJob) -> int:
    """Return the number of GPUs of this machine that a job may use: all, unless it names a device."""
    import torch

    return torch.cuda.device_count() if job.device in ("auto", "cuda") and torch.cuda.is_available() else 0


def devices_of_worker(job: FeaturesJob, worker_id: str, gpus: int = 0) -> tuple[str, ...]:
    """Return the devices of a worker process: of several GPUs the numbered workers take theirs in turn.

    Args:
        job: the job.
        worker_id: the name that Beam gives a local worker, e.g. ``worker_3``.
        gpus: number of GPUs of the machine if this process is the only one on it; 0 if there may be others.

    Returns:
        All of them for the only process; ``cuda:N``, or the job's own device if there are not several, for another.
    """
    if gpus:
        return tuple(f"cuda:{index}" for index in range(gpus))
    number = re.search(r"(\d+)$", worker_id)
    several = count_gpus(job)
    return (f"cuda:{int(number[1]) % several}" if several > 1 and number else job.device,)


def decoding_threads(job: FeaturesJob, cores: int = 0) -> int:
    """Return the number of threads that decode in a worker; others read, as many as the source of the images says.

    On a CPU the model needs most of the cores.

    Args:
        job: the job.
        cores: cores of the worker; 0 for all that this process may use, by its affinity and its control group.
    """
    import torch

    cores = cores or usable_cores()
    return cores if torch.cuda.is_available() and job.device != "cpu" else max(1, cores // CORES_TO_A_DECODER)


def decoding_processes(extractor: Extractor, threads: int) -> DecodingProcesses | None:
    """Return processes that decode for an extractor; None where threads of the worker do.

    Args:
        extractor: the loaded extractor.
        threads: from `decoding_threads`.
    """
    if not extractor.on_gpu or threads < PROCESSES_FROM or extractor.preprocessor is None:
        return None
    return DecodingProcesses(extractor.preprocessor, threads)


def planned_fingerprint(output: OutputDataset) -> str | None:
    """Return the fingerprint of the extractor that a dataset was planned with."""
    return FeaturesParameters.from_json(output.parameters).extractor_fingerprint


def check_worker(job: FeaturesJob, planned: str | None, gpus: int) -> None:
    """Check, without building the network, that this process has the devices, the precision and the weights of a job.

    Args:
        job: the job.
        planned: from `planned_fingerprint`; not the dataset itself, since this travels in the graph.
        gpus: as `devices_of_worker` takes it.

    Raises:
        ImagepivotError: it has not.
    """
    for device in devices_of_worker(job, "", gpus):
        replace(job, device=device).check_device()
    check_fingerprint(job, planned, job.extractor.describe().fingerprint)


def check_fingerprint(job: FeaturesJob, planned: str | None, fingerprint: str) -> None:
    """Check that an extractor is the one that was planned.

    Raises:
        InputError: it is not.
    """
    if fingerprint != planned:
        raise InputError(
            f"a worker loads other weights from {job.extractor.weights!r}, or has other files or versions, than the machine that "
            "planned the run: give all of them the same"
        )

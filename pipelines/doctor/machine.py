"""What this process may use of its machine: cores, memory, shared memory, open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from pipelines.doctor.findings import Finding, Status
from schemas.limits import core_count, core_quota, memory_available, memory_limit

__all__ = ["check_cores", "check_memory", "check_open_files", "check_shared_memory", "gigabytes"]

_GROUP = "machine"
_SHARED = Path("/dev/shm")
_LEAST_MEMORY = 2_000_000_000
_LEAST_AVAILABLE = 1_000_000_000
_LEAST_SHARED = 256_000_000  # Docker gives a container 64 MiB.
_LEAST_FILES = 1024


def gigabytes(size: float) -> str:
    """Return a size in words, with as many digits as matter: ``0.06 GB``, ``7.8 GB``, ``120 GB``."""
    number = size / 1e9
    return f"{number:,.0f} GB" if number >= 100 else f"{number:.1f} GB" if number >= 0.95 else f"{number:.2f} GB"


def check_cores(usable: int | None = None, total: int | None = None, quota: float | None = None) -> Iterator[Finding]:
    """Find out how many cores this process may use.

    Args:
        usable: cores on which the system lets it run; all arguments are by default as they are here.
        total: cores of the machine.
        quota: cores' time that a control group allows.
    """
    if usable is None:
        usable, total, quota = core_count(), os.cpu_count(), core_quota()
    total = total or usable
    values = {"usable": usable, "total": total, "quota": quota, "omp_num_threads": os.environ.get("OMP_NUM_THREADS")}
    found = f"{usable} core{'s' if usable > 1 else ''}" + (f" of {total} (affinity)" if usable < total else "")
    if quota is None or quota >= usable:
        yield Finding(_GROUP, "cores", "ok", found, values=values)
        return
    found += f", and a control group allows the time of {quota:g}"
    whole = max(1, int(quota))
    if os.environ.get("OMP_NUM_THREADS", "").isdigit() and int(os.environ["OMP_NUM_THREADS"]) <= whole:
        yield Finding(_GROUP, "cores", "ok", found, values=values)
        return
    advice = (
        f"libraries start a thread for each core that they see, and wait for each other: set OMP_NUM_THREADS={whole}, and give "
        f"imagepivot captions --workers {whole}"
    )
    yield Finding(_GROUP, "cores", "note", found, advice, values)


def check_memory(limit: int | None = None, available: int | None = None) -> Iterator[Finding]:
    """Find out how much memory this process may use.

    Args:
        limit: bytes that it may use in all; both arguments are by default as they are here.
        available: bytes that it may still take; None if the system does not say.
    """
    if limit is None:
        limit, available = memory_limit(), memory_available()
    found = gigabytes(limit) + ("" if available is None else f", {gigabytes(available)} of it free")
    is_short = limit < _LEAST_MEMORY or (available is not None and available < _LEAST_AVAILABLE)
    advice = "" if not is_short else "a worker takes 1 to 2 GB: end other programs, or raise the limit of the container"
    values = {"limit": limit, "available": available}
    yield Finding(_GROUP, "memory", "note" if is_short else "ok", found, advice, values)


def check_shared_memory(size: int | None = None) -> Iterator[Finding]:
    """Find out how much memory processes can share.

    Args:
        size: bytes of the file system for it; by default as it is here. Where there is none, nothing is found.
    """
    if size is None:
        if not _SHARED.is_dir():
            return
        system = os.statvfs(_SHARED)
        size = system.f_blocks * system.f_frsize
    is_short = size < _LEAST_SHARED
    advice = (
        "" if not is_short else "the worker processes of a torch DataLoader pass batches through it: docker run --shm-size=2g"
    )
    yield Finding(_GROUP, "shared memory", "note" if is_short else "ok", gigabytes(size), advice, {"bytes": size})


def check_open_files(most: int | None = None) -> Iterator[Finding]:
    """Find out how many files and connections this process may open.

    Args:
        most: their number; by default as it is here.
    """
    if most is None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = most in (-1, resource.RLIM_INFINITY)
    is_short = not unlimited and most < _LEAST_FILES
    status: Status = "note" if is_short else "ok"
    advice = f"runs with many shards and stores need more: ulimit -n {4 * _LEAST_FILES}" if is_short else ""
    found = "no limit" if unlimited else f"at most {most:,}"
    yield Finding(_GROUP, "open files", status, found, advice, {"most": None if unlimited else most})

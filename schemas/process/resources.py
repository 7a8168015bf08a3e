"""Cores, memory and instructions that this process may use, by its affinity and control groups; and the C library's allocator.

By itself glibc maps each buffer of more than 128 KB to 32 MB again (the limit adapts), returns the end of its heap whenever enough
of it is free, and gives each thread a heap of its own. Batches whose buffers come and go are then paid for twice: each page of each
buffer is a fault of the processor, and a call of the system returns it. `keep_freed_memory` prevents it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

CORES_TO_A_DECODER = 4
"""Cores of a worker without a GPU to each thread that decodes images: models take the time of four to hundreds of decodings."""

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CPU, _BFLOAT16 = Path("/proc/cpuinfo"), {"avx512_bf16", "amx_bf16", "bf16"}  # The last is ARM's.
_VERSION_2 = ""
"""In place of a controller: version 2 has one tree for all of them."""


def bfloat16_remark(precision: str, device: str, cpu: Path | None = None) -> str:
    """Return a sentence about a precision that the processor only emulates; empty if it does not, or does not say.

    Args:
        precision: e.g. ``bf16``, the only one with a remark.
        device: type of the device that computes, ``cpu`` or ``cuda``.
        cpu: file that names the flags of the processors; that of the system by default, see proc(5).
    """
    if (precision, device) != ("bf16", "cpu"):
        return ""
    with suppress(OSError):
        lines = (line.partition(":") for line in (cpu or _CPU).read_text(errors="replace").splitlines())
        flags = next((set(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features")), _BFLOAT16)
        if not flags & _BFLOAT16:
            return (
                "this processor has no instructions for bfloat16 (neither avx512_bf16 nor amx_bf16 is among its flags) and "
                "emulates them, at down to a seventh of the rate of float32: --precision fp32 is faster here"
            )
    return ""


def core_count() -> int:
    """Return the number of cores on which the system lets this process run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> float | None:
    """Return how many cores' time this process may use, e.g. 1.5; None without a limit.

    Args:
        groups: file that names the control groups of the process, see cgroups(7).
        mount: where they are mounted: version 2, or version 1 with one folder per controller.
    """
    quotas = []
    for version, folder in _folders("cpu", groups, mount):
        quota: list[int] | None
        if version == 2:
            quota = _numbers(folder / "cpu.max")
        else:
            quota = [number for name in ("quota", "period") for number in _numbers(folder / f"cpu.cfs_{name}_us") or [-1]]
        if quota and len(quota) == 2 and min(quota) > 0:
            quotas.append(quota[0] / quota[1])
    return min(quotas, default=None)


def usable_cores() -> int:
    """Return how many threads or processes can compute at once: one per core, or fewer where a control group limits their time."""
    quota = core_quota()
    return core_count() if quota is None else max(1, min(core_count(), int(quota)))


def memory_limit(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Return the memory that this process may use, in bytes; the arguments are those of `core_quota`."""
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    limits = (_numbers(folder / names[version]) for version, folder in _folders("memory", groups, mount))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(numbers[0] for numbers in limits if numbers)])


def _numbers(path: Path) -> list[int] | None:
    """Return the numbers in a file of a group; None if it has none, or says that there is no limit."""
    with suppress(OSError, ValueError):
        return [int(word) for word in path.read_text(encoding="ascii").split()]
    return None


def _folders(controller: str, groups: Path, mount: Path) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of the groups that the process is in, and of those around them: the lowest limit counts."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == _VERSION_2:
            version, root = 2, mount
        elif controller in controllers.split(","):
            version, root = 1, mount / controller
        else:
            continue
        inside = PurePosixPath(path).relative_to("/")
        # In a container the path may be that of the host, where only the root is to be seen: the container's own group.
        for group in (inside, *inside.parents):
            yield version, root / group


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's numbers of its settings, see mallopt(3)
_NEVER = -1
_LARGEST_KEPT = 2**28
"""Bytes from which a buffer is still mapped: VGG19's largest maps of ten crops have half as many."""
_LARGEST_ONCE = 2**25  # Before glibc 2.35 the limit cannot be higher.


def keep_freed_memory() -> bool:
    """Let this process keep what it frees: one heap for all threads, never trimmed, and mapped buffers only above 256 MB.

    Call it where a process begins, before threads are started. What the process holds is then the peak of what it needed;
    `malloc_trim`, where it is called, still returns memory. Nothing happens where the user has set glibc's allocator, by one of its
    environment variables ``MALLOC_*`` or by ``GLIBC_TUNABLES``, or where the C library has no such settings (musl, macOS).

    Returns:
        Whether the allocator was set.
    """
    if sys.platform != "linux" or _is_set_by_user():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not mallopt(_ARENA_MAX, 1):  # musl has none, and others' always says no.
        return False
    mallopt(_TRIM_THRESHOLD, _NEVER)
    if not mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_MMAP_THRESHOLD, _LARGEST_ONCE)
    return True


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)

"""Cores, memory limit and CPU features of this process."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

CORES_TO_A_DECODER = 4
"""Cores per decoding thread of a worker without a GPU."""

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CPU, _BFLOAT16 = Path("/proc/cpuinfo"), {"avx512_bf16", "amx_bf16", "bf16"}  # The last is ARM's.


def bfloat16_remark(precision: str, device: str, cpu: Path | None = None) -> str:
    """Return a warning if the processor only emulates a precision, else empty.

    Only ``bf16`` on a ``cpu`` has a warning. The flags of the processors come from the file ``cpu``, by default ``/proc/cpuinfo``.
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
    """Return the number of cores in this process's affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> float | None:
    """Return the CPU quota of this process in cores, e.g. 1.5; None without a limit.

    The file ``groups`` has the process's control groups, see cgroups(7). In version 1, ``mount`` has one folder per controller.
    """
    quotas = []
    for version, folder in _folders("cpu", groups, mount):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = [number for name in names for number in _numbers(folder / name) or ()]
        if len(quota) == 2 and min(quota) > 0:
            quotas.append(quota[0] / quota[1])
    return min(quotas, default=None)


def core_request(groups: Path = _GROUPS, mount: Path = _MOUNT) -> float | None:
    """Return the cores that a pod of Kubernetes requests; None if there is none.

    Kubernetes gives a container 1,024 shares for each requested core (2 without a request), in version 2 of the groups as a
    weight: 1 + (shares - 2) * 9999 / 262142. Runtimes from 2025 on have a formula with larger weights, by
    which a request may seem up to three times as large. Arguments are those of `core_quota`.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    for version, folder in _folders("cpu", groups, mount):  # The first is the container's own.
        if numbers := _numbers(folder / ("cpu.weight" if version == 2 else "cpu.shares")):
            shares = (numbers[0] - 1) * 262142 / 9999 + 2 if version == 2 else numbers[0]
            return round(shares / 1024, 1) if shares > 2 else None  # Weights are rounded, too.
    return None


def usable_cores() -> int:
    """Return the number of cores within affinity, quota and request."""
    limit = core_quota() or core_request()
    return core_count() if limit is None else max(1, min(core_count(), int(limit)))


def memory_limit(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Return the memory limit of this process in bytes; arguments as in `core_quota`."""
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    limits = (_numbers(folder / names[version]) for version, folder in _folders("memory", groups, mount))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(numbers[0] for numbers in limits if numbers)])


def _numbers(path: Path) -> list[int] | None:
    """Return the numbers in a file of a group; None if unreadable or unlimited."""
    with suppress(OSError, ValueError):
        return [int(word) for word in path.read_text(encoding="ascii").split()]
    return None


def _folders(controller: str, groups: Path, mount: Path) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of the process's groups and their parents."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # Version 2 has one tree for all.
            version, root = 2, mount
        elif controller in controllers.split(","):
            version, root = 1, mount / controller
        else:
            continue
        inside = PurePosixPath(path).relative_to("/")
        # In a container the path may be the host's; the mount point is then the container's own group.
        for group in (inside, *inside.parents):
            yield version, root / group

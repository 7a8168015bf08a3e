"""How much memory this process may use: the machine's, or less where a control group (a container, a batch job) limits it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["memory_limit"]

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Return the memory that this process may use, in bytes.

    Args:
        groups: file that names the control groups of the process, see cgroups(7).
        mount: where they are mounted: version 2, or version 1 with one folder per controller.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(groups, mount)])


def _limits(groups: Path, mount: Path) -> Iterator[int]:
    """Yield the limits of the groups that the process is in, and of those around them: the lowest one counts."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        inside = PurePosixPath(path).relative_to("/")
        # In a container the path may be that of the host, where only the root is to be seen: the container's own group.
        for group in (inside, *inside.parents):
            try:
                text = (root / group / name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if text != "max":
                yield int(text)

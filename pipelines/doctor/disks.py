"""What a local folder can take: space, files, locks, and how fast it writes. What is written to find out is deleted again."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipelines.doctor.findings import Finding, Status
from pipelines.doctor.machine import gigabytes
from schemas.errors import DatasetError
from schemas.filesystems import storage_errors
from schemas.locations import check_location
from schemas.output import lock_file
from schemas.storage import TEMPORARY_MARK, Folder

__all__ = ["check_folder", "check_locks", "check_space", "check_temporary_folder", "check_writing", "filesystem_type"]

_ESCAPE = re.compile(r"\\([0-7]{3})")  # Of blanks and the like, in the list of mounts.
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
        *("orangefs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs"),
    }
)
_FULL = 100_000_000
_SHORT = 5_000_000_000
_FEW_FILES = 10_000
_BLOCK = 1 << 20
_SMALL = 4096
_TRIES = 5
_SLOW = 20e6  # Bytes per second; features of a fast GPU are some 20 MB.


def check_temporary_folder() -> Iterator[Finding]:
    """Find out what room there is for temporary files, without which nothing works."""
    folder = tempfile.gettempdir()
    yield from check_space("machine", "temporary", folder, "set TMPDIR to a folder with more room")
    yield from check_writing("machine", "temporary", folder, 0)


def check_folder(location: str, size: int) -> Iterator[Finding]:
    """Find out whether a run could write into a folder, which need not exist.

    Args:
        location: the folder.
        size: bytes to write, to measure the rate.

    Raises:
        ImagepivotError: nothing can be written there.
    """
    check_location(location)
    folder = Folder(location)
    folder.check_writable()
    path = next(parent for parent in (folder.local_path, *folder.local_path.parents) if os.path.lexists(parent))
    if not path.exists():
        raise DatasetError(
            f"cannot use {location!r}: {str(path)!r} is a link that leads nowhere: delete it, or choose another path"
        )
    kind = filesystem_type(path)
    is_network = _is_network(kind)
    what = f"{location!r} is {'on a network' if is_network else 'on this machine'}" + (f" ({kind})" if kind else "")
    if path != folder.local_path:
        what += f", and made by the run in {str(path)!r}"
    yield Finding("storage", "folder", "ok", what, values={"location": location, "type": kind, "is_network": is_network})
    yield from check_space("storage", "space", str(path), "free some, or choose another folder")
    yield from check_locks(location, path)
    yield from check_writing("storage", "writing", str(path), size)


def check_space(group: str, subject: str, folder: str, advice: str) -> Iterator[Finding]:
    """Find out how many bytes and files fit into a folder.

    Args:
        group: group of the finding.
        subject: its subject.
        folder: the folder.
        advice: what to do where it is full.
    """
    usage, system = shutil.disk_usage(folder), os.statvfs(folder)
    counts_files = system.f_files > 0  # Some file systems make room for files as they are written.
    values = {"folder": folder, "free": usage.free, "total": usage.total, "files": system.f_favail if counts_files else None}
    found = f"{gigabytes(usage.free)} of {gigabytes(usage.total)} free in {folder!r}"
    status: Status = "ok"
    if counts_files and system.f_favail < _FEW_FILES:
        status, found = "note", f"{found}, and only {system.f_favail:,} more files fit (inodes)"
    if usage.free < _SHORT:
        status = "note"
    if usage.free < _FULL or (counts_files and not system.f_favail):
        status = "problem"
    yield Finding(group, subject, status, found, "" if status == "ok" else advice, values)


def check_locks(location: str, folder: Path) -> Iterator[Finding]:
    """Find out whether a lock keeps a second run out.

    Args:
        location: what the user calls the folder.
        folder: an existing folder on the same file system.
    """
    path = folder / _probe_name("lock")
    try:
        first = lock_file(path)
        try:
            os.close(lock_file(path))
        except BlockingIOError:
            yield Finding("storage", "locks", "ok", "a second run into the folder is kept out", values={"holds": True})
        else:
            found = "a lock does not keep a second run out"
            advice = f"let only one command at a time write to {location!r}, or choose a file system with flock"
            yield Finding("storage", "locks", "note", found, advice, {"holds": False})
        finally:
            os.close(first)
    except OSError as error:
        found = f"files cannot be locked ({error.strerror or error})"
        yield Finding("storage", "locks", "problem", found, "choose a file system with flock", {"holds": None})
    finally:
        path.unlink(missing_ok=True)


def check_writing(group: str, subject: str, folder: str, size: int) -> Iterator[Finding]:
    """Write, and find out how long it takes until that is on the disk.

    Args:
        group: group of the finding.
        subject: its subject.
        folder: an existing folder.
        size: bytes to write; with 0 only whether a file can be written, which is nothing to tell.

    Raises:
        DatasetError: a file cannot be written.
    """
    path = Path(folder) / _probe_name("data")
    try:
        with storage_errors(folder):
            if not size:
                _write(path, 1)
                return
            waits = sorted(_write(path, _SMALL) for _ in range(_TRIES))
            seconds = _write(path, size)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    rate, wait = size / max(seconds, 1e-9), statistics.median(waits)
    found = f"{rate / 1e6:,.0f} MB/s, and a small file takes {1000 * wait:.1f} ms"
    values = {"bytes_per_second": round(rate), "seconds_of_small_file": round(wait, 6), "bytes": size}
    if rate >= _SLOW:
        yield Finding(group, subject, "ok", found, values=values)
    else:
        advice = "another disk would be faster; a network in between is slow for many small files, so give fewer shards"
        yield Finding(group, subject, "note", found, advice, values)


def filesystem_type(path: Path, mounts: Path = _MOUNTS) -> str:
    """Return the type of the file system of a folder, e.g. ``ext4`` or ``nfs4``; empty if the system does not say.

    Args:
        path: the folder.
        mounts: file with the file systems that are mounted, see proc(5).
    """
    if sys.platform != "linux":
        return ""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    resolved = path.resolve()
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = Path(_ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields.split()[4]))
        if (resolved == point or point in resolved.parents) and len(point.parts) >= best:  # A later one hides an earlier one.
            best, kind = len(point.parts), rest.split()[0]
    return kind


def _is_network(kind: str) -> bool:
    return kind in _NETWORK or kind.startswith("fuse.")


def _probe_name(what: str) -> str:
    """Return a name that no run keeps: those with this mark are deleted by the next one."""
    return f".doctor-{what}{TEMPORARY_MARK}{uuid.uuid4().int >> 64}"


def _write(path: Path, size: int) -> float:
    """Write a file until it is on the disk, and return the seconds that this took."""
    block = os.urandom(min(size, _BLOCK))
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())
    return time.perf_counter() - started

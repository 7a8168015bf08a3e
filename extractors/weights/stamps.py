"""Whether a file is still the one that was read. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class FileStamp(NamedTuple):
    """What changes when a file is replaced or written to: device, inode, bytes, and nanoseconds of its last changes.

    Whoever sets the time of the last change of the content (``mtime``) back, changes that of the last change of all (``ctime``).
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(path: Path) -> FileStamp | None:
        """Return the stamp of a file as it is now, or None if it cannot be found."""
        try:
            status = path.stat()
        except (OSError, ValueError):
            return None
        return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

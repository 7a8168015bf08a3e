"""What lies below a folder, local or in an object store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pyarrow import fs

from schemas import stores
from schemas.filesystems import NoSuchBucketError, filesystem_of, storage_errors
from schemas.locations import is_remote

__all__ = ["Entry", "entries_of"]


class Entry(NamedTuple):
    """A file of a folder, as listing the folder tells.

    Attributes:
        name: path relative to the folder.
        size: size in bytes; -1 for a dangling link.
        version: modification time in nanoseconds; empty if it is not known.
    """

    name: str
    size: int
    version: str


def entries_of(location: str, on_link: Callable[[str], None]) -> Iterator[Entry]:
    """Yield every file below a folder; none if it does not exist.

    Args:
        location: the folder.
        on_link: gets the name of each link to a folder: such links are not followed, because they may lead back.
    """
    filesystem, root = filesystem_of(location)
    if stores.has_tags(location):
        with storage_errors(location):
            try:
                yield from (Entry(found.name, found.size, found.version) for found in stores.objects(location))
            except NoSuchBucketError:
                return
        return
    if not is_remote(location):
        yield from _walk(root, "", on_link)
        return
    with storage_errors(location):
        entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    prefix = root.rstrip("/") + "/"
    for entry in entries:
        if entry.type == fs.FileType.File:
            yield Entry(entry.path.removeprefix(prefix), entry.size, str(entry.mtime_ns or ""))


def _walk(folder: str, prefix: str, on_link: Callable[[str], None]) -> Iterator[Entry]:
    """Yield the files below a local folder without following links to folders, which `on_link` gets."""
    try:
        with storage_errors(folder):
            entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/", on_link)
                continue
            try:
                status = None if entry.is_dir() else entry.stat()
            except OSError:  # A link to nothing, to itself, or to what must not be seen.
                yield Entry(prefix + entry.name, -1, "")
                continue
            if status is None:
                on_link(prefix + entry.name)
            else:
                yield Entry(prefix + entry.name, status.st_size, str(status.st_mtime_ns))

"""Members of tar files, also of several that `cat` joined into one."""

import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from schemas.errors import InputError

_BLOCK = tarfile.BLOCKSIZE
_END = 2 * _BLOCK  # Zeros that end a tar; most programs write more.
_CHUNK = 1 << 20


def tar_members(file: BinaryIO, size: int, location: str) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar; only headers and end marks are read.

    Further tars after the end mark are read, too, as by ``tar --ignore-zeros``.

    Raises:
        InputError: the tar is compressed, truncated or damaged, or other bytes follow an end mark.
    """
    position = zeros = 0
    while position < size or not zeros:
        start = position
        try:
            # "r:" accepts no compression. `tarfile` keeps every member in memory unless they are dropped.
            if start:  # A seek to the beginning would make some stores send it twice.
                file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]
                    if not position < tar.offset <= size:
                        raise _broken(location, size, f"it ends within the member {member.name!r}")
                    position = tar.offset
                    yield member
        except tarfile.TarError as error:
            raise _broken(location, position, str(error)) from error
        if start and position == start:
            raise InputError(
                f"{location!r} holds {size - start:,} bytes after its end mark, at byte {start}, that are "
                "no further tar: copy or write it again"
            )
        # `tarfile` mistakes any unreadable header but the first for the end.
        zeros = _zeros_at(file, position, size)
        if not zeros:
            detail = "found neither a member nor the end mark of a tar" if position < size else "it has no end mark"
            raise _broken(location, position, detail)
        position += zeros
        if zeros < _END and position < size:
            raise _broken(location, position, "found bytes after a single block of zeros, expected two as the end mark")


def _zeros_at(file: BinaryIO, position: int, size: int) -> int:
    """Return the number of zeros from a position, in whole blocks or to the end.

    Nothing is read at the end, for which a store may send the whole object once more.
    """
    file.seek(position)
    zeros = 0
    while chunk := file.read(min(_CHUNK, size - position - zeros)):
        ends_within = chunk.lstrip(b"\0")
        zeros += len(chunk) - len(ends_within)
        if ends_within:
            return zeros // _BLOCK * _BLOCK
    return zeros if zeros >= _BLOCK else 0


def _broken(location: str, position: int, detail: str) -> InputError:
    return InputError(
        f"{location!r} is not a whole tar: at byte {position}: {detail}. Was it cut short while it was "
        "copied or written? Copy or write it again"
    )

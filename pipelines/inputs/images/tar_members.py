"""The members of tars that hold images."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from schemas.errors import InputError

_BLOCK = tarfile.BLOCKSIZE


def parts_of(uri: str) -> tuple[str, str]:
    """Return the tar of a reference, the path up to the first part that is named like a tar, and the path of the member in it."""
    parts = uri.split("/")
    end = next((number for number, part in enumerate(parts) if part.lower().endswith(".tar")), len(parts))
    return "/".join(parts[: end + 1]), "/".join(parts[end + 1 :])


def members_of(file: BinaryIO, size: int, location: str) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar by reading its headers alone.

    Raises:
        InputError: the file does not end the way a tar must.
    """
    position = 0
    try:
        # "r:" accepts no compression. `tarfile` would keep every member in memory: they are dropped here.
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]
                position = tar.offset
                if position > size:
                    raise _broken(location, size, f"it ends within the member {member.name!r}")
                yield member
    except tarfile.TarError as error:
        raise _broken(location, position, str(error)) from error
    # `tarfile` mistakes any unreadable header but the first for the end.
    file.seek(position)
    end = file.read(_BLOCK)
    if end != bytes(_BLOCK):
        raise _broken(location, position, "found neither a member nor the end mark of a tar" if end else "it has no end mark")


def _broken(location: str, position: int, detail: str) -> InputError:
    return InputError(
        f"{location!r} is not a whole tar: at byte {position}: {detail}. Was it cut short while it was copied or written? Copy or "
        "make it again"
    )


def check_member(member: tarfile.TarInfo, location: str) -> None:
    """Check that a member is a plain file with a name in UTF-8.

    Raises:
        InputError: it is a link, a sparse file, or has another name.
    """
    try:
        member.name.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{location!r} holds the member {member.name!r}, whose name is not UTF-8: rename it and pack it again"
        ) from error
    if not member.isreg() or member.sparse is not None:
        raise InputError(
            f"{location!r}: the member {member.name!r} is a link or a sparse file, not an image's bytes; pack it again with "
            "tar --dereference --hard-dereference"
        )

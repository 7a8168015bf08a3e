"""Files that are not what their dataset says: found while they are read, named, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from schemas.errors import DatasetError
from schemas.filesystems import storage_errors, store_error_of
from schemas.locations import is_remote

__all__ = ["content_errors", "damaged"]


def damaged(path: str, problem: str) -> DatasetError:
    """Return the error that says of a file of a dataset what is wrong with it, and what to do.

    Args:
        path: the file.
        problem: what is wrong, a clause that follows its name.
    """
    return DatasetError(
        f"{path} {problem}: copy the whole folder again, or run the command that made it again with --check, which makes only "
        "what is damaged"
    )


@contextmanager
def content_errors(path: str) -> Iterator[None]:
    """Turn whatever pyarrow and Python raise about the contents of a file into a ``DatasetError``.

    Nothing but reading and decoding may stand in the block: it cannot tell a damaged file from a mistake of ours.

    Args:
        path: the file, for messages.
    """
    try:
        yield
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        if store_error_of(error):
            with storage_errors(path):
                raise
        # Of a remote file it may be the connection that failed.
        verb = "cannot be read" if is_remote(path) and isinstance(error, OSError) else "is damaged"
        raise damaged(path, f"{verb} ({' '.join(str(error).split()) or type(error).__name__})") from error

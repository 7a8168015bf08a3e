"""Errors of damaged dataset files."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from schemas.errors import DatasetError
from schemas.storage.locations import is_remote


def damaged(path: str, problem: str) -> DatasetError:
    """Return the error about a damaged file; the problem is a clause after its path."""
    return DatasetError(
        f"{path} {problem}: copy the whole folder again, or run the command that wrote it again with "
        "--verify, which rewrites only damaged files"
    )


@contextmanager
def content_errors(path: str) -> Iterator[None]:
    """Convert errors about the content of a file to a ``DatasetError``.

    The block must only read and decode: a bug in it would be reported as a damaged file.
    """
    try:
        yield
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        # The connection to a store may have failed instead.
        verb = "cannot be read" if is_remote(path) and isinstance(error, OSError) else "is damaged"
        raise damaged(path, f"{verb} ({' '.join(str(error).split()) or type(error).__name__})") from error

"""Metadata of Parquet files with images, and the error of a row without one."""

import errno
from functools import lru_cache
from itertools import accumulate

import pyarrow.parquet as pq

from schemas.storage.folder import Folder


@lru_cache(maxsize=16)  # Few, since footers are large.
def read_metadata(folder: Folder, name: str, version: str) -> pq.FileMetaData:
    """Return the footer of a Parquet file; the version is part of the cache key."""
    with folder.open(name) as file:
        return pq.read_metadata(file)


@lru_cache(maxsize=4096)
def first_rows(folder: Folder, name: str, version: str) -> tuple[int, ...]:
    """Return the first row of each row group, followed by the number of rows."""
    metadata = read_metadata(folder, name, version)
    return tuple(accumulate((metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)), initial=0))


def no_image() -> OSError:
    """Return the error of a row without an image."""
    return OSError(errno.ENODATA, "the row holds no image")

"""Publishing what an attempt has made of a shard: all of it, or nothing of it.

A runner may try a shard twice, one attempt after the other or both at once, and an attempt that was given up may still run when
the next one has ended. On GPUs two attempts need not agree in every bit, and a read that fails in one succeeds in the other. A
shard is three files, which name each other's digests: those of two attempts must not mix, and what is committed must not change.
So an attempt notes what lies there when it begins, and publishes only if that still lies there when it ends: the first one wins.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from schemas.errors import DatasetError
from schemas.manifest import MANIFEST_NAMES
from schemas.output import PUBLISHING_NAME, lock_file
from schemas.storage import Folder

__all__ = ["Attempt", "LostError", "publishing"]


@contextlib.contextmanager
def publishing(folder: Folder) -> Iterator[None]:
    """Let nobody else publish a shard of this folder, or commit, while the block runs.

    An object store cannot be locked with ``pyarrow.fs``: there, shard and record of two attempts that end within the same moment
    may still mix.
    """
    if not folder.is_local:
        yield
        return
    handle = lock_file(folder.local_path / PUBLISHING_NAME, patience=math.inf)
    try:
        yield
    finally:
        folder.delete(PUBLISHING_NAME)  # Deleted while it is still held, so that nobody else's lock is deleted.
        os.close(handle)


class LostError(Exception):
    """Another attempt has published the shard."""


class Attempt:
    """An attempt to make a shard, from its beginning.

    Args:
        folder: the dataset's folder.
        shard: name of the shard.

    Raises:
        DatasetError: the dataset is committed.
    """

    def __init__(self, folder: Folder, shard: str) -> None:
        self._folder = folder
        self._shard = shard
        self._refuse_committed()
        self._before = folder.state(shard)

    @contextlib.contextmanager
    def publication(self) -> Iterator[None]:
        """Publish the shard in this block.

        Raises:
            LostError: another attempt has published the shard.
            DatasetError: the dataset was committed meanwhile.
        """
        with publishing(self._folder):
            self._refuse_committed()
            if (now := self._folder.state(self._shard)) is not None and now != self._before:
                raise LostError  # None: another run has deleted what was damaged.
            yield

    def _refuse_committed(self) -> None:
        if any(self._folder.state(name) is not None for name in MANIFEST_NAMES):
            raise DatasetError(
                f"{self._folder.location!r} is committed: {self._shard} was not written. Give write_dataset or complete_dataset "
                "overwrite=True to make the dataset again"
            )

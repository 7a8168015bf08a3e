"""Lock files in local folders: of a run or its array tasks, and of publications.

They are locks of ``flock``, which end with their process.
"""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import create_folder, storage_errors
from schemas.writing.file_names import LOCK_NAME, PUBLISHING_NAME

_SHARED_PATIENCE = 2.0  # Seconds: the last of several tasks locks the folder exclusively for a moment to delete the lock file.
_RETRY_SECONDS = 0.02


@contextlib.contextmanager
def lock_folder(folder: Folder, *, shared: bool = False) -> Iterator[None]:
    """Lock a local folder for one run, or ``shared`` for several array tasks.

    The lock ends with the process. A missing folder is created. A folder in an object store is not locked: a
    lock object of a killed run would block its successor. The publishing protocol is safe without the lock.

    Raises:
        DatasetError: another run holds the lock, or the folder cannot be created.
    """
    if not folder.is_local:
        folder.check_writable()
        yield
        return
    path = folder.local_path
    with storage_errors(folder.location):
        created = [parent for parent in (path, *path.parents) if not parent.exists()]
        try:
            handle = lock_file(path / LOCK_NAME, shared=shared, patience=_SHARED_PATIENCE if shared else 0.0)
        except BlockingIOError:
            raise DatasetError(
                f"{folder.location!r} is in use: another run is writing it. Wait for it to end, or choose another folder"
            ) from None
    try:
        yield
    finally:
        # Deleted under an exclusive lock, so that no other run's lock file is deleted.
        if not shared or _is_last(handle, path / LOCK_NAME):
            _delete_publishing(folder)
            folder.delete(LOCK_NAME)
        os.close(handle)
        if created:  # A run that fails early leaves no empty folders.
            for empty in (*path.glob("*/"), *created):
                with contextlib.suppress(OSError):
                    empty.rmdir()


def _delete_publishing(folder: Folder) -> None:
    """Delete the lock file of a killed publisher, unless a worker still holds it."""
    if folder.stat(PUBLISHING_NAME) is not None:
        with contextlib.suppress(BlockingIOError), exclusive_lock(folder.local_path / PUBLISHING_NAME, patience=0.0):
            pass


def lock_file(path: Path, *, shared: bool = False, patience: float = 0.0) -> int:
    """Lock a file, created if missing, until the returned descriptor is closed.

    ``shared`` allows other shared locks. ``patience`` is the time limit for other processes and threads in seconds.

    Raises:
        BlockingIOError: another process or thread holds the lock.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + patience
    while True:
        create_folder(path.parent)
        try:
            with storage_errors(str(path)):  # A link, which a stranger's folder may hold, is not followed.
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue  # Another run has deleted the empty folder.
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(handle)
                raise
            time.sleep(_RETRY_SECONDS)
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # Another run deleted the file between `open` and `flock`: retry.


def _is_last(handle: int, path: Path) -> bool:
    """Return whether the lock is now exclusive; otherwise it may be lost."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(handle).st_ino == path.stat().st_ino
    except OSError:
        return False


@contextlib.contextmanager
def exclusive_lock(path: Path, *, patience: float = math.inf) -> Iterator[None]:
    """Lock a file inside the block as `lock_file` does, and delete it at the end."""
    handle = lock_file(path, patience=patience)
    try:
        yield
    finally:
        with storage_errors(str(path)):
            path.unlink(missing_ok=True)  # Under the lock, so that no other lock file is deleted.
        os.close(handle)


def publishing(folder: Folder) -> contextlib.AbstractContextManager[None]:
    """Exclude other processes from publishing shards or committing in the block.

    An object store has no lock.
    """
    return exclusive_lock(folder.local_path / PUBLISHING_NAME) if folder.is_local else contextlib.nullcontext()

"""The folder that a run writes to, what will be stored there, and the lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from schemas import interruption
from schemas.errors import DatasetError, UsageError
from schemas.fingerprints import FORMAT_VERSION, Identity, sha256_of_json
from schemas.keys import shard_name
from schemas.kinds import schema_of
from schemas.parameters import feature_of
from schemas.shards import Footer, inspect_shard
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors

if TYPE_CHECKING:
    from schemas.dataset import Dataset

__all__ = ["LOCK_NAME", "PROBE_NAME", "PUBLISHING_NAME", "OutputDataset", "ReusePolicy", "UpdatePolicy", "hold", "lock_file"]

LOCK_NAME = ".lock"
"""Locked by a run, from its beginning to its end."""

PUBLISHING_NAME = ".publishing"
"""Locked by what publishes a shard, or commits."""

PROBE_NAME = ".probe"
"""Written and deleted before a run, where only writing tells whether that is allowed."""

# One of those who share a lock holds it alone for a moment while it deletes it: that must not turn away another who comes then.
_SHARED_PATIENCE = 2.0

_RETRY_SECONDS = 0.02


@dataclass(frozen=True)
class UpdatePolicy:
    """Treatment of inputs that have changed since a dataset was written.

    Attributes:
        keep_removed: keep the rows of inputs that are gone.
        only_add: keep whatever is there, and add inputs that are new.
        check_content: compare the bytes of all inputs, not only sizes and modification times.

    Raises:
        UsageError: two settings contradict each other.
    """

    keep_removed: bool = False
    only_add: bool = False
    check_content: bool = False

    def __post_init__(self) -> None:
        if self.only_add and (self.keep_removed or self.check_content):
            raise UsageError("--only-add keeps everything that is there: leave out --keep-removed and --check-content")


@dataclass(frozen=True)
class ReusePolicy:
    """What a run keeps of the dataset that its folder holds.

    Attributes:
        overwrite: keep nothing, whatever dataset the folder holds.
        verify: compare digests, not only sizes, and write damaged shards again.
        update: treatment of inputs that have changed; None if they may not have changed.
        retry_failed: write shards with failures again.
    """

    overwrite: bool = False
    verify: bool = False
    update: UpdatePolicy | None = None
    retry_failed: bool = False


@dataclass(frozen=True)
class OutputDataset:
    """A dataset that a run writes.

    Attributes:
        folder: where the dataset goes.
        identity: what will be stored there.
        listings: for a kind whose inputs may change, a digest of what each shard is made from. A shard counts as finished only
            where the statistics in its footer name the same ``listing``.
        states: likewise, a digest of what listing the inputs tells about their content; see `schemas.writing.records`.
        files: content, by name, of files besides the shards that are known before the run. They are not part of the identity: a
            dataset that lacks nothing but these gets them, and its shards stay.
        other_files: regular expression of the names of all files besides the shards that a run of this kind may write.
        sources: datasets that listings and states are of, for messages; empty where they are of images.
    """

    folder: Folder
    identity: Identity
    listings: tuple[str, ...] | None = None
    states: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    other_files: str = ""
    sources: tuple[str, ...] = ()

    def made_from(self, *sources: Dataset) -> OutputDataset:
        """Return the output with a note of the content of the datasets that it is made from, for its records.

        The fingerprints of these datasets are part of the identity, but their content may be another, e.g. of another version.
        """
        state = sha256_of_json([source.manifest.content_sha256 for source in sources])
        return replace(self, states=(state,) * self.shards, sources=tuple(source.folder.location for source in sources))

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.identity.shards

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the rows."""
        return schema_of(self.identity.kind, feature_of(self.identity.parameters))

    def name(self, number: int) -> str:
        """Return the file name of a shard."""
        return shard_name(number, self.shards)

    def is_other_file(self, name: str) -> bool:
        """Whether a file is one that a run of this kind may write besides the shards."""
        return re.fullmatch(self.other_files, name) is not None

    def footer(self, number: int) -> Footer | None:
        """Read the footer of a shard that a run of this identity wrote; None if there is no such shard."""
        return self.own(inspect_shard(self.folder, self.name(number)))

    def own(self, footer: Footer | None) -> Footer | None:
        """Return a footer if it belongs to this identity and to this version of the format, else None."""
        if footer is None or footer.fingerprint != self.identity.fingerprint or footer.version != FORMAT_VERSION:
            return None
        return footer


@contextlib.contextmanager
def hold(folder: Folder, *, shared: bool = False) -> Iterator[None]:
    """Hold a local folder for one run; the hold ends with the process, however it ends.

    A folder in an object store is not held: what a killed run leaves there would keep out the one that continues it, or
    expire while its owner is only slow. Shards and manifest are safe from others without it; see `schemas.writing.publishing`.

    Args:
        folder: the folder; it is made if it does not exist.
        shared: let others who share it in at the same time, and keep out everybody else.

    Raises:
        DatasetError: another run holds it, or the folder cannot be made.
    """
    if not folder.is_local:
        folder.check_bucket()
        yield
        return
    with interruption.orderly(), _held(folder, shared=shared):
        yield


@contextlib.contextmanager
def _held(folder: Folder, *, shared: bool) -> Iterator[None]:
    path = folder.local_path
    with storage_errors(folder.location):
        made = [parent for parent in (path, *path.parents) if not parent.exists()]
        try:
            handle = lock_file(path / LOCK_NAME, shared=shared, patience=_SHARED_PATIENCE if shared else 0.0)
        except BlockingIOError:
            raise DatasetError(
                f"{folder.location!r} is in use: another run is writing it. Wait for it to end, or choose another folder"
            ) from None
    try:
        yield
    finally:
        # Deleted while it is held alone, so that no other run's lock is deleted.
        if not shared or _is_last(handle, path / LOCK_NAME):
            _delete_publishing(folder)
            folder.delete(LOCK_NAME)
        os.close(handle)
        if made:  # A run that is refused or fails early leaves nothing behind: only empty folders can be removed.
            for empty in (*path.glob("*/"), *made):
                with contextlib.suppress(OSError):
                    empty.rmdir()


def _delete_publishing(folder: Folder) -> None:
    """Delete the lock of a publisher that was killed; that of a worker of a job that goes on is held."""
    if folder.size(PUBLISHING_NAME) is not None:
        with contextlib.suppress(BlockingIOError):
            handle = lock_file(folder.local_path / PUBLISHING_NAME)
            folder.delete(PUBLISHING_NAME)
            os.close(handle)


def lock_file(path: Path, *, shared: bool = False, patience: float = 0.0) -> int:
    """Lock a file, which is made if it is missing, until the descriptor that is returned is closed; its holder may delete it.

    Args:
        path: the file, on a file system that has ``flock``.
        shared: let others who share it in at the same time.
        patience: seconds to wait while another process or thread holds it; may be infinite.

    Raises:
        BlockingIOError: another one holds it.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # A run that was refused has deleted the folder that it had made.
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
        os.close(handle)  # Another run ended and deleted the file between our two calls: try again.


def _is_last(handle: int, path: Path) -> bool:
    """Whether nobody else shares a lock, which is then held alone; otherwise it may be lost."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(handle).st_ino == path.stat().st_ino
    except OSError:
        return False

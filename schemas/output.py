"""The folder that a run writes to: what may be written there, what an earlier run finished, and the lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.errors import DatasetError
from schemas.fingerprints import Identity, canonical_json, sha256_of_bytes
from schemas.keys import shard_name
from schemas.kinds import schema_of
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.parameters import feature_of
from schemas.shards import FOREIGN, Footer, failures_name, inspect_shard
from schemas.storage import TEMPORARY_MARK, Folder, storage_errors

__all__ = ["LOCK_NAME", "Output", "Survey", "hold"]

LOCK_NAME = ".lock"
_OWN_NAMES = re.compile(
    rf"(failures/)?part-\d{{5}}-of-\d{{5}}\.parquet|{re.escape(MANIFEST_NAME)}|{re.escape(LOCK_NAME)}|"
    rf"(.*/)?\.[^/]+{re.escape(TEMPORARY_MARK)}\d+"
)


@dataclass(frozen=True)
class Output:
    """A dataset that a run writes.

    Attributes:
        folder: where the dataset goes.
        identity: what will be stored there.
        listings: for a kind whose inputs may grow, a digest of what each shard is made from. A shard counts as finished only
            where the statistics in its footer name the same ``listing``.
        files: content, by name, of files besides the shards that are known before the run. They are not part of the identity: a
            dataset that lacks nothing but these gets them, and its shards stay.
        other_files: regular expression of the names of all files besides the shards that a run of this kind may write.
    """

    folder: Folder
    identity: Identity
    listings: tuple[str, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    other_files: str = ""

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

    def survey(self) -> Survey:
        """Look at what the folder holds now."""
        return Survey(self)

    def footer(self, number: int) -> Footer | None:
        """Read the footer of a shard that a run of this identity wrote; None if there is no such shard."""
        return self.own(inspect_shard(self.folder, self.name(number)))

    def own(self, footer: Footer | None) -> Footer | None:
        """Return a footer if it belongs to this identity, else None."""
        return footer if footer is not None and footer.fingerprint == self.identity.fingerprint else None


class Survey:
    """What an output's folder holds before a run. The folder is listed once; manifest and footers are read at most once.

    Args:
        output: the dataset that is to be written.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._sizes = dict(output.folder.files())
        self._footers: dict[str, Footer | None] = {}

    def finished(self) -> frozenset[int]:
        """Return the numbers of the shards that an earlier run of the same identity finished."""
        return frozenset(number for number in range(self._output.shards) if self._is_finished(number))

    def footer(self, number: int) -> Footer | None:
        """Return the footer of a shard of the same identity, else None."""
        return self._output.own(self._inspect(self._output.name(number)))

    def failures_footer(self, number: int) -> Footer | None:
        """Return the footer of the failures of a shard of the same identity, else None."""
        return self._output.own(self._inspect(failures_name(self._output.name(number))))

    def has_failures(self, number: int) -> bool:
        """Whether a file of failures lies beside a shard."""
        return failures_name(self._output.name(number)) in self._sizes

    def complete(self) -> Manifest | None:
        """Return the manifest, where an earlier run of the same identity committed and every file is still as listed."""
        manifest = self._manifest
        if not isinstance(manifest, Manifest) or manifest.fingerprint != self._output.identity.fingerprint:
            return None  # Of an unusable one `refuse` says what is wrong, or it is overwritten.
        entries = (*manifest.shards, *manifest.failures, *manifest.files)
        whole = all(self._sizes.get(entry.path) == entry.bytes for entry in entries)
        digests = {entry.path: entry.sha256 for entry in manifest.files}
        whole = whole and all(digests.get(name) == sha256_of_bytes(data) for name, data in self._output.files.items())
        return manifest if whole and len(self.finished()) == self._output.shards else None

    def refuse(self, *, overwrite: bool, update: bool = False) -> None:
        """Refuse a folder that holds something that must not be lost.

        Args:
            overwrite: replace a dataset of another fingerprint.
            update: keep shards of the same fingerprint whose inputs have changed since, to be added to.

        Raises:
            DatasetError: the folder holds foreign files; or a dataset, complete or not, of another fingerprint or made from
                other inputs, and neither ``overwrite`` nor ``update`` says what to do with it.
        """
        folder = self._output.folder
        listed = self._files_of_manifest()
        foreign = sorted(name for name in self._sizes if name not in listed and self._is_foreign(name))
        if foreign:
            raise DatasetError(
                f"{folder.location!r} holds files that do not belong to a dataset, e.g. {foreign[0]!r}: nothing was written. "
                "Choose a new or empty folder"
            )
        if overwrite:
            return
        if isinstance(self._manifest, DatasetError):
            raise self._manifest
        self._refuse_other(self._manifest)
        for name in sorted(self._sizes):
            if name.startswith("part-"):
                self._refuse_other(self._inspect(name))
        present = sum(self.footer(number) is not None for number in range(self._output.shards))
        changed = present - len(self.finished())
        if changed and not update:
            raise DatasetError(
                f"{folder.location!r} was made from other images: the list of images differs in {changed} of "
                f"{self._output.shards} shards; nothing was written. Give --update to add the images that are new, --overwrite to "
                "make it again, or choose another folder"
            )

    def clear(self, *, update: bool = False) -> None:
        """Delete what does not belong to the dataset, and write the files that are known before the run.

        From here on the folder is not a dataset until the run commits.

        Args:
            update: keep shards of the same fingerprint whose inputs have changed since.
        """
        folder = self._output.folder
        numbers = range(self._output.shards)
        kept = {
            self._output.name(number)
            for number in numbers
            if (self.footer(number) is not None if update else self._is_finished(number))
        }
        old = self._files_of_manifest() - self._output.files.keys()
        folder.delete(MANIFEST_NAME)
        for name in self._sizes:
            stale = _is_shard(name) and name.removeprefix("failures/") not in kept
            if stale or TEMPORARY_MARK in name or (name in old and not self._output.is_other_file(name)):
                folder.delete(name)
        for name, data in self._output.files.items():
            folder.write(name, data)

    @cached_property
    def _manifest(self) -> Manifest | DatasetError | None:
        """The manifest in the folder, or why it cannot be used; None if there is none."""
        if MANIFEST_NAME not in self._sizes:
            return None
        try:
            return Manifest.read(self._output.folder)
        except DatasetError as error:
            return error

    def _inspect(self, name: str) -> Footer | None:
        if name not in self._footers:
            self._footers[name] = inspect_shard(self._output.folder, name) if name in self._sizes else None
        return self._footers[name]

    def _is_finished(self, number: int) -> bool:
        footer, listings = self.footer(number), self._output.listings
        return footer is not None and (listings is None or footer.statistics.get("listing") == listings[number])

    def _is_foreign(self, name: str) -> bool:
        if _is_shard(name) and _OWN_NAMES.fullmatch(name):
            return self._inspect(name) is FOREIGN
        return not (_OWN_NAMES.fullmatch(name) or self._output.is_other_file(name))

    def _files_of_manifest(self) -> set[str]:
        """Return the names of the files besides shards that the manifest in the folder lists, whatever dataset it is of."""
        return {entry.path for entry in self._manifest.files} if isinstance(self._manifest, Manifest) else set()

    def _refuse_other(self, stored: Manifest | Footer | None) -> None:
        if stored is not None and stored.fingerprint != self._output.identity.fingerprint:
            raise DatasetError(
                f"{self._output.folder.location!r} holds another dataset ({difference(stored, self._output.identity)}): nothing "
                "was written. Choose another folder, or give --overwrite to replace it"
            )


def _is_shard(name: str) -> bool:
    return name.removeprefix("failures/").startswith("part-")


def difference(stored: Manifest | Footer, identity: Identity) -> str:
    """Say in a few words how a stored dataset differs from the one that a run would write."""
    if stored.kind != identity.kind:
        return f"kind {stored.kind!r} instead of {identity.kind!r}"
    parts = []
    for key in {**identity.parameters, **stored.parameters}:  # What a user chose comes first.
        before, after = stored.parameters.get(key), identity.parameters.get(key)
        if canonical_json(before) != canonical_json(after):  # Stored values hold lists where new ones have tuples.
            parts.append(f"{key}: there {_short(before)}, now {_short(after)}")
    return "; ".join(parts[:3]) or "made from other inputs, or with another number of shards"


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def hold(folder: Folder) -> Iterator[None]:
    """Hold a local folder for one run; the hold ends with the process, however it ends.

    A folder in an object store is not held: that would take a write that fails where an object exists already, which
    ``pyarrow.fs`` does not offer.

    Raises:
        DatasetError: another run holds it, or the folder cannot be made.
    """
    if not folder.is_local:
        folder.check_bucket()
        yield
        return
    path = folder.local_path
    with storage_errors(folder.location):
        made = [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
        handle = _lock(path / LOCK_NAME, folder.location)
    try:
        yield
    finally:
        # Deleted while it is still held, so that no other run's lock is deleted.
        folder.delete(LOCK_NAME)
        os.close(handle)
        with contextlib.suppress(OSError):
            for empty in made:
                empty.rmdir()  # Fails unless the folder is empty: a refused run leaves nothing behind.


def _lock(path: Path, location: str) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except BlockingIOError:
            os.close(handle)
            raise DatasetError(
                f"{location!r} is in use: another run is writing it. Wait for it to end, or choose another folder"
            ) from None
        except FileNotFoundError:
            pass
        os.close(handle)  # Another run ended and deleted the file between our two calls: try again.

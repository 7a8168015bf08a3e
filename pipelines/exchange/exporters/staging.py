"""Files of an export: written beside their targets under temporary names, and renamed together when all are complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import DatasetError
from schemas.filesystems import storage_errors
from schemas.locations import target_path
from schemas.storage import TEMPORARY_MARK

__all__ = ["Staging"]


@dataclass(frozen=True)
class Staging:
    """A local folder that an export writes to.

    Attributes:
        location: the folder.
        overwrite: replace existing files.
    """

    location: str
    overwrite: bool = False

    def __post_init__(self) -> None:
        target_path(self.location)

    @contextlib.contextmanager
    def files(self, names: Sequence[str], *, obsolete: str = "") -> Iterator[list[Path]]:
        """Yield temporary files that get their names when the block succeeds and are deleted when it fails.

        Args:
            names: names of the files.
            obsolete: pattern of further files that an earlier export left and that would be read together with these.

        Raises:
            DatasetError: a file already exists, or the folder cannot be written.
        """
        folder = target_path(self.location)
        with storage_errors(self.location):
            others = sorted({path.name for path in folder.glob(obsolete)} - set(names)) if obsolete else []
            existing = [name for name in names if (folder / name).exists()] + others
            if existing and not self.overwrite:
                raise DatasetError(
                    f"{self.location!r} holds {existing[0]!r} already: nothing was written. Choose another folder, or give "
                    "--overwrite to replace the existing files"
                )
            folder.mkdir(parents=True, exist_ok=True)
            temporary = [folder / f".{name}{TEMPORARY_MARK}{os.getpid()}" for name in names]
            try:
                yield temporary
                for path, name in zip(temporary, names, strict=True):
                    path.replace(folder / name)
                for name in others:
                    (folder / name).unlink()
            finally:
                for path in temporary:
                    path.unlink(missing_ok=True)

    def paths(self, names: Sequence[str]) -> list[Path]:
        """Return the files' final paths."""
        return [target_path(self.location) / name for name in names]

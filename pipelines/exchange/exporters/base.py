"""The interface of the writers of layouts, and the folder of their files.

Files are written beside their targets under temporary names, and renamed together when all are complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pipelines.exchange.jobs import ExportJob
from pipelines.exchange.sidecars import sidecar_name, write_sidecar
from pipelines.running.meter import Meter
from schemas.dataset import Dataset
from schemas.errors import DatasetError
from schemas.made_from import differences, read_made_from, write_made_from
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.storage.locations import target_path
from schemas.storage.storage_errors import storage_errors

Note: TypeAlias = Callable[[str], None]
"""Takes a sentence that users of the files should read."""


@dataclass(frozen=True)
class Staging:
    """A local folder that an export writes to.

    Attributes:
        location: the folder.
        overwrite: replace existing files.
        made_from: description of the work, see `schemas.made_from`; it is stored beside the files unless it is empty.
    """

    location: str
    overwrite: bool = False
    made_from: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target_path(self.location)

    @contextlib.contextmanager
    def files(
        self, names: Sequence[str], *, options: Mapping[str, Mapping[str, Any]] | None = None, obsolete: str = ""
    ) -> Iterator[list[Path]]:
        """Yield temporary files that get their names when the block succeeds and are deleted when it fails.

        Args:
            names: names of the files.
            options: options for the import of a file, by its name, which its sidecar stores; the others have no sidecar.
            obsolete: pattern of further files that an earlier export left and that would be read together with these.

        Raises:
            DatasetError: a file already exists, or the folder cannot be written.
        """
        folder, options = target_path(self.location), {name: values for name, values in (options or {}).items() if values}
        with storage_errors(self.location):
            named = [*names, *map(sidecar_name, options)]
            others = sorted({path.name for path in folder.glob(obsolete)} - set(named)) if obsolete else []
            others += [name for name in map(sidecar_name, names) if (folder / name).exists() and name not in named]
            existing = [name for name in named if (folder / name).exists()] + others
            stored = read_made_from(Folder(self.location)) if self.made_from else {}
            found = differences(stored, self.made_from) if stored else [""]
            if existing and found and not self.overwrite:  # Without a difference, a command that was killed wrote them.
                why = f" ({'; '.join(found[:3])})" if stored else ""
                raise DatasetError(
                    f"{self.location!r} holds {existing[0]!r} already{why}: nothing was written. Choose another folder, or give "
                    "--overwrite to replace the existing files"
                )
            folder.mkdir(parents=True, exist_ok=True)
            temporary = {name: folder / f".{name}{TEMPORARY_MARK}{os.getpid()}" for name in named}
            try:
                for name, values in options.items():
                    write_sidecar(temporary[sidecar_name(name)], values)
                yield [temporary[name] for name in names]
                if self.made_from:
                    sizes = {name: path.stat().st_size for name, path in temporary.items()}
                    write_made_from(Folder(self.location), self.made_from, sizes)
                for name, path in temporary.items():
                    path.replace(folder / name)
                for name in others:
                    (folder / name).unlink()
            finally:
                for path in temporary.values():
                    path.unlink(missing_ok=True)

    def paths(self, names: Sequence[str]) -> list[Path]:
        """Return the final paths of the files and of their sidecars."""
        folder = target_path(self.location)
        sidecars = [name for name in map(sidecar_name, names) if (folder / name).is_file()]
        return [folder / name for name in (*names, *sidecars)]


class Writer(Protocol):
    """A function that writes one layout."""

    def __call__(self, job: ExportJob, dataset: Dataset, staging: Staging, *, meter: Meter, note: Note) -> list[Path]:
        """Write the files of a dataset.

        Args:
            job: the options.
            dataset: features or regions.
            staging: the folder to write to.
            meter: counts images, for the display of progress.
            note: takes sentences that users of the files should read.

        Returns:
            The files.

        Raises:
            ImagepivotError: the dataset does not fit the layout, or a file cannot be written.
        """

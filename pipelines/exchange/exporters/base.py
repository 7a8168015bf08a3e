"""Interface of the layout writers: staged files and selected captions.

Files are written under temporary names in the target folder, and renamed together when all are complete.
"""

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.image_lists import apply_rule
from pipelines.exchange.jobs import ExportJob
from pipelines.running.meter import Meter
from schemas.console.events import Remark
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.storage.locations import check_location, is_remote, local_path
from schemas.storage.storage_errors import create_folder, storage_errors
from schemas.writing.made_from import MadeFrom, differences, read_made_from, write_made_from


def target_path(location: str) -> Path:
    """Return the path of an output location, which must be on this machine.

    Raises:
        UsageError: it is an address of a store, or invalid.
    """
    check_location(location)
    if is_remote(location):
        raise UsageError(f"cannot write to {location!r}: give a local folder, and copy it where you want it")
    return local_path(location)


@dataclass(frozen=True)
class Staging:
    """The local output folder of an export."""

    location: str
    overwrite: bool
    made_from: MadeFrom
    meter: Meter
    on_warning: Remark

    @contextlib.contextmanager
    def files(self, names: Sequence[str], *, obsolete: str = "") -> Iterator[list[Path]]:
        """Yield temporary files that are renamed on success and deleted on failure.

        Obsolete files are those of an earlier export that would be read together with these, as a pattern.

        Raises:
            DatasetError: a file already exists, or the folder cannot be written.
        """
        folder = target_path(self.location)
        with storage_errors(self.location):
            others = sorted({path.name for path in folder.glob(obsolete)} - set(names)) if obsolete else []
            existing = [name for name in names if (folder / name).exists()] + others
            stored = read_made_from(Folder(self.location))
            changes = differences(stored, self.made_from) if stored else [""]
            if existing and changes and not self.overwrite:  # Files without a change are those of a killed command.
                why = f" ({'; '.join(changes[:3])})" if stored else ""
                raise DatasetError(
                    f"{self.location!r} holds {existing[0]!r} already{why}: nothing was written. Choose another folder, or give "
                    "--overwrite to replace the existing files"
                )
            create_folder(folder)
            temporary = {name: folder / f".{name}{TEMPORARY_MARK}{os.getpid()}" for name in names}
            try:
                yield list(temporary.values())
                sizes = {name: path.stat().st_size for name, path in temporary.items()}
                write_made_from(Folder(self.location), self.made_from, sizes)
                for name, path in temporary.items():
                    path.replace(folder / name)
                for name in others:
                    (folder / name).unlink()
            finally:
                for path in temporary.values():
                    path.unlink(missing_ok=True)

    def remark_on_ids(self, image_ids: Collection[str]) -> None:
        """Remark on ids that ``import`` would take for paths or file names."""
        if changed := next((image_id for image_id in image_ids if apply_rule(image_id, "name") != image_id), None):
            self.on_warning(f"image ids such as {changed!r} look like paths: to import the files again, give --id-rule exact")


def read_selected_captions(job: ExportJob, *columns: str, unique: tuple[str, ...] = ()) -> pa.Table:
    """Read the selected captions, sorted by image id, language, portion and index.

    The columns are those besides key and split. Each ``unique`` label has one value in the selection.

    Raises:
        UsageError: a selected value does not occur, or a unique label has several values.
    """
    dataset = open_dataset(job.captions, kind="captions")
    selected = {
        "language": (job.language,) if job.language else (),
        "portion": (job.portion,) if job.portion else (),
        "split": job.splits,
    }
    tables, seen = [], {label: set[str]() for label in selected}
    for table in dataset.shards(["image_id", "language", "portion", "index", "split", *columns]):
        for label in selected:
            plain = table[label].cast(pa.string())
            seen[label].update(pc.unique(plain).to_pylist())
            table = table.set_column(table.schema.get_field_index(label), label, plain)
        for label, values in selected.items():
            if values:
                table = table.filter(pc.is_in(table[label], value_set=pa.array(values, pa.string())))
        tables.append(table)
    for label, values in selected.items():
        for value in values:
            if value not in seen[label]:
                raise UsageError(
                    f"{dataset.folder.location!r} holds no captions of {label} {value!r}, only {', '.join(sorted(seen[label]))}"
                )
    captions = pa.concat_tables(tables)
    if not captions.num_rows:
        raise UsageError(f"{dataset.folder.location!r} holds no captions of this language, portion and split together")
    for label in unique:
        if len(names := sorted(pc.unique(captions[label]).to_pylist())) > 1:
            raise UsageError(f"the captions have several values of {label} ({', '.join(names)}): choose one with --{label}")
    return captions.sort_by([(name, "ascending") for name in ("image_id", "language", "portion", "index")])

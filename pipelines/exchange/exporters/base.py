"""Interface of the layout writers: staged files, sidecars, selected captions.

Files are written under temporary names in the target folder, and renamed together when all are complete. A sidecar holds the
options for importing a file again: ``features.import.json`` is written for ``features.npy`` if the defaults of ``import`` would
read other rows, e.g. since image ids contain slashes. Options of the user win over those of a sidecar.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.image_lists import apply_rule
from pipelines.exchange.jobs import ExportJob, ImportJob, ListIdRule, format_options
from pipelines.running.meter import Meter
from schemas.console.events import Remark
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.kinds import REGIONS
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.storage.locations import check_location, is_remote, local_path
from schemas.storage.storage_errors import create_folder, storage_errors
from schemas.text import read_text
from schemas.writing.made_from import MadeFrom, differences, read_made_from, write_made_from

_DEFAULTS: dict[str, Any] = {"id_rule": "name", "max_regions": REGIONS, "boxes": None, "sizes": None}
_FILES = ("ids", "boxes", "sizes")


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
    def files(
        self, names: Sequence[str], *, options: Mapping[str, Mapping[str, Any]] | None = None, obsolete: str = ""
    ) -> Iterator[list[Path]]:
        """Yield temporary files that are renamed on success and deleted on failure.

        The options are the contents of sidecars by file name. Obsolete files are those of an earlier export
        that would be read together with these, as a pattern.

        Raises:
            DatasetError: a file already exists, or the folder cannot be written.
        """
        folder, options = target_path(self.location), {name: values for name, values in (options or {}).items() if values}
        with storage_errors(self.location):
            targets = [*names, *map(sidecar_name, options)]
            others = sorted({path.name for path in folder.glob(obsolete)} - set(targets)) if obsolete else []
            others += [name for name in map(sidecar_name, names) if (folder / name).exists() and name not in targets]
            existing = [name for name in targets if (folder / name).exists()] + others
            stored = read_made_from(Folder(self.location))
            changes = differences(stored, self.made_from) if stored else [""]
            if existing and changes and not self.overwrite:  # Files without a change are those of a killed command.
                why = f" ({'; '.join(changes[:3])})" if stored else ""
                raise DatasetError(
                    f"{self.location!r} holds {existing[0]!r} already{why}: nothing was written. Choose "
                    "another folder, or give --overwrite to replace the existing files"
                )
            create_folder(folder)
            temporary = {name: folder / f".{name}{TEMPORARY_MARK}{os.getpid()}" for name in targets}
            try:
                for name, values in options.items():
                    temporary[sidecar_name(name)].write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")
                yield [temporary[name] for name in names]
                sizes = {name: path.stat().st_size for name, path in temporary.items()}
                for name in existing:  # A killed command must not leave files that have the new sizes, but old content.
                    (folder / name).unlink(missing_ok=True)
                write_made_from(Folder(self.location), self.made_from, sizes)
                for name, path in temporary.items():
                    path.replace(folder / name)
            finally:
                for path in temporary.values():
                    path.unlink(missing_ok=True)


def sidecar_name(name: str) -> str:
    """Return the name of a sidecar, e.g. ``dev_ims.import.json`` of ``dev_ims.npy``."""
    return f"{PurePath(name).stem}.import.json"


def options_for(image_ids: Iterable[str], *, regions: int | None = None, ids: str = "") -> dict[str, Any]:
    """Return the options for importing an exported file beyond the defaults.

    The number of regions per image is None for features. The name of the list of image ids is empty without a list.
    """
    exact = any(apply_rule(image_id, "name") != image_id for image_id in image_ids)
    if not exact and regions in (None, _DEFAULTS["max_regions"]):
        return {}
    options = {"id_rule": "exact" if exact else _DEFAULTS["id_rule"], "max_regions": regions, "ids": ids or None}
    return {name: value for name, value in options.items() if value is not None}


def apply_sidecars(job: ImportJob, paths: Sequence[Path]) -> ImportJob:
    """Fill unset options of a job from the sidecars of its files.

    Raises:
        InputError: a sidecar is damaged.
        UsageError: the files were exported with different options.
    """
    sidecars = [_read_sidecar(path) for path in paths]
    if not any(sidecars):
        return job
    options = {name for name, value in {"id_rule": job.id_rule, **format_options(job)}.items() if value in (None, ())}
    listed = [(path.parent / sidecar.get("ids", "")).resolve() for path, sidecar in zip(paths, sidecars, strict=True)]
    if job.ids and [local_path(location).resolve() for location in job.ids] != listed:
        options.discard("id_rule")  # Entries of another list than the exported one have another form.
    changes: dict[str, Any] = {}
    for option in sorted(options & _DEFAULTS.keys()):
        values = [sidecar.get(option, _DEFAULTS[option]) for sidecar in sidecars]
        is_file = option in _FILES
        for path, value in zip(paths, values, strict=True):
            if (value is None) != (values[0] is None) or (value != values[0] and not is_file):
                raise UsageError(
                    f"{paths[0].name} and {path.name} were exported with different options (see {sidecar_name(paths[0].name)} and "
                    f"{sidecar_name(path.name)}): give --{option.replace('_', '-')}, or import them one by one"
                )
        if values[0] is not None:
            files = tuple(str(path.with_name(str(value))) for path, value in zip(paths, values, strict=True))
            changes[option] = files if is_file else values[0]
    return replace(job, **changes)


def _read_sidecar(path: Path) -> dict[str, Any]:
    sidecar = path.with_name(sidecar_name(path.name))
    if not sidecar.is_file():
        return {}
    try:
        options = json.loads(read_text(sidecar))
    except ValueError:
        options = None
    if not isinstance(options, dict) or not all(_is_valid(*option) for option in options.items()):
        raise InputError(f"{str(sidecar)!r} does not hold options as `export` writes them: export again, or delete the file")
    return options


def _is_valid(option: str, value: object) -> bool:
    if option == "id_rule":
        return value in get_args(ListIdRule)
    if option == "max_regions":
        return type(value) is int and value > 0
    return option in _FILES and isinstance(value, str) and PurePath(value).name == value


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

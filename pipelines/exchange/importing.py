"""``imagepivot import``: features that other tools made in, datasets of kind ``features`` or ``regions`` out.

One process, no Beam: the work is reading and writing. Everything is checked before the first shard is written; then a shard is
gathered from the files some rows at a time, so that memory holds a few megabytes and the image ids, whatever the files' size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pyarrow as pa

from pipelines.exchange.importers import ArrayFiles, FeatureFiles, Hdf5File, IdRule, TsvFiles
from pipelines.exchange.importers.base import check_finite, stored_dtype, table_of
from pipelines.running.progress import Meter
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec
from schemas.fingerprints import Identity
from schemas.keys import DEFAULT_SHARDS, check_shards, shard_of
from schemas.kinds import REGIONS
from schemas.manifest import Manifest
from schemas.output import Output
from schemas.parameters import FeaturesParameters
from schemas.storage import Folder
from schemas.writing import ShardWriter, write_dataset

__all__ = ["FORMATS", "ImportJob", "format_of", "import_features"]

FORMATS = ("npy", "tsv", "hdf5")
_EXTENSIONS = {".npy": "npy", ".tsv": "tsv", ".h5": "hdf5", ".hdf5": "hdf5"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BLOCK_BYTES = 8 << 20
# Options that only some formats understand, with their defaults.
_ONLY_FOR: dict[str, tuple[tuple[str, ...], object]] = {
    "ids": (("npy", "hdf5"), ()),
    "boxes": (("npy",), ()),
    "sizes": (("npy",), ()),
    "repeats": (("npy", "hdf5"), 1),
    "max_regions": (("npy", "tsv"), REGIONS),
    "array": (("hdf5",), ""),
    "id_array": (("hdf5",), ""),
}


def format_of(location: str) -> str:
    """The format of a file by its extension.

    Raises:
        UsageError: the extension says nothing.
    """
    for extension, name in _EXTENSIONS.items():
        if location.lower().endswith(extension):
            return name
    raise UsageError(f"cannot tell the format of {location!r} from its name: give --format {', '.join(FORMATS)}")


@dataclass(frozen=True)
class ImportJob:
    """What ``imagepivot import`` does.

    Attributes:
        sources: the files with the features; several become one dataset.
        output: folder of the dataset.
        name: name of the feature, e.g. ``resnet50-pool``.
        format: one of ``FORMATS``; by the extension of the first file when empty.
        source: where the feature comes from, in words.
        ids: npy: the list of image ids of each file, looked for beside it when there is none; hdf5: one list.
        boxes: npy: boxes ``[N, R, 4]`` of each file, which makes its rows ``[N, R, D]`` regions.
        sizes: npy: width and height ``[N, 2]`` of the images of each file.
        id_rule: ``name``: the image id is the last component of an entry, ``path`` the whole entry, both without ``#N`` and
            the extension of an image; ``exact``: the entry as it is.
        repeats: how often each image stands in a row; identical copies become one row.
        max_regions: most regions of an image that are stored.
        array: hdf5: path of the array within the file, or of a group with one array an image.
        id_array: hdf5: path of the image ids within the file.
        shards: number of shards.
        overwrite: replace a dataset of another fingerprint.
    """

    sources: tuple[str, ...]
    output: str
    name: str
    format: str = ""
    source: str = ""
    ids: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    id_rule: IdRule = "name"
    repeats: int = 1
    max_regions: int = REGIONS
    array: str = ""
    id_array: str = ""
    shards: int = DEFAULT_SHARDS
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_shards(self.shards)
        if not self.sources:
            raise UsageError("no files are given: give at least one to import")
        if self.format not in ("", *FORMATS):
            raise UsageError(f"format {self.format!r} is unknown, expected one of {', '.join(FORMATS)}")
        if self.id_rule not in get_args(IdRule):
            raise UsageError(f"--id-rule is {self.id_rule!r}, expected one of {', '.join(get_args(IdRule))}")
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name is {self.name!r}, expected letters, digits, '.', '_' and '-', e.g. 'resnet50-pool'")
        for option in ("repeats", "max_regions"):
            if getattr(self, option) < 1:
                raise UsageError(f"--{option.replace('_', '-')} is {getattr(self, option)}, expected 1 or more")
        given = self.resolved_format
        for option, (formats, default) in _ONLY_FOR.items():
            if given not in formats and getattr(self, option) != default:
                raise UsageError(f"--{option.replace('_', '-')} is for {' and '.join(formats)}, these files are {given}")
        if given == "hdf5" and (len(self.sources) != 1 or len(self.ids) > 1):
            raise UsageError("of hdf5 one file is imported at a time, with at most one list of ids")

    @property
    def resolved_format(self) -> str:
        """The format, by extension where it is not given."""
        return self.format or format_of(self.sources[0])

    def open(self) -> FeatureFiles:
        """Opens the files and checks shapes and counts.

        Raises:
            ImagepivotError: a file is missing, or they do not fit together.
        """
        match self.resolved_format:
            case "npy":
                return ArrayFiles(
                    arrays=self.sources,
                    lists=self.ids,
                    boxes=self.boxes,
                    sizes=self.sizes,
                    id_rule=self.id_rule,
                    repeats=self.repeats,
                    regions=self.max_regions,
                )
            case "tsv":
                return TsvFiles(files=self.sources, id_rule=self.id_rule, regions=self.max_regions)
            case _:
                return Hdf5File(
                    file=self.sources[0],
                    array=self.array,
                    id_array=self.id_array,
                    id_list=self.ids[0] if self.ids else "",
                    id_rule=self.id_rule,
                    repeats=self.repeats,
                )


def import_features(job: ImportJob, meter: Meter = Meter()) -> Manifest:
    """Makes a dataset of kind ``features`` or ``regions`` from features that other tools made.

    Args:
        job: what to make.
        meter: counts images for whoever watches.

    Raises:
        ImagepivotError: the files are missing, broken or contradict themselves, or the folder cannot be written.
    """
    files = job.open()
    dtype = stored_dtype(files.dtype, place=job.sources[0])
    spec = FeatureSpec(name=job.name, shape=files.shape, dtype=dtype, source=job.source)
    identity = Identity(
        kind=files.kind,
        parameters=FeaturesParameters(
            feature=spec,
            imported={
                "format": job.resolved_format,
                "name": job.name,
                "dtype": files.dtype.newbyteorder("=").name,
                **files.parameters,
            },
        ).to_json(),
        inputs=tuple(files.inputs),
        shards=job.shards,
    )
    output = Output(folder=Folder(job.output), identity=identity)
    rows_by_shard: list[list[int]] = []

    def check() -> None:
        rows_by_shard.extend(_by_shard(files.image_ids, _check_rows(files, spec), output.shards))

    def make_shard(number: int, shard: ShardWriter) -> None:
        for block in _blocks(rows_by_shard[number], spec):
            shard.write(_table(files, block, spec))
            meter.add(images=len(block))

    return write_dataset(output, make_shard, overwrite=job.overwrite, check=check)


def _check_rows(files: FeatureFiles, spec: FeatureSpec) -> list[int]:
    """Reads everything once; gives the first row of each image.

    Raises:
        InputError: values are not finite, or rows of one image differ.
    """
    bad_rows = bad_values = 0
    first_bad = -1
    for rows in _blocks(range(len(files.image_ids)), spec):
        bad = check_finite(_table(files, rows, spec))
        if bad.any():
            first_bad = rows[int(np.flatnonzero(bad)[0])] if first_bad < 0 else first_bad
            bad_rows, bad_values = bad_rows + int((bad > 0).sum()), bad_values + int(bad.sum())
    if bad_rows:
        raise InputError(
            f"{bad_values:,} values of {bad_rows:,} images are not finite as {spec.dtype}, first of image "
            f"{files.image_ids[first_bad]!r} ({files.place(first_bad)}): extract these features again, or take them out"
        )
    first: dict[str, int] = {}
    copies: list[tuple[int, int]] = []
    for row, image_id in enumerate(files.image_ids):
        earlier = first.setdefault(image_id, row)
        if earlier != row:
            copies.append((earlier, row))
    for block in _blocks(range(len(copies)), spec):
        earlier_rows, later_rows = zip(*(copies[number] for number in block), strict=True)
        if not _table(files, earlier_rows, spec).equals(_table(files, later_rows, spec)):
            _refuse_copy(files, [copies[number] for number in block], spec)
    return list(first.values())


def _refuse_copy(files: FeatureFiles, copies: Sequence[tuple[int, int]], spec: FeatureSpec) -> None:
    for earlier, later in copies:
        if not _table(files, [earlier], spec).equals(_table(files, [later], spec)):
            raise InputError(
                f"image {files.image_ids[later]!r} stands at {files.place(earlier)} and again, with other values, at "
                f"{files.place(later)}: one image has one feature; check that the list of ids belongs to the file"
            )


def _blocks(rows: Sequence[int], spec: FeatureSpec) -> Iterator[Sequence[int]]:
    size = max(1, _BLOCK_BYTES // (4 * spec.width))
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _table(files: FeatureFiles, rows: Sequence[int], spec: FeatureSpec) -> pa.Table:
    return table_of([files.image_ids[row] for row in rows], files.columns(rows), files.kind, spec)


def _by_shard(image_ids: Sequence[str], rows: Sequence[int], shards: int) -> list[list[int]]:
    """The rows of each shard, sorted by image id."""
    groups: list[list[int]] = [[] for _ in range(shards)]
    for row in rows:
        groups[shard_of(image_ids[row], shards)].append(row)
    for group in groups:
        group.sort(key=lambda row: image_ids[row])
    return groups

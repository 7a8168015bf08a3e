"""Jobs of ``import`` and ``export``; each field declares its option. Importing this loads nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pipelines.jobs import Output, Shards
from schemas.conversion import convert, default_of, hints_of
from schemas.errors import UsageError
from schemas.keys import AUTO, check_shards_request
from schemas.options import Opt
from schemas.writing.reuse_policy import Overwrite, Verify

ImportFormat = Literal["npy", "tsv", "hdf5", "webdataset"]

IdRule = Literal["name", "path", "exact"]
"""The part of a list entry that is the image id: ``name``: its last component, ``path``: all of it, both without ``#N`` and the
extension of an image; ``exact``: the entry unchanged."""

KarpathyKey = Literal["imgid", "cocoid", "sentid"]
"""What is counted: ``imgid``: images of the file, ``cocoid``: images of COCO, ``sentid``: captions of the file."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# The formats that have an option; other formats refuse it. Options that are not here are common to all.
_FORMATS = {
    "ids": ("npy", "hdf5"),
    "boxes": ("npy",),
    "sizes": ("npy",),
    "repeats": ("npy", "hdf5"),
    "max_regions": ("npy", "tsv"),
    "array": ("hdf5",),
    "id_array": ("hdf5",),
    "karpathy": ("npy", "tsv", "hdf5"),
    "karpathy_key": ("npy", "tsv", "hdf5"),
    "captions": ("scan", "webdataset"),
    "language": ("scan", "webdataset"),
    "portion": ("scan", "webdataset"),
    "splits": ("scan", "webdataset"),
    "split_names": ("scan", "mulisera"),
    "text": ("scan",),
    "captions_per_image": ("scan",),
    "lists": ("mulisera", "npy"),
    "l2": ("scan", "mulisera", "npy"),
    "columns": ("tsv",),
}


@dataclass(frozen=True)
class ImportJob:
    """Job of ``imagepivot import``. Without a format, `import_features` takes that of the first file's extension.

    Raises:
        UsageError: a value is out of range, two options contradict each other, or an option is not of the format.
    """

    sources: Annotated[tuple[str, ...], Opt("Files with features; several become one dataset.")]
    output: Output
    name: Annotated[str, Opt("Name of the feature, e.g. resnet50-pool.", is_option=True)]
    format: Annotated[ImportFormat | None, Opt("Format of the files; by their extension when not given.")] = None
    source: Annotated[str, Opt("Origin of the feature, in words.")] = ""
    ids: Annotated[
        tuple[str, ...],
        Opt("npy, hdf5: list of image ids for each file, in order; for npy else the one beside it.", is_repeated=True),
    ] = ()
    boxes: Annotated[tuple[str, ...], Opt("npy: boxes [N, R, 4] for each file; makes the rows regions.", is_repeated=True)] = ()
    sizes: Annotated[tuple[str, ...], Opt("npy: width and height of the images [N, 2] for each file.", is_repeated=True)] = ()
    id_rule: Annotated[
        IdRule | None,
        Opt(
            "Image id of an entry: the file [i]name[/i] or whole [i]path[/i] without extension, or [i]exact[/i]ly the entry; "
            "name when not given, path for HDF5 groups, exact for webdataset, or as exported.",
        ),
    ] = None
    repeats: Annotated[int, Opt("npy, hdf5: how many times in a row each image occurs; VSE++: 5.")] = 1
    max_regions: Annotated[int | None, Opt("npy, tsv: greatest number of regions stored per image; 36, or as exported.")] = None
    array: Annotated[str, Opt("hdf5: path of the array, or of a group with one array per image.")] = ""
    id_array: Annotated[str, Opt("hdf5: path of the image ids of the array.")] = ""
    karpathy: Annotated[str, Opt("The dataset_*.json whose numbers the ids are; they become the names of its images.")] = ""
    karpathy_key: Annotated[KarpathyKey, Opt("What those numbers count there.")] = "imgid"
    shards: Shards = AUTO
    overwrite: Overwrite = False
    verify: Verify = False

    def __post_init__(self) -> None:
        check_shards_request(self.shards)
        if not self.sources:
            raise UsageError("no files are given: give at least one to import")
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name is {self.name!r}, expected letters, digits, '.', '_' and '-', e.g. 'resnet50-pool'")
        _check_options(self, "format", "id_rule", "karpathy_key", misfit="these files are")
        for option, count in (("--repeats", self.repeats), ("--max-regions", self.max_regions)):
            if count is not None and count < 1:
                raise UsageError(f"{option} is {count}, expected 1 or more")
        if self.karpathy_key != "imgid" and not self.karpathy:
            raise UsageError("--karpathy-key says what the numbers of a dataset_*.json are: give the file with --karpathy")
        if self.format == "hdf5" and (len(self.sources) != 1 or len(self.ids) > 1):
            raise UsageError("import one HDF5 file at a time, with at most one list of ids")
        if self.format == "npy":
            for option, files in (("--ids", self.ids), ("--boxes", self.boxes), ("--sizes", self.sizes)):
                if files and len(files) != len(self.sources):
                    raise UsageError(
                        f"{len(self.sources)} arrays but {len(files)} files with {option}: give one for each, in the same order, "
                        f"every one behind an option of its own: {option} FILE {option} FILE"
                    )
            if self.sizes and not self.boxes:
                raise UsageError("--sizes is for regions: give --boxes as well, or leave --sizes out")


@dataclass(frozen=True)
class ExportJob:
    """Job of ``imagepivot export``.

    Raises:
        UsageError: a value is out of range, an option is missing, or is not of the format.
    """

    dataset: Annotated[str, Opt("Folder of features or regions.")]
    output: Annotated[str, Opt("Local folder for the files.")]
    format: Annotated[Literal["scan", "mulisera", "tsv", "webdataset", "npy"], Opt("Layout of the files.", is_option=True)]
    captions: Annotated[str, Opt("scan, webdataset: folder of a captions dataset.")] = ""
    language: Annotated[str, Opt("Only captions of this language.")] = ""
    portion: Annotated[str, Opt("Only captions of this portion.")] = ""
    splits: Annotated[tuple[str, ...], Opt("Only captions of these splits; all when not given.")] = ()
    split_names: Annotated[
        Mapping[str, str], Opt("scan, mulisera: names of splits in the layout, e.g. [i]val=dev[/i].", metavar="OURS=THEIRS")
    ] = field(default_factory=dict)
    text: Annotated[Literal["text", "tokens"], Opt("scan: captions as read, or their tokens joined by a space.")] = "text"
    captions_per_image: Annotated[int, Opt("scan: captions taken of each image, from the first; 0: all.")] = 0
    lists: Annotated[
        tuple[str, ...],
        Opt("mulisera: list of images of each split; npy: one, for the order.", is_repeated=True),
    ] = ()
    l2: Annotated[bool, Opt("scan, mulisera, npy: divide each vector by its norm.")] = False
    columns: Annotated[
        Literal["bottom-up", "lxmert"], Opt("tsv: 6 columns of bottom-up-attention, or 10 that LXMERT reads.")
    ] = "bottom-up"
    overwrite: Annotated[bool, Opt("Replace existing files in OUTPUT.")] = False

    def __post_init__(self) -> None:
        _check_options(self, "format", "text", "columns", misfit="not for")
        if self.format == "scan" and not self.captions:
            raise UsageError("the layout of SCAN holds captions: give their dataset with --captions")
        if not self.captions and (self.language or self.portion or self.splits):
            raise UsageError("--language, --portion and --splits choose captions: give their dataset with --captions")
        if self.captions_per_image < 0:
            raise UsageError(f"--captions-per-image is {self.captions_per_image}, expected 1 or more, or 0 for all")
        if self.format == "mulisera" and not self.lists:
            raise UsageError("mulisera reads features by line number: give the lists with --lists, e.g. image_splits/train.txt")
        if self.format == "npy" and len(self.lists) > 1:
            raise UsageError(f"npy takes one list for the order of the rows, found {len(self.lists)}")
        for ours, theirs in self.split_names.items():
            if "/" in theirs:
                raise UsageError(f"--split-names calls {ours!r} {theirs!r}, expected a part of a file name: leave out '/'")


def format_options(job: ImportJob | ExportJob) -> dict[str, Any]:
    """Return the options that the job's format has and other formats lack."""
    return {item.name: getattr(job, item.name) for item in fields(job) if job.format in _FORMATS.get(item.name, ())}


def _check_options(job: ImportJob | ExportJob, *choices: str, misfit: str) -> None:
    """Check options with a closed list of values, the choices, and refuse options that the format does not have.

    Without a format, all options pass. The misfit are words before the format in the message.
    """
    kind: Any = type(job)
    hints = hints_of(kind)
    for name in choices:
        convert(getattr(job, name), hints[name], f"--{name.replace('_', '-')}")
    for item in fields(job):
        formats = _FORMATS.get(item.name, ())
        if job.format and formats and job.format not in formats and getattr(job, item.name) != default_of(item):
            raise UsageError(f"--{item.name.replace('_', '-')} is for {' and '.join(formats)}, {misfit} {job.format}")

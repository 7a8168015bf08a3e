"""Jobs of ``import`` and ``export``. Importing them loads nothing heavy."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pipelines.jobs import OutputFolder, Shards, Space
from schemas.conversion import default_of
from schemas.errors import UsageError
from schemas.keys import AUTO, check_shards_request
from schemas.options import Opt, Options
from schemas.writing.reuse_policy import Notes, Overwrite, Verify

ImportFormat = Literal["npy", "tsv", "hdf5", "webdataset"]

ListIdRule = Literal["name", "path", "exact"]
"""Image id of a list entry: ``name``: its last component, ``path``: the whole entry, both without ``#N`` and image extension;
``exact``: the entry unchanged."""

KarpathyKey = Literal["imgid", "cocoid", "sentid"]
"""Kind of numbers: ``imgid``: images of the file, ``cocoid``: images of COCO, ``sentid``: captions of the file."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# Formats of an option; other formats refuse it. All formats have the options that are not listed.
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


@dataclass(frozen=True, repr=False)
class ImportJob(Options):
    r"""Job of ``imagepivot import``.

    Raises:
        UsageError: a value is out of range, two options contradict each other, or an option is not of the format.

    Examples:
        >>> np.save("vectors.npy", np.zeros((2, 8), np.float32))
        >>> _ = Path("ids.txt").write_text("img-00\nimg-01\n")
        >>> job = imagepivot.ImportJob(("vectors.npy",), "build/imported", name="zeros", ids=("ids.txt",))
        >>> imagepivot.import_features(job).rows
        2
    """

    sources: Annotated[tuple[str, ...], Opt("Files with features, which become one dataset.")]
    output: OutputFolder
    name: Annotated[str, Opt("Name the feature, e.g. resnet50-pool.", is_option=True)]
    format: Annotated[ImportFormat | None, Opt("Read this format. Default: by file extension.")] = None
    source: Annotated[str, Opt("Describe the origin of the feature.")] = ""
    ids: Annotated[
        tuple[str, ...],
        Opt("Read the image ids of each file from this list (npy, hdf5). Default: the list beside it (npy).", is_repeated=True),
    ] = ()
    boxes: Annotated[tuple[str, ...], Opt("Read the boxes [N, R, 4] of each file, for regions (npy).", is_repeated=True)] = ()
    sizes: Annotated[
        tuple[str, ...], Opt("Read widths and heights [N, 2] of the images of each file (npy).", is_repeated=True)
    ] = ()
    id_rule: Annotated[
        ListIdRule | None,
        Opt(
            "Use the file [i]name[/i] or whole [i]path[/i] of an entry, without extension, or [i]exact[/i]ly the entry, as image "
            "id. Default: name; path for HDF5 groups; exact for webdataset.",
        ),
    ] = None
    repeats: Annotated[int, Opt("Take one of this many consecutive rows per image (npy, hdf5; VSE++: 5).", min_=1)] = 1
    max_regions: Annotated[
        int | None, Opt("Store at most this many regions per image (npy, tsv). Default: 36, or as exported.", min_=1)
    ] = None
    array: Annotated[str, Opt("Read this array, or this group with one array per image (hdf5).")] = ""
    id_array: Annotated[str, Opt("Read image ids from this array (hdf5).")] = ""
    karpathy: Annotated[str, Opt("Replace numeric ids by the image names in this dataset_*.json.")] = ""
    karpathy_key: Annotated[KarpathyKey, Opt("Look numeric ids up by this key of --karpathy.")] = "imgid"
    captions: Annotated[
        str, Opt("Import vectors of captions in this folder; --ids lists [i]image/language/portion/index[/i] (npy).")
    ] = ""
    space: Space = ""
    shards: Shards = AUTO
    overwrite: Overwrite = False
    verify: Verify = False
    notes: Notes = Notes()

    def _check(self) -> None:
        check_shards_request(self.shards)
        if not self.sources:
            raise UsageError("expected one or more files to import, found none")
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name is {self.name!r}, expected letters, digits, '.', '_' and '-', e.g. 'resnet50-pool'")
        if self.space and not _NAME.fullmatch(self.space):
            raise UsageError(f"--space is {self.space!r}, expected letters, digits, '.', '_' and '-', e.g. 'clip-vit-b-32'")
        if self.captions and (self.boxes or self.id_rule):
            raise UsageError("--captions is for one vector per caption, with whole ids: leave --boxes and --id-rule out")
        _check_options(self)
        if self.karpathy_key != "imgid" and not self.karpathy:
            raise UsageError("--karpathy-key is for the numbers of a dataset_*.json: give the file with --karpathy")
        if self.format == "hdf5" and (len(self.sources) != 1 or len(self.ids) > 1):
            raise UsageError("import one HDF5 file at a time, with at most one list of ids")
        if self.format == "npy":
            for option, files in (("--ids", self.ids), ("--boxes", self.boxes), ("--sizes", self.sizes)):
                if files and len(files) != len(self.sources):
                    raise UsageError(
                        f"{len(self.sources)} arrays but {len(files)} files with {option}: give one for "
                        f"each array, in the same order: {option} FILE {option} FILE"
                    )
            if self.sizes and not self.boxes:
                raise UsageError("--sizes is for regions: give --boxes as well, or leave --sizes out")


@dataclass(frozen=True, repr=False)
class ExportJob(Options):
    """Job of ``imagepivot export``.

    Raises:
        UsageError: a value is out of range, an option is missing, or is not of the format.

    Examples:
        >>> [path.name for path in imagepivot.export_dataset(imagepivot.ExportJob("features", "build/arrays", format="npy"))]
        ['features.npy', 'ids.txt']
    """

    dataset: Annotated[str, Opt("Folder of features or regions.")]
    output: Annotated[str, Opt("Local folder for the files.")]
    format: Annotated[Literal["scan", "mulisera", "tsv", "webdataset", "npy"], Opt("Write this format.", is_option=True)]
    captions: Annotated[str, Opt("Write the captions of this dataset, too (scan, webdataset).")] = ""
    language: Annotated[str, Opt("Write only captions of this language.")] = ""
    portion: Annotated[str, Opt("Write only captions of this portion.")] = ""
    splits: Annotated[tuple[str, ...], Opt("Write only captions of these splits. Default: all.")] = ()
    split_names: Annotated[
        Mapping[str, str], Opt("Rename splits, e.g. [i]val=dev[/i] (scan, mulisera).", metavar="OURS=THEIRS")
    ] = field(default_factory=dict)
    text: Annotated[Literal["text", "tokens"], Opt("Write captions as read, or as tokens joined by spaces (scan).")] = "text"
    captions_per_image: Annotated[int, Opt("Write the first captions of each image, at most this many; 0: all (scan).")] = 0
    lists: Annotated[
        tuple[str, ...],
        Opt("Write images in the order of this list (npy: one; mulisera: one per split).", is_repeated=True),
    ] = ()
    l2: Annotated[bool, Opt("Divide each vector by its L2 norm (scan, mulisera, npy).")] = False
    columns: Annotated[
        Literal["bottom-up", "lxmert"], Opt("Write the 6 columns of bottom-up-attention, or the 10 of LXMERT (tsv).")
    ] = "bottom-up"
    overwrite: Annotated[bool, Opt("Replace existing files in OUTPUT.")] = False

    def _check(self) -> None:
        _check_options(self)
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


def _check_options(job: ImportJob | ExportJob) -> None:
    """Refuse options of other formats."""
    misfit, own = ("these files are", {"captions": ("npy",)}) if isinstance(job, ImportJob) else ("not for", {})
    for item in fields(job):
        formats = own.get(item.name) or _FORMATS.get(item.name, ())
        if job.format and formats and job.format not in formats and getattr(job, item.name) != default_of(item):
            raise UsageError(f"--{item.name.replace('_', '-')} is for {' and '.join(formats)}, {misfit} {job.format}")

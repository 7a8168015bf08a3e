"""``imagepivot export``: features, regions and captions in the layouts that existing code bases read.

One process, no Beam. Files appear under their names when all of them are complete; those that are there are not touched without
``overwrite``. Features are written a batch at a time; of captions the chosen ones are held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipelines.exchange.exporters import (
    Choice,
    Staging,
    export_arrays,
    export_mulisera,
    export_scan,
    export_tsv,
    export_webdataset,
)
from pipelines.exchange.exporters.tsv import COLUMNS
from pipelines.running.progress import Meter
from schemas.dataset import open_dataset
from schemas.errors import UsageError

__all__ = ["FORMATS", "TEXTS", "ExportJob", "export_dataset", "parse_split_names"]

FORMATS = ("scan", "mulisera", "tsv", "webdataset", "npy")
TEXTS = ("text", "tokens")
# Options that only some layouts understand, with their defaults.
_ONLY_FOR: dict[str, tuple[tuple[str, ...], object]] = {
    "captions": (("scan", "webdataset"), ""),
    "language": (("scan", "webdataset"), ""),
    "portion": (("scan", "webdataset"), ""),
    "splits": (("scan", "webdataset"), ()),
    "split_names": (("scan", "mulisera"), ()),
    "text": (("scan",), "text"),
    "captions_per_image": (("scan",), 0),
    "lists": (("mulisera", "npy"), ()),
    "l2": (("scan", "mulisera", "npy"), False),
    "columns": (("tsv",), "bottom-up"),
}


def parse_split_names(text: str) -> tuple[tuple[str, str], ...]:
    """Parses ``val=dev,test_2016_flickr=test``: our name of a split, then the layout's.

    Raises:
        UsageError: it is not of that form, or names a split twice.
    """
    pairs: list[tuple[str, str]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        ours, separator, theirs = (each.strip() for each in part.partition("="))
        if not (ours and separator and theirs) or "/" in theirs or ours in dict(pairs):
            raise UsageError(f"--split-names is {text!r}, expected pairs of our name and the layout's, e.g. 'val=dev'")
        pairs.append((ours, theirs))
    return tuple(pairs)


@dataclass(frozen=True)
class ExportJob:
    """What ``imagepivot export`` does.

    Attributes:
        format: one of ``FORMATS``.
        dataset: folder of a dataset of kind ``features`` or ``regions``.
        output: local folder for the files.
        captions: folder of a captions dataset; scan needs it, webdataset takes it.
        language: only captions of this language.
        portion: only captions of this portion.
        splits: only captions of these splits; all when empty.
        split_names: pairs of a split's name here and in the layout.
        text: scan: ``text`` as read, or ``tokens``.
        captions_per_image: scan: captions taken of each image, from the first; 0 takes all.
        lists: mulisera: lists of images, one a split; npy: one list, for the order of the rows.
        l2: divide each vector by its Euclidean norm.
        columns: tsv: ``bottom-up`` or ``lxmert``.
        overwrite: replace files that are there.
    """

    format: str
    dataset: str
    output: str
    captions: str = ""
    language: str = ""
    portion: str = ""
    splits: tuple[str, ...] = ()
    split_names: tuple[tuple[str, str], ...] = ()
    text: str = "text"
    captions_per_image: int = 0
    lists: tuple[str, ...] = ()
    l2: bool = False
    columns: str = "bottom-up"
    overwrite: bool = False

    def __post_init__(self) -> None:
        for value, option, known in (
            (self.format, "--format", FORMATS),
            (self.text, "--text", TEXTS),
            (self.columns, "--columns", tuple(COLUMNS)),
        ):
            if value not in known:
                raise UsageError(f"{option} is {value!r}, expected one of {', '.join(known)}")
        for option, (formats, default) in _ONLY_FOR.items():
            if self.format not in formats and getattr(self, option) != default:
                raise UsageError(f"--{option.replace('_', '-')} is for {' and '.join(formats)}, not for {self.format}")
        if self.captions_per_image < 0:
            raise UsageError(f"--captions-per-image is {self.captions_per_image}, expected 1 or more, or 0 for all")
        if self.format == "scan" and not self.captions:
            raise UsageError("the layout of SCAN holds captions: give their dataset with --captions")
        if not self.captions and (self.language or self.portion or self.splits):
            raise UsageError("--language, --portion and --splits choose captions: give their dataset with --captions")
        if self.format == "npy" and len(self.lists) > 1:
            raise UsageError(f"npy takes one list for the order of the rows, found {len(self.lists)}")

    def split_name(self, split: str) -> str:
        """Name of a split in the layout."""
        return dict(self.split_names).get(split, split)


def export_dataset(job: ExportJob, meter: Meter = Meter(), *, note: Callable[[str], None] = lambda text: None) -> list[Path]:
    """Writes the files of a layout.

    Args:
        job: what to write.
        meter: counts images for whoever watches.
        note: takes sentences that whoever reads the files should know.

    Returns:
        The files.

    Raises:
        ImagepivotError: the datasets do not fit the layout or each other, or a file cannot be written.
    """
    dataset = open_dataset(job.dataset)
    captions = open_dataset(job.captions, kind="captions") if job.captions else None
    staging = Staging(job.output, overwrite=job.overwrite)
    choice = Choice(language=job.language, portion=job.portion, splits=job.splits)
    if captions is not None and job.format == "scan":
        return export_scan(
            dataset,
            captions,
            staging,
            choice=choice,
            text=job.text,
            per_image=job.captions_per_image,
            rename=job.split_name,
            l2=job.l2,
            note=note,
            meter=meter,
        )
    if job.format == "mulisera":
        return export_mulisera(dataset, staging, lists=job.lists, rename=job.split_name, l2=job.l2, meter=meter)
    if job.format == "tsv":
        return export_tsv(dataset, staging, columns=job.columns, meter=meter)
    if job.format == "webdataset":
        return export_webdataset(dataset, staging, captions=captions, choice=choice, note=note, meter=meter)
    return export_arrays(dataset, staging, image_list=job.lists[0] if job.lists else "", l2=job.l2, meter=meter)

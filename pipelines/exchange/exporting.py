"""``imagepivot export``: datasets in the layouts of other code bases.

One process, no Beam. All files get their names together when complete; existing files stay unless
``overwrite`` is set. Features are written batch by batch; the chosen captions are held in memory.
"""

from collections.abc import Callable
from pathlib import Path

from pipelines.exchange.exporters.arrays import write_mulisera, write_npy
from pipelines.exchange.exporters.base import Staging, target_path
from pipelines.exchange.exporters.scan import write_scan
from pipelines.exchange.exporters.tsv import write_tsv
from pipelines.exchange.exporters.webdataset import write_webdataset
from pipelines.exchange.jobs import ExportJob, format_options
from pipelines.running.meter import Meter
from schemas.dataset import Dataset, open_dataset
from schemas.options import takes_fields
from schemas.storage.folder import Folder
from schemas.writing.made_from import is_current, made_from, read_made_from

_WRITERS: dict[str, Callable[[ExportJob, Dataset, Staging], None]] = {
    "scan": write_scan,
    "mulisera": write_mulisera,
    "tsv": write_tsv,
    "webdataset": write_webdataset,
    "npy": write_npy,
}


@takes_fields(ExportJob)
def export_dataset(
    job: ExportJob, meter: Meter = Meter(), *, on_warning: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """Write a dataset in a layout, unless ``_made_from.json`` is up to date.

    Returns:
        The files.

    Raises:
        ImagepivotError: the datasets do not fit the layout or each other, or a file cannot be written.
    """
    target = target_path(job.output)
    options = format_options(job)
    if "split_names" in options:
        options["split_names"] = tuple(job.split_names.items())
    inputs = {"dataset": (job.dataset,), "captions": (options.pop("captions", ""),), "lists": options.pop("lists", ())}
    description = made_from("export", {"format": job.format, **options}, inputs)
    if not job.overwrite and is_current(Folder(job.output), description):
        on_warning("up to date: nothing was written")
    else:
        staging = Staging(job.output, job.overwrite, description, meter, on_warning)
        _WRITERS[job.format](job, open_dataset(job.dataset), staging)
    return [target / name for name in read_made_from(Folder(job.output))["files"]]

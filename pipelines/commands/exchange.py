"""The commands ``import``, ``export`` and ``diff``: they turn arguments into jobs, and have no logic of their own."""

from __future__ import annotations

import typer
from rich.markup import escape

from pipelines.commands.binding import command
from pipelines.commands.results import LogJson, console, finish, notes, remark
from pipelines.exchange.jobs import ExportJob, ImportJob
from pipelines.jobs import DiffJob
from schemas.console import events


@command("import train.npy val.npy imported --name resnet50-pool --ids train.txt --ids val.txt")
def import_(job: ImportJob, log_json: LogJson = False) -> None:
    """Turn features that other tools made into a dataset.

    SOURCES are [b]npy[/b] arrays with lists of image ids, [b]tsv[/b] files of bottom-up-attention, one [b]hdf5[/b] file, or tar
    files of [b]webdataset[/b] that export wrote.
    Values are kept bit for bit; only float64 becomes float32.

    Everything is checked before anything is written: counts, shapes, values that are not finite, and images that occur twice
    with different values. Identical copies of a row become one.
    """
    from pipelines.exchange.importing import import_features
    from pipelines.running.meter import show_progress

    with show_progress(notes, "import", unit="images", log_json=log_json) as meter:
        manifest = import_features(job, meter)
        meter.settle(images=manifest.rows)
    finish(manifest, job.output)


@command(
    "export features f30k_precomp --format scan --captions captions --language en --portion comparable --split-names val=dev"
)
def export(job: ExportJob, log_json: LogJson = False) -> None:
    """Write features in the layout of another code base.

    [b]scan[/b]: SPLIT_ims.npy, SPLIT_caps.txt and SPLIT_ids.txt, for VSE++, SCAN and their descendants; [b]mulisera[/b]:
    SPLIT-resnet50-avgpool.npy in the order of Multi30K's lists; [b]tsv[/b]: bottom-up-attention; [b]webdataset[/b]: one tar
    per shard; [b]npy[/b]: features.npy and ids.txt.
    """
    from pipelines.exchange.exporting import export_dataset
    from pipelines.running.meter import show_progress

    remarks: list[str] = []
    with show_progress(notes, "export", unit="images", log_json=log_json) as meter:
        paths = export_dataset(job, meter, note=remarks.append)
    for text in remarks:
        remark(text)
    size = sum(path.stat().st_size for path in paths)
    events.record(counts={"files": len(paths), "bytes": size})
    console.print(
        f"[bold]{job.format}[/bold]: {len(paths):,} files, {size:,} bytes in {escape(job.output)}",
        highlight=False,
        soft_wrap=True,
    )


@command("diff features imported --tolerance 0.01")
def diff(job: DiffJob, log_json: LogJson = False) -> None:
    """Show what differs between two datasets, and by how much.

    Rows are matched by key; the number of shards may differ. The exit code is 0 when both hold the same rows, and 1 when a
    key is missing or a value differs by more than the tolerance. Parameters that differ are shown and do not count.
    """
    from pipelines.datasets.comparison import compare_datasets, comparison_tables
    from pipelines.running.meter import show_progress
    from schemas.console.tables import render_tables

    with show_progress(notes, "diff", unit="rows", log_json=log_json) as meter:
        comparison = compare_datasets(job, meter)
    missing, differing = comparison.missing_in_a.count + comparison.missing_in_b.count, comparison.differing.count
    events.record(counts={"rows": comparison.common, "missing": missing, "differing": differing})
    render_tables(console, comparison_tables(comparison))
    if comparison.differs:
        raise typer.Exit(1)
    same = "the same rows" if not job.tolerance else f"the same rows within {job.tolerance:g}"
    console.print(f"{escape(job.a)} and {escape(job.b)} hold {same}", highlight=False, soft_wrap=True)

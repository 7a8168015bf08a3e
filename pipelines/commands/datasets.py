"""The commands ``inspect``, ``validate``, ``view``, ``import``, ``export`` and ``diff``."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer
from rich.markup import escape

from pipelines.commands.binding import command
from pipelines.commands.results import AsJson, LogJson, console, finish, notes, print_line, remark
from pipelines.exchange.jobs import ExportJob, ImportJob
from pipelines.jobs import DiffJob, ViewJob
from pipelines.running.meter import show_progress
from schemas.console import events
from schemas.console.tables import render_tables
from schemas.errors import DatasetError
from schemas.escapes import to_json
from schemas.options import Opt

Dataset: TypeAlias = Annotated[str, Opt("Folder of a dataset.")]


@command("inspect features --rows 3")
def inspect(
    dataset: Dataset,
    rows: Annotated[int, Opt("Sample rows to show.", least=0)] = 5,
    failures: Annotated[bool, Opt("List all inputs that failed; with --json one per line.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a dataset: parameters, statistics, failures and sample rows."""
    from pipelines.datasets.inspection import describe, describe_json, failures_table
    from schemas.dataset import open_dataset

    opened = open_dataset(dataset)
    if failures and as_json:
        for row in opened.failures().to_pylist():
            typer.echo(to_json(row))
    elif failures and opened.manifest.failed:
        failures_table(opened).render(console)
    elif failures:
        print_line(f"{escape(dataset)}: nothing failed")
    elif as_json:
        typer.echo(to_json(describe_json(opened, rows=rows), indent=2))
    else:
        render_tables(console, describe(opened, rows=rows))


@command("validate features")
def validate(
    dataset: Dataset,
    mend: Annotated[
        bool,
        Opt(
            "First write anew what the rest determines, and delete what the command that made it must make again.",
            name="repair",
        ),
    ] = False,
    strict: Annotated[bool, Opt("Take files of other tools in the folder for breaches, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every promise of the format on the stored bytes.

    With --repair, damaged shards are deleted, and the same command as before makes them again, and only them.
    """
    from schemas.dataset import open_dataset
    from schemas.overlaps import find_overlap
    from schemas.writing.validation import STRAY
    from schemas.writing.validation import validate as problems_of

    if mend:
        _repair(dataset)
    remarks: list[str] = []
    problems = problems_of(dataset, strict=strict, remark=remarks.append)
    opened = open_dataset(dataset)
    if not problems and opened.kind in ("captions", "encoded") and (overlap := find_overlap(opened)) is not None:
        remarks.append(overlap.remark)
    if as_json:
        found = {"dataset": dataset, "holds": not problems, "problems": problems, "remarks": remarks}
        typer.echo(to_json(found, indent=2))
        raise typer.Exit(1 if problems else 0)
    for text in remarks:
        remark(text)
    for problem in problems:
        notes.print(f"[red]{escape(problem)}[/red]", highlight=False, soft_wrap=True)
    if problems:
        damaged = sum(not problem.endswith(STRAY) for problem in problems)
        advice = "copy it again, mend it with --repair, or make it again with --overwrite"
        advice = advice if damaged else "delete these files, or move them elsewhere"
        count = "the problem" if len(problems) == 1 else f"the {len(problems)} problems"
        raise DatasetError(f"{dataset!r} is not a valid dataset, see {count} above: {advice}")
    print_line(f"{escape(dataset)}: everything holds")


def _repair(dataset: str) -> None:
    from schemas.writing.output import left_alone
    from schemas.writing.repair import repair

    done = repair(dataset)
    for verb, names in (("written anew", done.mended), ("deleted", done.deleted)):
        for name in names:
            remark(f"{verb}: {name}")
    if done.left_alone:
        remark(left_alone(dataset, done.left_alone))
    if done.missing:
        raise DatasetError(
            f"{dataset!r} lacks {len(done.missing)} files now, e.g. {done.missing[0]!r}: run the command that made it again "
            "(without --overwrite): it keeps what is whole and makes only these"
        )


@command("view regions photos --image 1000092795 -o 1000092795.png")
def view(job: ViewJob) -> None:
    """Draw over a picture what its features were made of.

    Regions are drawn as boxes with the names, or the ids, of their class and attribute and the score; for other extractors the
    crops that the model saw: ten for VGG19, else the centre.
    """
    from pipelines.datasets.view import draw_view

    description = draw_view(job)
    print_line(f"{escape(job.output)}: {escape(description)}")


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

    remarks: list[str] = []
    with show_progress(notes, "export", unit="images", log_json=log_json) as meter:
        paths = export_dataset(job, meter, note=remarks.append)
    for text in remarks:
        remark(text)
    size = sum(path.stat().st_size for path in paths)
    events.record(counts={"files": len(paths), "bytes": size})
    print_line(f"[bold]{job.format}[/bold]: {len(paths):,} files, {size:,} bytes in {escape(job.output)}")


@command("diff features imported --tolerance 0.01")
def diff(job: DiffJob, log_json: LogJson = False) -> None:
    """Show what differs between two datasets, and by how much.

    Rows are matched by key; the number of shards may differ. The exit code is 0 when both hold the same rows, and 1 when a
    key is missing or a value differs by more than the tolerance. Parameters that differ are shown and do not count.
    """
    from pipelines.datasets.comparison import compare_datasets, comparison_tables

    with show_progress(notes, "diff", unit="rows", log_json=log_json) as meter:
        comparison = compare_datasets(job, meter)
    missing, differing = comparison.missing_in_a.count + comparison.missing_in_b.count, comparison.differing.count
    events.record(counts={"rows": comparison.common, "missing": missing, "differing": differing})
    render_tables(console, comparison_tables(comparison))
    if comparison.differs:
        raise typer.Exit(1)
    same = "the same rows" if not job.tolerance else f"the same rows within {job.tolerance:g}"
    print_line(f"{escape(job.a)} and {escape(job.b)} hold {same}")

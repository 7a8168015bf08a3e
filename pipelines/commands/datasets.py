"""Commands that inspect, validate, draw, convert and compare datasets."""

from typing import Annotated, TypeAlias

import typer
from rich.markup import escape

from pipelines.commands.binding import command
from pipelines.commands.results import AsJson, console, finish_dataset, notes, print_line, print_remark
from pipelines.exchange.jobs import ExportJob, ImportJob
from pipelines.jobs import DiffJob, DuplicatesJob, ViewJob
from pipelines.running.meter import dataset_counts, show_progress
from schemas.console import events
from schemas.console.progress import Monitoring
from schemas.console.tables import render_tables
from schemas.errors import DatasetError
from schemas.escapes import redact, to_json
from schemas.options import Opt

DatasetFolder: TypeAlias = Annotated[str, Opt("Folder of a dataset.")]


@command("inspect features --rows 3")
def inspect(
    dataset: DatasetFolder,
    rows: Annotated[int, Opt("Show this many sample rows.", min_=0)] = 5,
    failures: Annotated[bool, Opt("List all failed inputs; with --json one per line.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a dataset: parameters, statistics, failures and sample rows."""
    from pipelines.datasets.inspection import describe_dataset, describe_json, failures_table
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
        render_tables(console, describe_dataset(opened, rows=rows))


@command("validate features")
def validate(
    dataset: DatasetFolder,
    mend: Annotated[
        bool,
        Opt(
            "Repair first: rebuild derived files, and delete damaged shards so that rerunning the command rewrites them.",
            name="repair",
        ),
    ] = False,
    strict: Annotated[bool, Opt("Report files of other tools in the folder as problems, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Validate a dataset: check its stored bytes against the format.

    --repair deletes damaged shards; rerunning the command that wrote the dataset writes only these again.
    """
    from schemas.dataset import open_dataset
    from schemas.overlaps import leakage_remark
    from schemas.writing.validation import validate as problems_of

    if mend:
        _repair(dataset)
    remarks: list[str] = []
    problems = problems_of(dataset, strict=strict, on_warning=remarks.append)
    opened = open_dataset(dataset)
    if not problems and opened.kind in ("captions", "encoded") and (remark := leakage_remark(opened)):
        remarks.append(remark)
    if as_json:
        texts = {"problems": list(map(redact, problems)), "remarks": list(map(redact, remarks))}
        typer.echo(to_json({"dataset": redact(dataset), "valid": not problems, **texts}, indent=2))
        raise typer.Exit(1 if problems else 0)
    for text in remarks:
        print_remark(text)
    for problem in problems:
        notes.print(f"[red]{escape(problem)}[/red]", highlight=False, soft_wrap=True)
    if problems:
        count = "the problem" if len(problems) == 1 else f"the {len(problems)} problems"
        raise DatasetError(
            f"{dataset!r} is not a valid dataset, see {count} above. Copy damaged files again, mend the "
            "dataset with --repair, or make it again with --overwrite"
        )
    print_line(f"{escape(dataset)} is valid")


def _repair(dataset: str) -> None:
    from schemas.writing.file_names import left_alone
    from schemas.writing.repair import repair

    done = repair(dataset)
    for verb, names in (("written anew", done.mended), ("deleted", done.deleted)):
        for name in names:
            print_remark(f"{verb}: {name}")
    if done.left_alone:
        print_remark(left_alone(dataset, done.left_alone))
    if done.missing:
        raise DatasetError(
            f"{dataset!r} lacks {len(done.missing)} files now, e.g. {done.missing[0]!r}: run the command "
            "that made it again (without --overwrite): it keeps what is whole and makes only these"
        )


@command("view regions photos --image 1000092795 -o 1000092795.png")
def view(job: ViewJob) -> None:
    """Draw the regions or crops of an image's features.

    Regions are boxes with score and the names (or ids) of class and attribute. Other extractors have crops:
    ten for VGG19, else the centre.
    """
    from pipelines.datasets.view import draw_view

    description = draw_view(job)
    print_line(f"{escape(job.output)}: {escape(description)}")


@command("import train.npy val.npy imported --name resnet50-pool --ids train.txt --ids val.txt")
def import_(job: ImportJob, monitoring: Monitoring = Monitoring()) -> None:
    """Import features of other tools as a dataset.

    SOURCES are [b]npy[/b] arrays with lists of image ids, [b]tsv[/b] files of bottom-up-attention, one [b]hdf5[/b] file, or
    [b]webdataset[/b] tar files of imagepivot export. Values are kept bit for bit, except that float64 becomes float32.

    Counts, shapes, NaN, infinity and contradicting duplicates are checked before anything is written. Identical rows are merged.
    """
    from pipelines.exchange.importing import import_features

    with show_progress(notes, "import", unit="images", monitoring=monitoring) as meter:
        manifest = import_features(job, meter)
        meter.finalize(images=manifest.rows, **dataset_counts(manifest))
    finish_dataset(manifest, job.output)


@command(
    "export features f30k_precomp --format scan --captions captions --language en --portion comparable --split-names val=dev"
)
def export(job: ExportJob, monitoring: Monitoring = Monitoring()) -> None:
    """Export features in the format of another code base.

    [b]scan[/b]: SPLIT_ims.npy, SPLIT_caps.txt and SPLIT_ids.txt, for VSE++, SCAN and their descendants;
    [b]mulisera[/b]: SPLIT-resnet50-avgpool.npy in the order of Multi30K's lists; [b]tsv[/b]:
    bottom-up-attention; [b]webdataset[/b]: one tar per shard; [b]npy[/b]: features.npy and ids.txt.
    """
    from pipelines.exchange.exporting import export_dataset

    with show_progress(notes, "export", unit="images", monitoring=monitoring) as meter:
        paths = export_dataset(job, meter, on_warning=print_remark)
    size = sum(path.stat().st_size for path in paths)
    events.record(counts={"files": len(paths), "bytes": size})
    print_line(f"[bold]{job.format}[/bold]: {len(paths):,} files, {size:,} bytes in {escape(job.output)}")


@command("publish features gs://bucket/features")
def publish(
    dataset: DatasetFolder,
    target: Annotated[str, Opt("Folder that readers use: empty, or an earlier copy.")],
    monitoring: Monitoring = Monitoring(),
) -> None:
    """Bring a copy of a dataset up to date for its readers.

    Only files that differ are copied, on the side of the store where both folders are in one, and the manifest last. An update of
    DATASET removes its manifest until the end; readers of TARGET notice it only while changed files are copied.
    """
    from pipelines.datasets.publishing import publish as publish_dataset

    with show_progress(notes, "publish", unit="files", monitoring=monitoring) as meter:
        done = publish_dataset(dataset, target, meter)
    events.record(counts=vars(done))
    print_line(
        f"{escape(target)}: {done.copied:,} files copied ({done.bytes / 1e6:,.1f} MB), {done.kept:,} kept, {done.deleted:,} deleted"
    )


@command("diff features imported --tolerance 0.01")
def diff(job: DiffJob, monitoring: Monitoring = Monitoring()) -> None:
    """Compare the rows of two datasets.

    Rows are matched by key, independently of shards. The exit code is 0 for equal rows, and 1 if a key is
    missing or a value differs by more than the tolerance. Differing parameters are shown but do not count.
    """
    from pipelines.datasets.comparison import compare_datasets, comparison_tables

    with show_progress(notes, "diff", unit="rows", monitoring=monitoring) as meter:
        comparison = compare_datasets(job, meter)
    missing, differing = comparison.missing_in_a.count + comparison.missing_in_b.count, comparison.differing.count
    events.record(counts={"rows": comparison.common, "missing": missing, "differing": differing})
    render_tables(console, comparison_tables(comparison))
    if comparison.differs:
        raise typer.Exit(1)
    same = "the same rows" if not job.tolerance else f"the same rows within {job.tolerance:g}"
    print_line(f"{escape(job.a)} and {escape(job.b)} hold {same}")


@command("duplicates features captions --images photos --output duplicates.csv")
def duplicates(
    job: DuplicatesJob,
    output: Annotated[str, Opt("Write all groups to a CSV file; ids with a first = + - @ are formulas in spreadsheets.")] = "",
    as_json: AsJson = False,
    monitoring: Monitoring = Monitoring(),
) -> None:
    """Find equal and nearly equal images and captions, across and within splits.

    Images match by the [b]bytes[/b] of their files, their [b]pixels[/b], a perceptual [b]hash[/b] or the [b]cosine[/b] of their
    features; captions by their [b]text[/b] or its [b]words[/b], in any case and punctuation. Pixels and hashes need --images.

    imagepivot train and imagepivot evaluate leave out the leaks in the file of --output.
    """
    from pipelines.datasets.duplicates import count_table, find_duplicates
    from schemas.duplicates import duplicates_csv
    from schemas.storage.folder import file_at

    target = file_at(output) if output else None
    with show_progress(notes, "duplicates", unit="images", monitoring=monitoring) as meter:
        members = find_duplicates(job, meter, print_remark)
    table, groups = count_table(members), len({member.group for member in members})
    events.record(counts={"groups": groups, "members": len(members)})
    if as_json:
        typer.echo(table.to_json())
    else:
        render_tables(console, [table])
        items = "images and captions" if job.captions else "images"
        print_line(f"[bold]duplicates[/bold]: {groups:,} groups of {len(members):,} {items}")
    if target is not None:
        folder, name = target
        folder.put(name, duplicates_csv(members).encode())
        print_remark(f"written: {output}", style="")

"""The commands ``import``, ``export`` and ``diff``: they turn arguments into jobs, and have no logic of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from pipelines.commands.binding import bound
from pipelines.commands.options import LogJson, console, notes, remark
from pipelines.commands.results import finish
from pipelines.jobs import Output, Shards
from schemas.console import events
from schemas.keys import AUTO
from schemas.options import Opt
from schemas.writing.reuse_policy import Overwrite, Verify

__all__ = ["app"]

app = typer.Typer()


@app.command(
    "import",
    epilog="Example: imagepivot import train.npy val.npy imported --name resnet50-pool --ids train.txt --ids val.txt",
)
@bound
def import_(
    sources: Annotated[tuple[str, ...], Opt("Files with features; several become one dataset.")],
    output: Output,
    name: Annotated[str, Opt("Name of the feature, e.g. resnet50-pool.", is_option=True)],
    format: Annotated[  # noqa: A002
        Literal["npy", "tsv", "hdf5", "webdataset"] | None, Opt("Format of the files; by their extension when not given.")
    ] = None,
    source: Annotated[str, Opt("Origin of the feature, in words.")] = "",
    ids: Annotated[
        tuple[str, ...],
        Opt("npy, hdf5: list of image ids for each file, in order; for npy else the one beside it.", is_repeated=True),
    ] = (),
    boxes: Annotated[
        tuple[str, ...], Opt("npy: boxes [N, R, 4] for each file; makes the rows regions.", is_repeated=True)
    ] = (),
    sizes: Annotated[tuple[str, ...], Opt("npy: width and height of the images [N, 2] for each file.", is_repeated=True)] = (),
    id_rule: Annotated[
        Literal["name", "path", "exact"] | None,
        Opt(
            "Image id of an entry: the file [i]name[/i] or whole [i]path[/i] without extension, or [i]exact[/i]ly the entry; "
            "name when not given, path for HDF5 groups, exact for webdataset, or as exported.",
        ),
    ] = None,
    repeats: Annotated[int, Opt("npy, hdf5: how many times in a row each image occurs; VSE++: 5.")] = 1,
    max_regions: Annotated[
        int | None, Opt("npy, tsv: greatest number of regions stored per image; 36, or as exported.")
    ] = None,
    array: Annotated[str, Opt("hdf5: path of the array, or of a group with one array per image.")] = "",
    id_array: Annotated[str, Opt("hdf5: path of the image ids of the array.")] = "",
    karpathy: Annotated[str, Opt("The dataset_*.json whose numbers the ids are; they become the names of its images.")] = "",
    karpathy_key: Annotated[Literal["imgid", "cocoid", "sentid"], Opt("What those numbers count there.")] = "imgid",
    shards: Shards = AUTO,
    overwrite: Overwrite = False,
    verify: Verify = False,
    log_json: LogJson = False,
) -> None:
    """Turn features that other tools made into a dataset.

    SOURCES are [b]npy[/b] arrays with lists of image ids, [b]tsv[/b] files of bottom-up-attention, one [b]hdf5[/b] file, or tar
    files of [b]webdataset[/b] that export wrote.
    Values are kept bit for bit; only float64 becomes float32.

    Everything is checked before anything is written: counts, shapes, values that are not finite, and images that occur twice
    with different values. Identical copies of a row become one.
    """
    from pipelines.exchange.importers import LAYOUTS
    from pipelines.exchange.importing import ImportJob, format_of, import_features
    from pipelines.running.meter import show_progress

    options = {
        "ids": ids,
        "boxes": boxes,
        "sizes": sizes,
        "repeats": repeats,
        "max_regions": max_regions,
        "array": array,
        "id_array": id_array,
        "karpathy": karpathy,
        "karpathy_key": karpathy_key,
    }
    chosen = format or format_of(sources[0])
    files = _layout(LAYOUTS, chosen, options, misfit=f"these files are {chosen}", sources=sources, id_rule=id_rule)
    job = ImportJob(files=files, output=output, name=name, source=source, shards=shards, overwrite=overwrite, verify=verify)
    with show_progress(notes, "import", unit="images", log_json=log_json) as meter:
        manifest = import_features(job, meter)
        meter.settle(images=manifest.rows)
    finish(manifest, output)


@app.command(
    epilog="Example: imagepivot export features f30k_precomp --format scan --captions captions --language en "
    "--portion comparable --split-names val=dev"
)
@bound
def export(
    dataset: Annotated[str, Opt("Folder of features or regions.")],
    output: Annotated[str, Opt("Local folder for the files.")],
    format: Annotated[  # noqa: A002
        Literal["scan", "mulisera", "tsv", "webdataset", "npy"], Opt("Layout of the files.", is_option=True)
    ],
    captions: Annotated[str, Opt("scan, webdataset: folder of a captions dataset.")] = "",
    language: Annotated[str, Opt("Only captions of this language.")] = "",
    portion: Annotated[str, Opt("Only captions of this portion.")] = "",
    splits: Annotated[tuple[str, ...], Opt("Only captions of these splits; all when not given.")] = (),
    split_names: Annotated[
        Mapping[str, str], Opt("scan, mulisera: names of splits in the layout, e.g. [i]val=dev[/i].", metavar="OURS=THEIRS")
    ] = MappingProxyType({}),
    text: Annotated[Literal["text", "tokens"], Opt("scan: captions as read, or their tokens joined by a space.")] = "text",
    captions_per_image: Annotated[int, Opt("scan: captions taken of each image, from the first; 0: all.")] = 0,
    lists: Annotated[
        tuple[str, ...],
        Opt("mulisera: list of images of each split; npy: one, for the order.", is_repeated=True),
    ] = (),
    l2: Annotated[bool, Opt("scan, mulisera, npy: divide each vector by its norm.")] = False,
    columns: Annotated[
        Literal["bottom-up", "lxmert"], Opt("tsv: 6 columns of bottom-up-attention, or 10 that LXMERT reads.")
    ] = "bottom-up",
    overwrite: Annotated[bool, Opt("Replace existing files in OUTPUT.")] = False,
    log_json: LogJson = False,
) -> None:
    """Write features in the layout of another code base.

    [b]scan[/b]: SPLIT_ims.npy, SPLIT_caps.txt and SPLIT_ids.txt, for VSE++, SCAN and their descendants; [b]mulisera[/b]:
    SPLIT-resnet50-avgpool.npy in the order of Multi30K's lists; [b]tsv[/b]: bottom-up-attention; [b]webdataset[/b]: one tar
    per shard; [b]npy[/b]: features.npy and ids.txt.
    """
    from pipelines.exchange.exporters import LAYOUTS
    from pipelines.exchange.exporting import ExportJob, export_dataset
    from pipelines.running.meter import show_progress

    options = {
        "captions": captions,
        "language": language,
        "portion": portion,
        "splits": splits,
        "split_names": tuple(split_names.items()),
        "text": text,
        "captions_per_image": captions_per_image,
        "lists": lists,
        "l2": l2,
        "columns": columns,
    }
    layout = _layout(LAYOUTS, format, options, misfit=f"not for {format}")
    job = ExportJob(layout=layout, dataset=dataset, output=output, overwrite=overwrite)
    remarks: list[str] = []
    with show_progress(notes, "export", unit="images", log_json=log_json) as meter:
        paths = export_dataset(job, meter, note=remarks.append)
    for text_of_remark in remarks:
        remark(text_of_remark)
    size = sum(path.stat().st_size for path in paths)
    events.record(counts={"files": len(paths), "bytes": size})
    console.print(
        f"[bold]{format}[/bold]: {len(paths):,} files, {size:,} bytes in {escape(output)}", highlight=False, soft_wrap=True
    )


@app.command(epilog="Example: imagepivot diff features imported --tolerance 0.01")
@bound
def diff(
    a: Annotated[str, Opt("Folder of a dataset.")],
    b: Annotated[str, Opt("Folder of another dataset of the same kind.")],
    tolerance: Annotated[float, Opt("Largest difference of two real numbers that counts as equal.", least=0)] = 0.0,
    log_json: LogJson = False,
) -> None:
    """Show what differs between two datasets, and by how much.

    Rows are matched by key; the number of shards may differ. The exit code is 0 when both hold the same rows, and 1 when a
    key is missing or a value differs by more than the tolerance. Parameters that differ are shown and do not count.
    """
    from pipelines.datasets.comparison import DiffJob, compare_datasets, comparison_tables
    from pipelines.running.meter import show_progress
    from schemas.console.tables import render_tables

    with show_progress(notes, "diff", unit="rows", log_json=log_json) as meter:
        comparison = compare_datasets(DiffJob(a=a, b=b, tolerance=tolerance), meter)
    missing, differing = comparison.missing_in_a.count + comparison.missing_in_b.count, comparison.differing.count
    events.record(counts={"rows": comparison.common, "missing": missing, "differing": differing})
    render_tables(console, comparison_tables(comparison))
    if comparison.differs:
        raise typer.Exit(1)
    same = "the same rows" if not tolerance else f"the same rows within {tolerance:g}"
    console.print(f"{escape(a)} and {escape(b)} hold {same}", highlight=False, soft_wrap=True)


def _layout(
    layouts: Mapping[str, type[Any]],
    name: str,
    options: Mapping[str, Any],
    *,
    misfit: str,
    **common: Any,
) -> Any:
    """Make the layout of a format from the options that it has.

    Args:
        layouts: the dataclasses by format; an option belongs to those that have a field of its name.
        name: the chosen format.
        options: values of the options.
        misfit: end of the message about an option that the format does not have.
        common: values of fields that all layouts have.

    Raises:
        UsageError: an option differs from its default, and the format does not have it.
    """
    from schemas.errors import UsageError

    taken = {}
    for option, value in options.items():
        defaults = {key: field.default for key, layout in layouts.items() for field in fields(layout) if field.name == option}
        if name in defaults:
            taken[option] = value
        elif value not in defaults.values():
            raise UsageError(f"--{option.replace('_', '-')} is for {' and '.join(defaults)}, {misfit}")
    return layouts[name](**common, **taken)

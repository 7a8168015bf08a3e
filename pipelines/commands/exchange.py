"""The commands ``import``, ``export`` and ``diff``: they turn arguments into jobs, and have no logic of their own."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.commands.options import Output, Overwrite, Shards, several
from schemas.keys import DEFAULT_SHARDS

if TYPE_CHECKING:
    from schemas.manifest import Manifest

__all__ = ["register"]


class ImportFormat(str, Enum):
    """Layout of the files that are imported."""

    npy = "npy"
    tsv = "tsv"
    hdf5 = "hdf5"


class ExportFormat(str, Enum):
    """Layout of the files that are exported."""

    scan = "scan"
    mulisera = "mulisera"
    tsv = "tsv"
    webdataset = "webdataset"
    npy = "npy"


class ListRule(str, Enum):
    """How an image id is made of an entry of a list."""

    name = "name"
    path = "path"
    exact = "exact"


class CaptionText(str, Enum):
    """What is written of a caption."""

    text = "text"
    tokens = "tokens"


class TsvColumns(str, Enum):
    """Columns of a tsv with regions."""

    bottom_up = "bottom-up"
    lxmert = "lxmert"


Files = Annotated[list[str], typer.Argument(help="Files with features; several become one dataset.", show_default=False)]
Paths = list[str]


def register(app: typer.Typer, *, console: Console, notes: Console, finish: Callable[[Manifest, str], None]) -> None:
    """Adds the commands to the application.

    Args:
        app: the application.
        console: for results.
        notes: for progress and remarks.
        finish: says what was made, given a manifest and its folder.
    """

    @app.command(
        "import",
        epilog="Example: imagepivot import train.npy val.npy features --name resnet50-pool --ids train.txt --ids val.txt",
    )
    def import_(
        sources: Files,
        output: Output,
        name: Annotated[str, typer.Option("--name", help="Name of the feature, e.g. resnet50-pool.", show_default=False)],
        format: Annotated[  # noqa: A002
            ImportFormat | None, typer.Option("--format", help="Layout of the files; by their extension when not given.")
        ] = None,
        source: Annotated[str, typer.Option("--source", help="Where the feature comes from, in words.")] = "",
        ids: Annotated[
            Paths | None, typer.Option("--ids", help="List of image ids, one for each file, in order; else the one beside it.")
        ] = None,
        boxes: Annotated[
            Paths | None, typer.Option("--boxes", help="npy: boxes [N, R, 4] for each file; makes the rows regions.")
        ] = None,
        sizes: Annotated[
            Paths | None, typer.Option("--sizes", help="npy: width and height of the images [N, 2] for each file.")
        ] = None,
        id_rule: Annotated[
            ListRule,
            typer.Option(
                "--id-rule",
                help="Image id of an entry of a list: the file [i]name[/i] or whole [i]path[/i] without extension, or [i]exact[/i]"
                "ly the entry.",
            ),
        ] = ListRule.name,
        repeats: Annotated[int, typer.Option("--repeats", help="How often each image stands in a row; VSE++: 5.")] = 1,
        max_regions: Annotated[int, typer.Option("--max-regions", help="Most regions of an image that are stored.")] = 36,
        array: Annotated[
            str, typer.Option("--array", help="hdf5: path of the array, or of a group with one array an image.")
        ] = "",
        id_array: Annotated[str, typer.Option("--id-array", help="hdf5: path of the image ids of the array.")] = "",
        shards: Shards = DEFAULT_SHARDS,
        overwrite: Overwrite = False,
    ) -> None:
        """Turn features that other tools made into a dataset.

        SOURCES are [b]npy[/b] arrays with lists of image ids, [b]tsv[/b] files of bottom-up-attention, or one [b]hdf5[/b] file.
        Values are kept bit for bit; only float64 becomes float32.

        Everything is checked before anything is written: counts, shapes, values that are not finite, and images that stand there
        twice with different values. Identical copies of a row become one.
        """
        from pipelines.exchange.importing import ImportJob, import_features
        from pipelines.running.progress import show_progress

        job = ImportJob(
            sources=tuple(sources),
            output=output,
            name=name,
            format=format.value if format is not None else "",
            source=source,
            ids=tuple(ids or ()),
            boxes=tuple(boxes or ()),
            sizes=tuple(sizes or ()),
            id_rule=id_rule.value,
            repeats=repeats,
            max_regions=max_regions,
            array=array,
            id_array=id_array,
            shards=shards,
            overwrite=overwrite,
        )
        with show_progress(notes, "import", unit="images") as meter:
            manifest = import_features(job, meter)
        finish(manifest, output)

    @app.command(
        epilog="Example: imagepivot export features f30k_precomp --format scan --captions captions --language en "
        "--portion comparable --split-names val=dev"
    )
    def export(
        dataset: Annotated[str, typer.Argument(help="Folder of features or regions.", show_default=False)],
        output: Annotated[str, typer.Argument(help="Local folder for the files.", show_default=False)],
        format: Annotated[ExportFormat, typer.Option("--format", help="Layout of the files.", show_default=False)],  # noqa: A002
        captions: Annotated[str, typer.Option("--captions", help="scan, webdataset: folder of a captions dataset.")] = "",
        language: Annotated[str, typer.Option("--language", help="Only captions of this language.")] = "",
        portion: Annotated[str, typer.Option("--portion", help="Only captions of this portion.")] = "",
        splits: Annotated[str, typer.Option("--splits", help="Only captions of these splits; all when not given.")] = "",
        split_names: Annotated[
            str, typer.Option("--split-names", help="scan, mulisera: names of splits in the layout, e.g. [i]val=dev[/i].")
        ] = "",
        text: Annotated[
            CaptionText, typer.Option("--text", help="scan: captions as read, or their tokens joined by a space.")
        ] = CaptionText.text,
        captions_per_image: Annotated[
            int, typer.Option("--captions-per-image", help="scan: captions taken of each image, from the first; 0: all.")
        ] = 0,
        lists: Annotated[
            Paths | None, typer.Option("--lists", help="mulisera: list of images of each split; npy: one, for the order.")
        ] = None,
        l2: Annotated[bool, typer.Option("--l2", help="scan, mulisera, npy: divide each vector by its norm.")] = False,
        columns: Annotated[
            TsvColumns, typer.Option("--columns", help="tsv: 6 columns of bottom-up-attention, or 10 that LXMERT reads.")
        ] = TsvColumns.bottom_up,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that lie in OUTPUT.")] = False,
    ) -> None:
        """Write features in the layout of another code base.

        [b]scan[/b]: SPLIT_ims.npy, SPLIT_caps.txt and SPLIT_ids.txt, for VSE++, SCAN and their descendants; [b]mulisera[/b]:
        SPLIT-resnet50-avgpool.npy in the order of Multi30K's lists; [b]tsv[/b]: bottom-up-attention; [b]webdataset[/b]: a tar for
        each shard; [b]npy[/b]: features.npy and ids.txt.
        """
        from pipelines.exchange.exporting import ExportJob, export_dataset, parse_split_names
        from pipelines.running.progress import show_progress

        job = ExportJob(
            format=format.value,
            dataset=dataset,
            output=output,
            captions=captions,
            language=language,
            portion=portion,
            splits=several(splits),
            split_names=parse_split_names(split_names),
            text=text.value,
            captions_per_image=captions_per_image,
            lists=tuple(lists or ()),
            l2=l2,
            columns=columns.value,
            overwrite=overwrite,
        )
        remarks: list[str] = []
        with show_progress(notes, "export", unit="images") as meter:
            paths = export_dataset(job, meter, note=remarks.append)
        for remark in remarks:
            notes.print(f"[yellow]{escape(remark)}[/yellow]", highlight=False, soft_wrap=True)
        size = sum(path.stat().st_size for path in paths)
        console.print(
            f"[bold]{format.value}[/bold]: {len(paths):,} files, {size:,} bytes in {escape(output)}",
            highlight=False,
            soft_wrap=True,
        )

    @app.command(epilog="Example: imagepivot diff features-fp32 features-bf16 --tolerance 0.01")
    def diff(
        a: Annotated[str, typer.Argument(help="Folder of a dataset.", show_default=False)],
        b: Annotated[str, typer.Argument(help="Folder of another dataset of the same kind.", show_default=False)],
        tolerance: Annotated[
            float, typer.Option("--tolerance", min=0.0, help="Largest difference of two real numbers that counts as equal.")
        ] = 0.0,
    ) -> None:
        """Say what differs between two datasets, and by how much.

        Rows are matched by key; the number of shards may differ. The exit code is 0 when both hold the same rows, and 1 when a
        key is missing or a value differs by more than the tolerance. Parameters that differ are shown and do not count.
        """
        from pipelines.datasets.comparison import compare
        from pipelines.datasets.comparison_tables import comparison_table
        from pipelines.running.progress import show_progress
        from schemas.dataset import open_dataset

        with show_progress(notes, "diff", unit="rows") as meter:
            comparison = compare(open_dataset(a), open_dataset(b), meter)
        console.print(comparison_table(comparison))
        if comparison.differs(tolerance):
            raise typer.Exit(1)
        same = "the same rows" if not tolerance else f"the same rows within {tolerance:g}"
        console.print(f"{escape(a)} and {escape(b)} hold {same}", highlight=False, soft_wrap=True)

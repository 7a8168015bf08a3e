"""The command ``figures``: turns arguments into the figures of a run."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer
from rich.markup import escape

from schemas.console import events
from schemas.escapes import escape_text
from train.commands.options import (
    AllowMissingFeatures,
    Captions,
    Device,
    Features,
    LogJson,
    MemoryMap,
    TokenFeatures,
    console,
    notes,
    remark,
    several,
)

__all__ = ["PICTURES", "app"]

PICTURES = "imagepivot.pictures"
"""Where in `typer.Context.meta` the mounting application puts a function of type `ReadPictures`, which also takes the options
``ids``, ``columns``, ``delimiter``, ``quoting`` and ``allow_private_addresses`` as keyword arguments."""

app = typer.Typer()


def _figures(incomplete: str) -> list[str]:
    return [name for name in ("retrieval", "map", "attention") if name.startswith(incomplete)]


@app.command(epilog="Example: imagepivot figures runs/mha-d figures --captions encoded --features regions --images photos")
def figures(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    output: Annotated[str, typer.Argument(help="Folder for the figures.", show_default=False)],
    captions: Captions,
    features: Features,
    token_features: TokenFeatures = "",
    images: Annotated[
        str, typer.Option("--images", help="Location of the images, as for features; ids stand for them if not given.")
    ] = "",
    ids: Annotated[
        Literal["name", "path"],
        typer.Option("--id-rule", help="Image id: the file's [i]name[/i] or its whole [i]path[/i], as for features."),
    ] = "name",
    columns: Annotated[
        str, typer.Option("--columns", help="Columns of a table of images: OURS=THEIRS, e.g. [i]image_id=file[/i].")
    ] = "",
    delimiter: Annotated[
        str, typer.Option("--delimiter", help="Character between the values of CSV or TSV, e.g. [i];[/i]; found if not given.")
    ] = "",
    quoting: Annotated[
        Literal["auto", "rfc4180", "none"],
        typer.Option("--quoting", help="Quotes of a CSV or TSV table of images, as for features."),
    ] = "auto",
    allow_private_addresses: Annotated[
        bool, typer.Option("--allow-private-addresses", help="A table's http addresses may lead to private and local networks.")
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            "--only",
            help="Some of [i]retrieval[/i], [i]map[/i] and [i]attention[/i]; all that the model has if not given.",
            autocompletion=_figures,
        ),
    ] = "",
    split: Annotated[
        str, typer.Option("--split", help="Split of captions and images; the test images of 2016 if not given.")
    ] = "",
    languages: Annotated[str, typer.Option("--languages", help="Only these; all that the run knows if not given.")] = "",
    portion: Annotated[
        str, typer.Option("--portion", help="[i]comparable[/i] or [i]translation[/i]; the first that all have if not given.")
    ] = "",
    examples: Annotated[int, typer.Option("--examples", help="Number of images to draw as examples.")] = 4,
    caption_ids: Annotated[
        str, typer.Option("--caption-ids", help="Instead: these captions, each as [i]image/language/portion/index[/i].")
    ] = "",
    top: Annotated[int, typer.Option("--top", help="Number of images to show for each caption.")] = 5,
    points: Annotated[int, typer.Option("--points", help="Number of images in the map.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draws and of the map.")] = 0,
    device: Device = "auto",
    memory_map: MemoryMap = "",
    allow_missing_features: AllowMissingFeatures = False,
    log_json: LogJson = False,
) -> None:
    """Draw figures of a run: what captions find, where images and captions lie, and what the model attends to.

    OUTPUT/retrieval.png shows the best images for captions in each language, with the right one framed and its rank; map.png is a
    t-SNE of images and their captions; attention-N.png shows for models that attend the regions and words of an example and their
    weights. OUTPUT/figures.json holds what is drawn. Examples are drawn with a seed, whatever the model finds.

    OUTPUT/_made_from.json names options, run and data: where they are the same, nothing is drawn again. Of pictures names and sizes
    are compared.
    """
    import sklearn.manifold  # noqa: F401 -- A missing package shows before the work.

    from schemas.made_from import is_current
    from schemas.storage.folder import Folder
    from train.progress import CountDisplay
    from train.reports.figures import FiguresJob, draw_figures

    job = FiguresJob(
        run=run,
        output=output,
        captions=captions,
        features=features,
        images=images,
        only=several(only),
        split=split,
        languages=several(languages),
        portion=portion,
        examples=examples,
        caption_ids=several(caption_ids),
        top=top,
        points=points,
        seed=seed,
        device=device,
        memory_map=memory_map or None,
        allow_missing_features=allow_missing_features,
        token_features=token_features,
    )
    read = context.meta.get(PICTURES)
    if read is not None:
        table = {"columns": columns, "delimiter": delimiter, "quoting": quoting}
        read = partial(read, ids=ids, **table, allow_private_addresses=allow_private_addresses)
    made_from = job.made_from()
    if is_current(Folder(output), made_from):
        remark(f"{output!r} is up to date", style="")
        return
    with CountDisplay(notes, "figures", unit="vectors", log_json=log_json) as count:
        drawn = draw_figures(job, read, count, made_from=made_from)
    events.record(counts={"figures": len(drawn.names) - 1})
    for name, reason in drawn.refused.items():
        remark(f"no {name}: {reason}")
    if not images:
        remark("no pictures: ids of images stand for them without --images")
    console.print(f"examples: {escape(drawn.rule)}", highlight=False, soft_wrap=True)
    for ranking in drawn.rankings:
        place = f"{ranking.example} {ranking.caption.key.language} rank {ranking.rank:,} of {ranking.images:,}"
        console.print(escape(f"{place}: {escape_text(ranking.caption.text)}"), highlight=False, soft_wrap=True)
    console.print(f"written: {escape(', '.join(f'{output}/{name}' for name in drawn.names))}", highlight=False, soft_wrap=True)

"""Commands that show datasets and runs to people."""

from __future__ import annotations

import importlib
from html import escape as escape_html
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.binding import command
from pipelines.commands.imports import Imports, import_modules
from pipelines.commands.results import AsJson, console, notes, print_remark
from pipelines.jobs import ImageOptions
from schemas.console import events
from schemas.console.progress import Monitoring
from schemas.console.tables import Cell, Column, Row, Table, render_tables
from schemas.errors import UsageError
from schemas.keys import CaptionKey
from schemas.options import Opt
from train.jobs import SearchJob
from train.progress import CountDisplay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL import Image

    from schemas.dataset import Dataset
    from schemas.storage.folder import Folder
    from train.evaluation.search import Answer

_SHEETS = (".html", ".png", ".pdf")


@command('search runs/c2c "ein Hund im Schnee" --language de --features features --images photos --output found.html')
def search(
    job: SearchJob,
    images: Annotated[str, Opt("Show images from this location, as for features.")] = "",
    captions: Annotated[str, Opt("Show the captions of this dataset below the images of a .html.")] = "",
    output: Annotated[str, Opt("Write the queries and their images to this .html, .png or .pdf file.")] = "",
    reading: ImageOptions = ImageOptions(),
    imports: Imports = (),
    as_json: AsJson = False,
    monitoring: Monitoring = Monitoring(),
) -> None:
    """List the best images for sentences in any languages of a run.

    A sentence is tokenized by the recipe of the captions that the run was trained on. With --images, ids link to files on terminals
    that support it. OUTPUT holds all its pictures.
    """
    import_modules(imports)
    target = _sheet_place(output) if output else None
    if captions and (target is None or not target[1].endswith(".html")):
        raise UsageError("--captions shows captions in a page: give --output with a name that ends in .html, or leave it out")
    from pipelines.text.queries import tokenize_query
    from schemas.dataset import open_dataset
    from train.evaluation.search import search_sentences

    dataset = open_dataset(captions, kind="captions") if captions else None
    source = reading.open(images) if images else None
    total = open_dataset(job.features).manifest.rows if job.features else None
    with CountDisplay(notes, "search", unit="images", total=total, monitoring=monitoring) as count:
        answers = search_sentences(
            job, tokenize_query, lambda words: print_remark(f"not in the vocabulary: {' '.join(words)}"), count, print_remark
        )
    events.record(counts={"hits": sum(len(answer.hits) for answer in answers)})
    pictures: dict[str, Image.Image] = {}
    links: dict[str, str] = {}
    if source is not None:
        from pipelines.looking.exhibits import file_addresses, readable_pictures, wanted_refs

        refs = wanted_refs(source, {hit.image_id for answer in answers for hit in answer.hits})
        links = file_addresses(source, refs)
        pictures = dict(readable_pictures(source, refs)) if target is not None else {}
    if as_json:
        typer.echo(_hits_of_all(answers).to_json())
    else:
        render_tables(console, [_hits_table(answer, links, has_title=len(answers) > 1) for answer in answers])
    if target is not None:
        if target[1].endswith(".html"):
            _write_sheet(job.run, answers, pictures, dataset, *target)
        else:
            _draw_sheet(answers, pictures, *target)
        print_remark(f"written: {output}", style="")


def _sheet_place(output: str) -> tuple[Folder, str]:
    """Return folder and name of a sheet, after a check of its packages and folder."""
    from schemas.storage.folder import file_at

    folder, name = file_at(output)
    if not name.endswith(_SHEETS):
        raise UsageError(f"--output is {output!r}, expected a file that ends in {', '.join(_SHEETS)}")
    # First: a missing package fails before the work.
    importlib.import_module("pipelines.looking.pages" if name.endswith(".html") else "train.reports.rankings")
    folder.check_writable()
    return folder, name


def _hits_table(answer: Answer, links: Mapping[str, str], *, has_title: bool) -> Table:
    rows: list[Row] = [
        (rank, Cell(hit.image_id, style=f"link {links[hit.image_id]}" if hit.image_id in links else ""), hit.score)
        for rank, hit in enumerate(answer.hits, start=1)
    ]
    title = f"{answer.language}: {answer.query}" if has_title else ""
    return Table((Column("", ""), "image_id", Column("score", ".3f")), rows, title)


def _hits_of_all(answers: Sequence[Answer]) -> Table:
    """Return the hits of all answers, with their queries if several."""
    rows = [(hit.image_id, hit.score, answer.query, answer.language) for answer in answers for hit in answer.hits]
    width = 2 if len(answers) == 1 else 4
    return Table(("image_id", Column("score", ".3f"), "query", "language")[:width], [row[:width] for row in rows])


def _write_sheet(
    run: str,
    answers: Sequence[Answer],
    pictures: Mapping[str, Image.Image],
    captions: Dataset | None,
    folder: Folder,
    name: str,
) -> None:
    from pipelines.looking.exhibits import caption_lines, jpeg_address
    from pipelines.looking.pages import write_page
    from pipelines.looking.sheet import Found, sheet_of

    results = [Found(answer.query, answer.language, [(hit.image_id, hit.score) for hit in answer.hits]) for answer in answers]
    ids = {image_id for result in results for image_id, _ in result.hits}
    lines = {} if captions is None else caption_lines(captions, ids)
    addresses = {image_id: jpeg_address(picture) for image_id, picture in pictures.items()}
    write_page(folder, name, f"Images that {run} finds", [sheet_of(results, addresses, lines)])


def _draw_sheet(answers: Sequence[Answer], pictures: Mapping[str, Image.Image], folder: Folder, name: str) -> None:
    import numpy as np

    from train.reports.figure_examples import ShownCaption
    from train.reports.rankings import Ranking, plot_rankings

    rankings = []
    for number, answer in enumerate(answers, start=1):
        tokens = ("<start>", escape_html(answer.query), "<end>")
        caption = ShownCaption(0, CaptionKey("", answer.language, "", 0), tokens)
        rankings.append(Ranking(number, caption, tuple(answer.hits)))
    pixels = {image_id: (np.asarray(picture), picture.size) for image_id, picture in pictures.items()}
    plot_rankings(rankings, pixels, folder, name, note="")

"""Commands that show datasets and runs to people."""

from __future__ import annotations

import importlib
import socket
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.binding import command
from pipelines.commands.imports import Imports, import_modules
from pipelines.commands.results import AsJson, console, notes, print_remark
from pipelines.jobs import ImageOptions
from schemas.console import events
from schemas.console.progress import Monitoring
from schemas.console.tables import Cell, Column, Row, Table, render_tables
from schemas.errors import ImagepivotError, InputError, UsageError
from schemas.escapes import counted, short_names
from schemas.options import Opt
from train.jobs import SearchJob
from train.progress import CountDisplay

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

    from pipelines.looking.exhibits import Photos
    from pipelines.looking.pages import Chapter
    from schemas.dataset import Dataset
    from schemas.storage.folder import Folder
    from train.evaluation.search import Answer, ImageSearch

_SHEETS = (".html", ".png", ".pdf", ".svg")
_TITLED = 5  # Names in the title of a report.


@command('search runs/c2c "ein Hund im Schnee" --language de --features features --images photos --output found.html')
def search(
    job: SearchJob,
    image: Annotated[str, Opt("Search with this image, too; needs the extractor of the features.", metavar="FILE")] = "",
    weights: Annotated[str, Opt("Load the weights of the extractor for --image from here.")] = "default",
    images: Annotated[str, Opt("Show images from this location, as for features.")] = "",
    captions: Annotated[str, Opt("Show the captions of this dataset below the images of a .html.")] = "",
    output: Annotated[str, Opt("Write the queries and their images to this .html, .png, .pdf or .svg file.")] = "",
    reading: ImageOptions = ImageOptions(),
    imports: Imports = (),
    as_json: AsJson = False,
    monitoring: Monitoring = Monitoring(),
) -> None:
    """List the best images for sentences in any languages of a run, or for an image.

    A sentence is tokenized by the recipe of the captions that the run was trained on. In place of a RUN,
    open_clip:NAME, open_clip:FOLDER or sentence:FOLDER searches images of the same joint model. With
    --images, ids link to files on terminals that support it. OUTPUT holds all its pictures.
    """
    import_modules(imports)
    target = _page_place(output, _SHEETS) if output else None
    if captions and (target is None or not target[1].endswith(".html")):
        raise UsageError("--captions shows captions in a page: give --output with a name that ends in .html, or leave it out")
    if not (job.query or image):
        raise UsageError("a query is missing: give a sentence, or a picture with --image")
    from pipelines.text.queries import load_text_encoder, tokenize_query
    from schemas.dataset import open_dataset
    from train.evaluation.search import open_search

    dataset = open_dataset(captions, kind="captions") if captions else None
    source = reading.open(images) if images else None
    total = open_dataset(job.features).manifest.rows if job.features else None
    with CountDisplay(notes, "search", unit="images", total=total, monitoring=monitoring) as count:
        pictures = {image: _extract(image, job, weights)} if image else {}
        found = open_search(
            job,
            tokenize_query,
            lambda words: print_remark(f"not in the vocabulary: {' '.join(words)}"),
            count,
            print_remark,
            load_text_encoder,
        )
        answers = found.answer(job, pictures)
    events.record(counts={"hits": sum(len(answer.hits) for answer in answers)})
    ids, links = {hit.image_id for answer in answers for hit in answer.hits}, dict[str, str]()
    if images or target is not None:
        from pipelines.looking.exhibits import Photos, caption_lines

        photos = Photos(source)
        photos.check_ids(ids)
        links = photos.links(ids)
    if as_json:
        rows = [(*hit, answer.query, answer.language) for answer in answers for hit in answer.hits]
        typer.echo(Table(("image_id", "score", "query", "language"), rows).to_json())
    else:
        render_tables(console, [_hits_table(answer, links, has_title=len(answers) > 1) for answer in answers])
    if target is None:
        return
    if target[1].endswith(".html"):
        from pipelines.looking.exhibits import answer_strips
        from pipelines.looking.pages import Chapter, write_page

        lines = {} if dataset is None else caption_lines(dataset, ids)
        if dataset is not None and not lines:
            print_remark(f"{captions!r} has no captions of these images, e.g. {min(ids)!r}: give those of the same images")
        chapter = Chapter("found", answer_strips(answers, photos.addresses(ids), lines))
        write_page(*target, f"Images that {short_names([job.run])[0]} finds", [chapter])
    else:
        import numpy as np

        from train.reports.rankings import plot_answers

        plot_answers(
            answers, {image_id: (np.asarray(picture), picture.size) for image_id, picture in photos.pictures(ids)}, *target
        )
    print_remark(f"written: {output}", style="")


def _extract(image: str, job: SearchJob, weights: str) -> Mapping[str, np.ndarray]:
    """Extract the features of an image as those of a dataset.

    Raises:
        UsageError: the extractor of the dataset is unknown, or differs.
    """
    import extractors
    from schemas.dataset import open_dataset
    from schemas.parameters import FeaturesParameters
    from schemas.storage.folder import file_at

    if not job.features:
        raise UsageError("--image needs the extractor of the images: give their --features instead of --embeddings")
    stored = FeaturesParameters.from_json(open_dataset(job.features).manifest.parameters)
    precision = (stored.extractor or {}).get("precision", "fp32")
    request = extractors.ExtractorRequest(stored.feature.name, weights, precision)
    extractor = request.load(job.device)
    if extractor.fingerprint != stored.extractor_fingerprint:
        raise UsageError(
            f"{job.features!r} has features of {stored.feature.name!r} with other weights or options than "
            f"--weights {weights!r}: give those that the features were extracted with"
        )
    folder, name = file_at(image)
    try:
        picture = extractors.decode_image(folder.read(name))
    except (FileNotFoundError, extractors.DecodeError) as error:
        raise InputError(f"--image {image!r} is no image that can be read: {error}") from error
    return extractor.extract_columns(extractor.collate([extractor.preprocess(picture)]))


def _page_place(output: str, extensions: tuple[str, ...]) -> tuple[Folder, str]:
    """Return folder and name of an output, after a check of its packages and folder."""
    from schemas.storage.folder import file_at

    folder, name = file_at(output)
    if not name.endswith(extensions):
        raise UsageError(f"--output is {output!r}, expected a file that ends in {', '.join(extensions)}")
    # First: a missing package fails before the work.
    importlib.import_module("pipelines.looking.pages" if name.endswith(".html") else "train.reports.rankings")
    folder.check_writable()
    return folder, name


def _hits_table(answer: Answer, links: Mapping[str, str], *, has_title: bool) -> Table:
    rows: list[Row] = [
        (rank, Cell(hit.image_id, style=f"link {links[hit.image_id]}" if hit.image_id in links else ""), hit.score)
        for rank, hit in enumerate(answer.hits, start=1)
    ]
    title = ": ".join(filter(None, (answer.language, answer.query))) if has_title else ""
    return Table((Column("", ""), "image_id", Column("score", ".3f")), rows, title)


@command("report captions vocabulary features runs/c2c --images photos --output report.html")
def report(
    locations: Annotated[tuple[str, ...], Opt("Folders of datasets and runs, and of [i]evaluate --output[/i].")],
    output: Annotated[str, Opt("Write this .html file.")] = "report.html",
    images: Annotated[str, Opt("Show images from this location, as for features.")] = "",
    duplicates: Annotated[str, Opt("Show the groups in this file of [i]duplicates --output[/i].")] = "",
    serve: Annotated[bool, Opt("Serve the page, with search and browsing, instead of writing a file.")] = False,
    address: Annotated[str, Opt("Serve at this host and port. Other hosts than the loopback need a token.")] = "127.0.0.1:8000",
    model: Annotated[str, Opt("Search with this run or joint model, as for search. Default: the first run.")] = "",
    reading: ImageOptions = ImageOptions(),
) -> None:
    """Describe datasets and runs on one page, which holds all its pictures.

    Captions: languages, lengths, frequent and unknown tokens, images without captions. Vocabularies: overlap.
    Features and regions: norms, constant and zero dimensions, failures, a map. Runs: curves, scores with
    intervals, worst errors, and tests in words. Examples of retrieval need the data that a run reads, or
    vectors of captions and images in one space. What is missing or suspicious comes first in each chapter.
    """
    target = None if serve else _page_place(output, (".html",))
    if serve:
        import uvicorn

        from pipelines.looking.serving import LOOPBACK, LiveReport, build_app

        host, listener = _listen(address)
    from pipelines.looking.exhibits import Photos
    from pipelines.looking.pages import write_page
    from pipelines.looking.report import dataset_chapters, duplicates_chapter
    from schemas.dataset import open_dataset
    from schemas.duplicates import read_duplicates
    from schemas.storage.folder import Folder
    from train.runs.history import is_run

    others = ("config.toml", "evaluation.json")
    runs = [place for place in locations if is_run(place) or any(Folder(place).stat(name) is not None for name in others)]
    datasets = [open_dataset(location) for location in locations if location not in runs]
    photos = Photos(reading.open(images) if images else None)
    groups = read_duplicates(duplicates, needs_splits=False)[0] if duplicates else []

    chapters = [*dataset_chapters(datasets, photos)]
    if duplicates:
        chapters.append(duplicates_chapter(duplicates, groups, photos))
    if runs:
        chapters.append(_comparison_chapter(runs))
    if runs or any(dataset.kind == "embeddings" for dataset in datasets):
        chapters += _retrieval_chapters(runs, datasets, photos)
    names = short_names(locations)
    more = f" and {len(names) - _TITLED} more" if len(names) > _TITLED else ""
    title = f"Report of {', '.join(names[:_TITLED])}{more}"
    if target is not None:
        write_page(*target, title, chapters)
        print_remark(f"written: {output}", style="")
        return
    places = [dataset.folder.location for dataset in datasets if dataset.kind in ("features", "regions")]
    models = [model] if model else [run for run in runs if is_run(run)]
    found = _open_model(models[0], places) if models else None
    search = (found.find, found.find_like, found.model.languages) if found is not None else ()
    is_loopback = host in LOOPBACK
    token = "" if is_loopback else token_urlsafe(24)
    app = build_app(
        LiveReport(title, chapters, datasets, groups, photos, *search),
        token=token,
        hosts=LOOPBACK if is_loopback else ["*"] if host in ("0.0.0.0", "[::]") else [host],
    )
    # As it is: remarks hide tokens.
    typer.echo(f"serving: http://{host}:{listener.getsockname()[1]}/{'?token=' if token else ''}{token}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


def _listen(address: str) -> tuple[str, socket.socket]:
    """Return the host of an address, and a socket that listens there."""
    host, _, port = address.rpartition(":")
    plain = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535 or "/" in host:
        raise UsageError(f"--address is {address!r}, expected a host and a port, e.g. 127.0.0.1:8000")
    try:
        return host, socket.create_server((plain, int(port)), family=socket.AF_INET6 if ":" in plain else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"cannot serve at {address!r}: {error}. Give --address a host of this machine and a port that no program uses"
        ) from error


def _open_model(model: str, features: Sequence[str]) -> ImageSearch:
    """Open a run or joint model with the first features that it reads."""
    from pipelines.text.queries import load_text_encoder, tokenize_query
    from train.evaluation.search import open_search

    error: ImagepivotError = UsageError(f"{model!r} needs images to search: give their features, too")
    for location in features:
        job = SearchJob(model, (), features=location)
        try:
            images = open_search(job, tokenize_query, lambda words: None, lambda done: None, print_remark, load_text_encoder)
            print_remark(f"{counted(len(images.gallery.image_ids), 'image')} of {location} to search", style="")
        except ImagepivotError as problem:
            error = problem
        else:
            return images
    raise error


def _comparison_chapter(runs: Sequence[str]) -> Chapter:
    from pipelines.looking.charts import chart_of
    from pipelines.looking.pages import Chapter
    from train.reports.comparison import compare_runs
    from train.reports.verdict import published_table, verdict
    from train.runs.curves import plot_curves

    comparison = compare_runs(runs)
    curves = []
    for run in comparison.runs:
        if run.history.entries:
            best = run.history.best or {}
            ending = f"{run.history.last_step:,} steps, the best evaluation at step {best.get('step', 0):,}"
            curves.append(chart_of(plot_curves(run.history), f"curves of {run.name}", f"Losses and recalls: {ending}"))
    tables = [published_table(comparison), *comparison.to_tables()]
    return Chapter("runs", [*tables, *curves], [*verdict(comparison), *comparison.notes])


def _retrieval_chapters(runs: Sequence[str], datasets: Sequence[Dataset], photos: Photos) -> Iterator[Chapter]:
    """Yield worst errors of each run, and examples from the datasets that it reads.

    Vectors of captions, with images in their space, are examples without a run.
    """
    from pipelines.looking.errors import error_strips, example_strips
    from pipelines.looking.pages import Chapter
    from schemas.storage.folder import Folder
    from train.evaluation.ranks import RANKS, read_ranks
    from train.jobs import FiguresJob
    from train.reports.figures import retrieve_examples
    from train.runs.history import is_run

    texts = next((dataset for dataset in datasets if dataset.kind == "captions"), None)
    images = [dataset.folder.location for dataset in datasets if dataset.kind in ("features", "regions")]
    vectors = [("", dataset.folder.location) for dataset in datasets if dataset.kind == "embeddings"]
    encoded = [dataset.folder.location for dataset in datasets if dataset.kind == "encoded"]
    for run, captions in [*vectors, *((run, captions) for run in runs for captions in encoded[:1] or [""])]:
        blocks, remarks = [], dict[str, str]()
        if run and Folder(run).stat(RANKS) is not None:
            blocks = error_strips(read_ranks(run), texts, photos)
        for features in images if captions and (not run or is_run(run)) else ():
            try:
                rankings, found, rule = retrieve_examples(FiguresJob(run, "-", captions, features))
            except ImagepivotError as error:
                remarks[features] = f"no examples: {error}"
                continue
            answers = [(r.caption.key, r.caption.text, r.hits, (r.rank, r.right)) for r in rankings if r.right is not None]
            blocks += example_strips(answers, found, texts, photos)
            remarks = {features: f"examples: {rule}"}
            break
        if blocks or remarks:
            yield Chapter(f"retrieval: {run or captions}", blocks, list(remarks.values()))

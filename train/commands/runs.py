"""The commands ``evaluate``, ``compare``, ``embed`` and ``search``: turn arguments into work with trained runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape

from schemas.console import events
from schemas.console.tables import Column, Table, render_tables
from schemas.escapes import to_json
from train.commands.options import (
    AllowMissingFeatures,
    AsJson,
    Captions,
    Device,
    Features,
    LogJson,
    MemoryMap,
    TokenFeatures,
    console,
    notes,
    record_written,
    remark,
    several,
)

__all__ = ["app"]

app = typer.Typer()

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]


@app.command(epilog="Example: imagepivot evaluate runs/c2c --captions encoded --features features")
def evaluate(
    run: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folder of a run; of several, an ensemble.", show_default=False)
    ],
    captions: Captions,
    features: Features,
    token_features: TokenFeatures = "",
    split: Annotated[str, typer.Option("--split", help="Splits, e.g. [i]val[/i]; the test images of 2016 if not given.")] = "",
    languages: Annotated[str, typer.Option("--languages", help="Only these; all that the run knows if not given.")] = "",
    portion: Annotated[
        str,
        typer.Option("--portion", help="[i]comparable[/i] or [i]translation[/i]; each by itself if not given."),
    ] = "",
    device: Device = "auto",
    memory_map: MemoryMap = "",
    allow_missing_features: AllowMissingFeatures = False,
    folds: Annotated[int, typer.Option("--folds", help="Means over so many folds of the images; 5 for COCO's 1K.")] = 1,
    across_languages: Annotated[
        bool,
        typer.Option("--across-languages", help="Also rank captions among those of the same images in each other language."),
    ] = False,
    output: Annotated[str, typer.Option("--output", help="JSON file for the scores; one of the same content stays.")] = "",
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Measure what a run retrieves: R@1, R@5, R@10 and median rank, from image to text and from text to image.

    If an image has several captions, the best-ranked one counts. Equal scores count against the model. Several runs are evaluated
    as one, an ensemble: the score of an image and a caption is the mean of theirs. Means over languages follow.

    The file of --output names what it was made from: where that is the same, nothing is measured again.
    """
    from train.evaluation.averaging import evaluation_report
    from train.evaluation.scoring import EvaluateJob, evaluate_run
    from train.progress import CountDisplay
    from train.reports.stored_reports import check_report, is_current_report, read_report, write_report
    from train.reports.tables import score_tables

    job = EvaluateJob(
        run=tuple(run),
        captions=captions,
        features=features,
        splits=several(split),
        languages=several(languages),
        portion=portion,
        device=device,
        memory_map=memory_map or None,
        allow_missing_features=allow_missing_features,
        folds=folds,
        across_languages=across_languages,
        token_features=token_features,
    )
    made_from = job.made_from() if output else {}
    if output:
        check_report(output)
        if is_current_report(output, made_from):
            if as_json:
                typer.echo(read_report(output), nl=False)
            remark(f"{output!r} is up to date", style="")
            return
    with CountDisplay(notes, "evaluate", unit="vectors", log_json=log_json) as count:
        scores = evaluate_run(job, count, remark)
    events.record(counts={"scores": len(scores)})
    for missing in dict.fromkeys(score.missing_features for score in scores if score.missing_features is not None):
        remark(missing.remark)
    report = evaluation_report(scores)
    if output:
        write_report(output, report, made_from)
        remark(f"written: {output}", style="")
    if as_json:
        typer.echo(to_json(report, indent=2))
        return
    render_tables(console, score_tables(scores, title=run[0] if len(run) == 1 else f"mean scores of {', '.join(run)}"))


@app.command(epilog="Example: imagepivot compare runs/c2c runs/bilingual --output comparison.png")
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)],
    output: Annotated[
        str, typer.Option("--output", help="Draw them too: a file .png, .pdf or .svg, or a folder for comparison.png.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Put runs side by side: what differs in their configurations, how far they came, and their scores.

    The scores are those on the validation split, at the best step. Runs that differ in their seeds alone are also averaged. Runs
    may be of any kinds and languages, and still be training.
    """
    from train.reports.comparison import compare_runs

    if output:
        from train.reports.comparison_plots import picture_place, plot_comparison

        picture_place(output)  # A name that it cannot have shows before anything is read.
    comparison = compare_runs(runs)
    if as_json:
        typer.echo(to_json(comparison.to_dict(), indent=2))
    else:
        from train.reports.tables import comparison_tables

        render_tables(console, comparison_tables(comparison))
    for note in comparison.notes:
        remark(note)
    if output:
        remark(f"written: {plot_comparison(comparison, output)}", style="")


@app.command(epilog="Example: imagepivot embed runs/c2c embeddings --features features --captions encoded")
def embed(
    run: RunFolder,
    output: Annotated[
        str, typer.Argument(help="Folder; the datasets are written to its folders images and captions.", show_default=False)
    ],
    features: Annotated[
        str, typer.Option("--features", help="Folder of image features or regions; no images if not given.")
    ] = "",
    captions: Annotated[str, typer.Option("--captions", help="Folder of encoded captions; no captions if not given.")] = "",
    token_features: TokenFeatures = "",
    splits: Annotated[
        str, typer.Option("--splits", help="Only captions of these splits, e.g. [i]val,test[/i], and only their images.")
    ] = "",
    languages: Annotated[
        str, typer.Option("--languages", help="Only captions in these; all that the run knows if not given.")
    ] = "",
    device: Device = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another dataset in OUTPUT, or embeddings of other content.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the digests of what OUTPUT holds, too, and make again what is damaged.")
    ] = False,
    allow_missing_features: Annotated[
        bool, typer.Option("--allow-missing-features", help="Embed what has features of --splits, and say what has none.")
    ] = False,
    log_json: LogJson = False,
) -> None:
    """Write the embeddings of images and captions into shards.

    OUTPUT/images is a dataset of kind features, OUTPUT/captions one of kind embeddings, with the keys of the captions. If the
    command was stopped, the same command continues from there. Another choice of splits or languages is another dataset.
    """
    from schemas.dataset import open_dataset
    from train.evaluation import embedding
    from train.progress import CountDisplay

    job = embedding.EmbedJob(
        run=run,
        output=output,
        features=features,
        captions=captions,
        device=device,
        overwrite=overwrite,
        splits=several(splits),
        languages=several(languages),
        allow_missing_features=allow_missing_features,
        token_features=token_features,
        verify=check,
    )
    total = sum(open_dataset(source).manifest.rows for source in (features, captions) if source)
    with CountDisplay(notes, "embed", unit="vectors", total=total, log_json=log_json) as count:
        manifests = embedding.embed(job, count, remark)
        count.settle()
    record_written(manifests)
    for manifest in manifests:
        folder = "images" if manifest.kind == "features" else "captions"
        console.print(
            f"[bold]{manifest.kind}[/bold]: {manifest.rows:,} rows in {len(manifest.shards)} shards in "
            f"{escape(f'{output}/{folder}')} (fingerprint {manifest.fingerprint[:12]})",
            highlight=False,
            soft_wrap=True,
        )


@app.command(epilog='Example: imagepivot search runs/c2c "ein Hund im Schnee" --language de --features features')
def search(
    context: typer.Context,
    run: RunFolder,
    text: Annotated[str, typer.Argument(help="What to look for.", show_default=False)],
    language: Annotated[
        str,
        typer.Option("--language", help="Language of the text; not needed if the run knows only one."),
    ] = "",
    features: Annotated[str, typer.Option("--features", help="Folder of the features of the images.")] = "",
    embeddings: Annotated[str, typer.Option("--embeddings", help="Instead: folder that imagepivot embed wrote.")] = "",
    top: Annotated[int, typer.Option("--top", help="Number of images to list.")] = 10,
    truecaser: Annotated[str, typer.Option("--truecaser", help="Folder of the captions, if their recipe truecases.")] = "",
    tokenized: Annotated[bool, typer.Option("--tokenized", help="The text is tokens separated by spaces.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """List the best images for a sentence in any language of a run.

    The text goes through the recipe of the captions that the run was trained on.
    """
    from schemas.dataset import open_dataset
    from train.evaluation import searching
    from train.progress import CountDisplay

    job = searching.SearchJob(
        run=run,
        query=tuple(text.split()) if tokenized else text,
        language=language,
        features=features,
        embeddings=embeddings,
        top=top,
        truecaser=truecaser,
        device=device,
    )
    # The mounting application sets `context.obj` to a function of type `searching.Tokenize`; without one only tokens work.
    total = open_dataset(features).manifest.rows if features else None
    with CountDisplay(notes, "search", unit="images", total=total, log_json=log_json) as count:
        hits = searching.search(job, tokenize=context.obj, report_unknown=_report_unknown, count=count)
    events.record(counts={"hits": len(hits)})
    ranks = [(rank, hit.image_id, hit.score) for rank, hit in enumerate(hits, start=1)]
    table = Table((Column("", ""), "image_id", Column("score", ".3f")), ranks)
    if as_json:
        typer.echo(table.to_json())
    else:
        table.render(console)


def _report_unknown(tokens: Sequence[str]) -> None:
    remark(f"not in the vocabulary: {' '.join(tokens)}")

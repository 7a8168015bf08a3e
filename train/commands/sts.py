"""The command ``sts``: turns arguments into a measurement of semantic textual similarity, and prints it."""

from __future__ import annotations

from typing import Annotated

import typer

from schemas.console import events
from schemas.console.tables import render_tables
from schemas.escapes import to_json
from train.commands.options import AsJson, Device, LogJson, console, notes, remark

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot sts runs/c2c sts/2014/STS.input.images.txt sts/2015/STS.input.images.txt")
def sts(
    context: typer.Context,
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN]... DATA...",
            help="Folders of runs, each measured by itself, and files or folders of sentence pairs.",
            show_default=False,
        ),
    ],
    vectors: Annotated[
        list[str] | None,
        typer.Option(
            "--vectors",
            metavar="FILE",
            help="Word vectors ([i].vec[/i], [i].txt[/i], also [i].gz[/i]), which are averaged, or sentences with vectors "
            "([i].npz[/i]); may be repeated.",
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option("--output", help="Folder for sts.json, sts.csv, sts-pairs.csv and sts.png; the same stay as they are."),
    ] = "",
    language: Annotated[
        str, typer.Option("--language", help="Language of the sentences; en if not given and the run knows it.")
    ] = "",
    truecaser: Annotated[str, typer.Option("--truecaser", help="Folder of the captions, if their recipe truecases.")] = "",
    tokenized: Annotated[bool, typer.Option("--tokenized", help="The sentences are tokens separated by spaces.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Measure semantic textual similarity: how well the cosine of two sentences agrees with how alike people found them.

    Prints Pearson's r times 100 and Spearman's rho for each data set, with the word-overlap baseline of the shared tasks, and what
    Gella et al. 2017 and Huang et al. 2019 published. Sentences go through the recipe of the captions that a run was trained on.

    DATA are STS.input.X.txt beside STS.gs.X.txt, tables with tabs between the columns score, sentence1 and sentence2, or files of
    the STS benchmark. Pairs without a score are left out.
    """
    from schemas.storage.folder import Folder

    if output:
        # First: a missing package, or a folder that cannot be written to, shows before the work.
        from train.reports.sts_plots import plot_sts

        Folder(output).check_writable()
    from schemas.made_from import is_current, write_made_from
    from train.evaluation.sts_scoring import StsJob
    from train.evaluation.sts_scoring import sts as measure
    from train.progress import CountDisplay
    from train.reports.tables import sts_report, sts_tables, write_sts
    from train.runs.run import is_run

    runs = [place for place in places if is_run(place)]
    job = StsJob(
        data=tuple(place for place in places if place not in runs),
        runs=tuple(dict.fromkeys(runs)),
        vectors=tuple(vectors or ()),
        language=language,
        tokenized=tokenized,
        truecaser=truecaser,
        device=device,
    )
    made_from = job.made_from() if output else {}
    if output and is_current(Folder(output), made_from):
        if as_json:
            typer.echo(Folder(output).read("sts.json"), nl=False)
        remark(f"{output!r} is up to date", style="")
        return
    with CountDisplay(notes, "sts", unit="sentences", log_json=log_json) as count:
        # The mounting application sets `context.obj` to a function of type `Tokenize`; without one only tokens work.
        result = measure(job, tokenize=context.obj, count=count)
    events.record(counts={"pairs": sum(map(len, result.data)), "systems": len(result.systems)})
    if as_json:
        typer.echo(to_json(sts_report(result), indent=2))
    else:
        render_tables(console, sts_tables(result))
    for pairs in result.data:
        if pairs.unscored:
            remark(f"{pairs.name}: {pairs.unscored:,} pairs without a score are left out")
    if output:
        names, picture = write_sts(result, output), plot_sts(result, output)
        sizes = {name: Folder(output).size(name) or 0 for name in (*names, "sts.png")}
        write_made_from(Folder(output), made_from, sizes)
        remark(f"written: {', '.join(f'{output}/{name}' for name in names)} and {picture}", style="")

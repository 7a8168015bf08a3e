"""The command ``tables``: turns arguments into trainings, and prints their report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from schemas.console import events
from schemas.console.tables import render_tables
from schemas.errors import DatasetError
from train.commands.options import (
    AllowMissingFeatures,
    Captions,
    LogJson,
    MemoryMap,
    Precision,
    TokenFeatures,
    Vocabulary,
    WordVectors,
    console,
    notes,
    overrides_of,
    remark,
)

if TYPE_CHECKING:
    from train.evaluation.searching import Tokenize
    from train.evaluation.sts_pairs import StsPairs
    from train.reports.reproduce import Done, TablesJob
    from train.reports.row_statements import FailedRun

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="Example: imagepivot tables kadar2018 tables --rows 'bilingual*' --seeds 3 --captions encoded --features features "
    "--vocabulary vocabulary"
)
def tables(
    context: typer.Context,
    paper: Annotated[Literal["gella2017", "kadar2018", "huang2019"], typer.Argument(help="The paper.", show_default=False)],
    output: Annotated[str, typer.Argument(help="Folder for runs, results and report.", show_default=False)],
    captions: Captions,
    features: Annotated[
        list[str],
        typer.Option(
            "--features",
            help="Folder of image features or regions; may be repeated, and each row takes the first that fits it.",
            show_default=False,
        ),
    ],
    vocabulary: Vocabulary,
    word_vectors: WordVectors = "",
    token_features: TokenFeatures = "",
    seeds: Annotated[int, typer.Option("--seeds", help="Number of runs per row.")] = 10,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", help="Only presets that match this, e.g. [i]'bilingual*'[/i]; may be repeated."),
    ] = None,
    table: Annotated[
        int | None,
        typer.Option("--table", help="Only the rows of this table.", min=1),
    ] = None,
    sts: Annotated[
        list[str] | None,
        typer.Option(
            "--sts",
            metavar="DATA",
            help="Sentence pairs, as for sts, to measure textual similarity on: table 4 of gella2017, 2 of huang2019; may be "
            "repeated.",
        ),
    ] = None,
    truecaser: Annotated[
        str, typer.Option("--truecaser", help="With --sts, folder of the captions, if their recipe truecases.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value in all configurations; may be repeated, see train."),
    ] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="Maximum of steps per run.")] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=0, help="Number of runs at a time, GPUs in turn; 0: one per GPU, or one per core without a GPU."
        ),
    ] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: all GPUs if there are any.")] = "auto",
    precision: Precision = "fp32",
    memory_map: MemoryMap = "",
    allow_missing_features: AllowMissingFeatures = False,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw OUTPUT/PAPER.png.")] = True,
    log_json: LogJson = False,
) -> None:
    """Train the rows of a paper's tables, and print what they measure beside what was published.

    Each row is trained with several seeds and measured on the test images of 2016. OUTPUT/PAPER.md and OUTPUT/PAPER.png hold
    the report. It covers all results in OUTPUT: rows that need other captions or another vocabulary are added by a command of
    their own. If the command was stopped, the same command continues from there.

    A run that fails, or whose process is killed, does not end the others. The report lists it with its reason, the exit code is 3,
    and the same command tries it again.

    Table 3 of gella2017 also prints ranks of single captions. Table 4 of it and table 2 of huang2019 are measured on the sentence
    pairs that --sts names.
    """
    if plot:
        # Imported first: a missing package shows before hours of training.
        from train.reports.table_plots import plot_report
    from schemas.errors import UsageError
    from schemas.storage.folder import Folder
    from train.data.corpus import Corpus
    from train.progress import CountDisplay
    from train.reports.published import presets_of_table
    from train.reports.reproduce import TablesJob, run_tables
    from train.reports.reproduce_report import read_report
    from train.reports.sts_rows import open_sts, sts_paper

    if table is not None and rows:
        raise UsageError("--table and --rows both choose rows: give one of them")
    if sts and sts_paper(paper) is None:
        raise UsageError(f"--sts is given, but {paper} has no table of textual similarity: leave it out")
    if not sts and table is not None and sts_paper(paper, table):
        raise UsageError(
            f"table {table} of {paper} is measured on sentence pairs: give --sts, files or folders of them, as imagepivot sts "
            "takes them"
        )
    # The mounting application sets `context.obj` to a function of type `searching.Tokenize`.
    pairs = open_sts(sts, captions, context.obj, truecaser) if sts else []
    job = TablesJob(
        paper=paper,
        output=output,
        corpus=Corpus(captions, features[0], vocabulary, word_vectors, token_features),
        seeds=seeds,
        rows=presets_of_table(paper, table) if table is not None else tuple(rows or (["*"] if sts else [])),
        overrides=overrides_of(settings, max_steps),
        workers=workers,
        device=device,
        precision=precision,
        memory_map=memory_map or None,
        allow_missing_features=allow_missing_features,
        other_features=tuple(features[1:]),
    )
    with CountDisplay(notes, "tables", unit="runs", total=len(job.presets()) * seeds, log_json=log_json) as count:

        def report_done(done: Done) -> None:
            count(1, failed=int(done.failure is not None))
            if not log_json:
                how = f": failed ({done.failure.kind})" if done.failure else ""
                notes.print(f"{done.count} of {done.total}: {done.task.preset}, seed {done.task.seed}{how}", highlight=False)

        failed = run_tables(job, report_done, remark)
    total = len(job.presets()) * seeds
    events.record(counts={"runs": total - len(failed), "failed": dict(Counter(run.failure.kind for run in failed))})
    report = read_report(job.output, paper)
    if any(row.results for row in report.rows):
        console.print(*report.notes, sep="\n", highlight=False, markup=False)
        render_tables(console, report.begun.to_tables())
        if (paper, table) == ("gella2017", 3):
            _report_gold_ranks(job)
    written = f"{output}/{paper}.md"
    try:
        Folder(job.output).write(f"{paper}.md", report.to_markdown().encode())
        if plot and report.begun.sections:
            plot_report(report.begun, Path(job.output, f"{paper}.png"))
            written += f" and {output}/{paper}.png"
        console.print(f"written: {escape(written)}", highlight=False, soft_wrap=True)
    except DatasetError as error:
        if not failed:
            raise
        remark(str(error), style="red")  # Mostly the disk is full, which the runs have found out as well.
    if pairs:
        _report_sts(job, pairs, context.obj, truecaser, log_json=log_json)
    if failed:
        _report_failures(failed, total)
        raise typer.Exit(3)


def _report_failures(failed: Sequence[FailedRun], total: int) -> None:
    """Say which runs failed: one line for each cause, with the first run that it made fail."""
    from train.reports.row_statements import causes_of

    for runs in causes_of(failed):
        count = f"all {total}" if len(runs) == total > 1 else f"{len(runs)} of {total}"
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        failure = runs[0].failure
        remark(f"{count} runs failed ({failure.kind}): {runs[0].name}{more}: {failure.reason}", style="red")
    remark("the same command tries the runs that failed again", style="")
    if any(run.failure.kind == "diverged" for run in failed):
        remark("what has diverged would mostly diverge again: change its settings with --rows and --set", style="")


def _report_gold_ranks(job: TablesJob) -> None:
    from train.reports.gold_ranks import gold_ranks
    from train.reports.tables import gold_rank_tables, write_gold_ranks

    ranks = gold_ranks(job.output, job.corpus, device=job.device, allow_missing_features=job.allow_missing_features)
    render_tables(console, gold_rank_tables(ranks))
    for name in write_gold_ranks(ranks, job.output):
        console.print(f"written: {escape(f'{job.output}/{name}')}", highlight=False, soft_wrap=True)


def _report_sts(
    job: TablesJob, pairs: Sequence[StsPairs], tokenize: Tokenize | None, truecaser: str, *, log_json: bool
) -> None:
    from train.progress import CountDisplay
    from train.reports.sts_rows import sts_rows
    from train.reports.tables import sts_row_tables, write_sts_rows

    with CountDisplay(notes, "sts", unit="sentences", log_json=log_json) as count:
        rows = sts_rows(job.paper, job.output, pairs, tokenize, truecaser=truecaser, device=job.device, count=count)
    render_tables(console, sts_row_tables(rows))
    for name in write_sts_rows(rows, job.output):
        console.print(f"written: {escape(f'{job.output}/{name}')}", highlight=False, soft_wrap=True)

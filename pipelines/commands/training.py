"""Commands that train and evaluate models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from pipelines.commands.binding import command
from pipelines.commands.imports import Imports, import_modules
from pipelines.commands.results import AsJson, console, notes, print_dataset, print_line, print_remark
from pipelines.jobs import ImageOptions
from schemas.console import events
from schemas.console.progress import Monitoring
from schemas.console.tables import render_tables
from schemas.errors import DatasetError
from schemas.escapes import counted, escape_text, to_json
from schemas.options import Opt
from schemas.parameters import untrained_remark
from schemas.process.shutdown import shutdown_notice
from train.jobs import EmbedJob, EvaluateJob, FiguresJob, PictureFormats, ReproduceJob, StsJob, TrainJob
from train.progress import CountDisplay, TrainingDisplay, format_score

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from schemas.writing.made_from import MadeFrom
    from train.reports.figure_examples import SizedPixels
    from train.reports.reproduce import FinishedRun
    from train.reports.row_results import FailedRun
    from train.sts.pairs import StsPairs


@command("train kadar2018/bilingual-c2c runs/c2c --captions encoded --features features --vocabulary vocabulary")
def train(
    job: TrainJob = TrainJob(tensorboard=True),
    list_presets: Annotated[bool, Opt("List the presets.")] = False,
    show: Annotated[bool, Opt("Print the full configuration without training.")] = False,
    imports: Imports = (),
    monitoring: Monitoring = Monitoring(),
) -> None:
    """Train a joint embedding of images and sentences.

    CONFIG is a preset (a row of a paper's table) or a TOML file. Missing values come from the preset that it
    [b]extends[/b], or are defaults.

    Training stops early by the sum of recalls on the validation split. OUTPUT holds best.pt, last.pt, config.toml, log.jsonl,
    metrics.csv, curves.png and ranks.parquet. Ctrl-C saves after the current step; a second one exits immediately. --resume
    continues a stopped run: on a CPU to the same weights, if threads and datasets are unchanged.
    """
    import_modules(imports)
    from train.config import presets
    from train.config.sections import load_config, to_toml

    if list_presets:
        for name in presets.list_presets():
            print_line(f"[bold]{name}[/bold]  {escape(load_config(name).description)}")
        return
    config = job.resolved()
    if show:
        console.print(to_toml(config), highlight=False, markup=False, soft_wrap=True, end="")
        return

    from train.chance import is_above_chance
    from train.loop import training as work

    with (
        shutdown_notice("stopped before training began; nothing was changed"),
        TrainingDisplay(notes, monitoring) as watch,
    ):
        result = work.train(job, watch, print_remark)
    progress, chances = result.progress, tuple(result.chance.values())
    events.record(counts={"steps": progress.step})
    at_chance = "" if not chances or is_above_chance(progress.best_score, chances) else "; this is not better than chance"
    print_line(
        f"[bold]run[/bold]: {progress.step:,} steps in {escape(job.output)}, ended by {progress.stop_reason}; best sum of recalls "
        f"{format_score(progress.best_score, chances)} at step {progress.best_step:,}{at_chance}"
    )


@command("evaluate runs/c2c --captions encoded --features features")
def evaluate(
    job: EvaluateJob,
    output: Annotated[str, Opt("Write evaluation.json and ranks.parquet to this folder.")] = "",
    imports: Imports = (),
    as_json: AsJson = False,
    monitoring: Monitoring = Monitoring(),
) -> None:
    """Evaluate image-text retrieval: R@1, R@5, R@10, median rank, both directions.

    Without RUN, vectors of captions (kind embeddings) and of images from one joint model are compared.

    The best-ranked caption of an image counts. Equal scores count against the model. Several runs form an ensemble, which averages
    their scores. Below each line are 95 % confidence intervals, by a bootstrap over images. Means over languages follow.

    With --exclude, scores without and with the evaluated images and captions that have duplicates in the training splits are shown.

    OUTPUT/evaluation.json holds scores, intervals and settings; OUTPUT/ranks.parquet the rank of every query.
    With the same inputs nothing is evaluated again.
    """
    import_modules(imports)
    from schemas.storage.folder import Folder
    from schemas.writing.made_from import MADE_FROM_NAME, sizes_of, write_made_from
    from train.evaluation import scores as work
    from train.reports.score_report import (
        EVALUATION,
        check_evaluation_folder,
        evaluation_content,
        evaluation_report,
        score_tables,
        write_evaluation,
    )

    if output:
        check_evaluation_folder(output)
    made_from = job.made_from() if output else None
    if _is_up_to_date(output, made_from, EVALUATION if as_json else ""):
        return
    with CountDisplay(notes, "evaluate", unit="vectors", monitoring=monitoring) as count:
        scores = work.evaluate(job, count, print_remark)
        complete = work.evaluate(replace(job, exclude=""), count, lambda text: None) if job.exclude else []
    events.record(counts={"scores": len(scores)})
    remarks = [score.exclusion.remark([score.split]) for score in scores if score.exclusion is not None]
    remarks += [score.missing_features.remark for score in scores if score.missing_features is not None]
    for text in dict.fromkeys(remarks):
        print_remark(text)
    report = evaluation_content(scores, job)
    if complete:
        report["with_duplicates"] = evaluation_report(complete)
    if made_from is not None:
        Folder(output).delete(MADE_FROM_NAME)  # Of other scores, which may have the sizes of these.
        names = write_evaluation(scores, report, output)
        write_made_from(Folder(output), made_from, sizes_of(Folder(output), names))
        print_remark(f"written: {', '.join(f'{output}/{name}' for name in names)}", style="")
    if as_json:
        typer.echo(to_json(report, indent=2))
        return
    title = ("mean scores of " if len(job.runs) > 1 else "") + (", ".join(job.runs) or f"{job.captions} and {job.features}")
    render_tables(console, score_tables(scores, title=f"{title}, without duplicates" if complete else title))
    render_tables(console, score_tables(complete, title=f"{title}, with duplicates"))


def _is_up_to_date(output: str, made_from: MadeFrom | None, report: str = "") -> bool:
    """Return whether a folder has the same output; then say so and print a file of it."""
    from schemas.storage.folder import Folder
    from schemas.writing.made_from import is_current

    if made_from is None or not is_current(Folder(output), made_from):
        return False
    if report:
        typer.echo(Folder(output).read(report), nl=False)
    print_remark(f"{output!r} is up to date", style="")
    return True


@command("compare runs/c2c runs/bilingual --output comparison.png")
def compare(
    runs: Annotated[tuple[str, ...], Opt("Folders of runs, and of [i]evaluate --output[/i].")],
    output: Annotated[
        str, Opt("Draw the comparison to this .png, .pdf or .svg file, or as comparison.png to this folder.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Compare runs and evaluations: configurations, progress, scores and tests.

    Scores of runs are those of the best step on the validation split. Runs that differ only in seeds are also
    averaged. Rows with ranks of the same queries have 95 % intervals and are tested, over images and over
    seeds. Runs may have any model, languages and data, and may still be training; notes name differing data.
    """
    from train.reports.comparison import compare_runs

    if output:
        from train.reports.comparison_plot import picture_place, plot_comparison

        picture_place(output)  # Refuse an invalid name before reading.
    comparison = compare_runs(runs)
    if as_json:
        typer.echo(to_json(comparison.to_dict(), indent=2))
    else:
        render_tables(console, comparison.to_tables())
    for note in comparison.notes:
        print_remark(note)
    if output:
        print_remark(f"written: {plot_comparison(comparison, output)}", style="")


@command("embed runs/c2c embeddings --features features --captions encoded")
def embed(job: EmbedJob, imports: Imports = (), monitoring: Monitoring = Monitoring()) -> None:
    """Write embeddings of images and captions into shards.

    OUTPUT/images is a dataset of kind features, OUTPUT/captions of kind embeddings with the keys of the
    captions. The same command resumes a stopped one. Other splits or languages are another dataset.
    """
    import_modules(imports)
    from schemas.dataset import open_dataset
    from train.evaluation import embedding

    total = sum(open_dataset(source).manifest.rows for source in (job.features, job.captions) if source)
    with CountDisplay(notes, "embed", unit="vectors", total=total, monitoring=monitoring) as count:
        manifests = embedding.embed(job, count, print_remark)
        count.count_earlier()
    shards = sum(len(manifest.shards) for manifest in manifests)
    events.record(counts={"rows": sum(manifest.rows for manifest in manifests), "shards": shards, "failed": {}})
    for manifest in manifests:
        folder = "images" if manifest.kind == "features" else "captions"
        print_dataset(manifest, f"{job.output}/{folder}")


@command("sts runs/c2c sts/2014/STS.input.images.txt sts/2015/STS.input.images.txt")
def sts(
    job: StsJob,
    output: Annotated[str, Opt("Write sts.json, sts-pairs.csv and sts.png to this folder.")] = "",
    formats: PictureFormats = ("png",),
    imports: Imports = (),
    as_json: AsJson = False,
    monitoring: Monitoring = Monitoring(),
) -> None:
    """Evaluate semantic textual similarity: cosines against human ratings.

    Prints Pearson's r times 100 and Spearman's rho for each data set. The word-overlap baseline of the shared tasks and the results
    of Gella et al. 2017 and Huang et al. 2019 follow. Sentences are tokenized by the recipe of a run's captions. Pretrained models
    (open_clip:NAME, open_clip:FOLDER, sentence:FOLDER) read the text.

    Sentence pairs are STS.input.X.txt with STS.gs.X.txt, tab-separated tables with columns score, sentence1
    and sentence2, or files of the STS benchmark. Pairs without a score are skipped.
    """
    import_modules(imports)
    from schemas.storage.folder import Folder

    if output:
        # First: a missing package or an unwritable folder fails before the work.
        from train.sts.plot import plot_sts

        Folder(output).check_writable()
    from pipelines.text.queries import load_text_encoder, tokenize_query
    from schemas.writing.made_from import MADE_FROM_NAME, sizes_of, write_made_from
    from train.sts import similarity as work
    from train.sts.report import sts_tables, write_sts

    made_from = work.sts_made_from(job, formats) if output else None
    if _is_up_to_date(output, made_from, "sts.json" if as_json else ""):
        return
    with CountDisplay(notes, "sts", unit="sentences", monitoring=monitoring) as count:
        result = work.sts(job, tokenize_query, count, load_text_encoder)
    events.record(counts={"pairs": sum(map(len, result.data)), "systems": len(result.systems)})
    if as_json:
        typer.echo(to_json(result.to_dict(), indent=2))
    else:
        render_tables(console, sts_tables(result))
    for pairs in result.data:
        if pairs.unscored:
            print_remark(f"{pairs.name}: skipped {counted(pairs.unscored, 'pair')} without a score")
    if made_from is not None:
        Folder(output).delete(MADE_FROM_NAME)  # Of other results, which may have the sizes of these.
        names = [*write_sts(result, output), *(f"sts.{kind}" for kind in formats)]
        for name in names[-len(formats) :]:
            plot_sts(result, Folder(output), name)
        write_made_from(Folder(output), made_from, sizes_of(Folder(output), names))
        print_remark(f"written: {', '.join(f'{output}/{name}' for name in names)}", style="")


@command("figures runs/mha-d figures --captions encoded --features regions --images photos")
def figures(
    job: FiguresJob, reading: ImageOptions = ImageOptions(), imports: Imports = (), monitoring: Monitoring = Monitoring()
) -> None:
    """Draw figures of a run: retrieval examples, a t-SNE map and attention weights.

    With OUTPUT alone, of vectors of captions and images from one joint model.

    OUTPUT/retrieval.png shows the best images for captions in each language, with the rank of the right one, which is framed;
    map.png is a t-SNE of images and captions; attention-N.png shows attended regions and words of an example (models with
    attention). OUTPUT/figures.json holds the data. Examples are sampled with --seed, independently of the model.

    OUTPUT/_made_from.json holds options, run and data (of pictures names and sizes); with the same inputs nothing is drawn again.
    """
    import_modules(imports)
    import sklearn.manifold  # noqa: F401 -- A missing package shows before the work.

    from train.reports.figures import draw_figures

    def read(location: str, image_ids: Sequence[str]) -> Mapping[str, SizedPixels]:
        from pipelines.datasets.view import read_pictures

        return read_pictures(reading.open(location), image_ids)

    made_from = job.made_from()
    if _is_up_to_date(job.output, made_from):
        return
    with CountDisplay(notes, "figures", unit="vectors", monitoring=monitoring) as count:
        drawn = draw_figures(job, read, count, made_from=made_from)
    events.record(counts={"figures": len(drawn.names) - 1})
    for name, reason in drawn.refused.items():
        print_remark(f"no {name}: {reason}")
    if drawn.untrained:
        print_remark(untrained_remark(drawn.untrained))
    if not job.images:
        print_remark("no pictures without --images: image ids are drawn instead")
    print_line(f"examples: {escape(drawn.rule)}")
    for ranking in drawn.rankings:
        place = f"{ranking.example} {ranking.caption.key.language} rank {ranking.rank:,} of {ranking.images:,}"
        print_line(escape(f"{place}: {escape_text(ranking.caption.text)}"))
    print_line(f"written: {escape(', '.join(f'{job.output}/{name}' for name in drawn.names))}")


@command(
    "reproduce kadar2018 tables --rows 'bilingual*' --seeds 3 --captions encoded --features features --vocabulary vocabulary"
)
def reproduce(
    job: ReproduceJob,
    plot: Annotated[bool, Opt("Draw OUTPUT/PAPER.png.", panel="Reports")] = True,
    formats: PictureFormats = ("png",),
    monitoring: Monitoring = Monitoring(),
) -> None:
    """Train the rows of a paper's tables, and compare the results with published ones.

    Each row is trained with several seeds and evaluated on the test images of 2016, or on --split.
    OUTPUT/PAPER.md, PAPER.json and PAPER.png hold the report on all results in OUTPUT; run the command again
    for rows with other captions or another vocabulary. The same command resumes a stopped one.

    A failed or killed run does not stop the others. The report lists it with the reason, the exit code is 3,
    and the same command retries it.

    Table 3 of gella2017 also prints ranks of single captions. Table 4 of gella2017 and table 2 of huang2019
    need sentence pairs of --sts.
    """
    if plot:
        # First: a missing package fails before hours of training.
        from train.reports.report_plot import plot_report
    from pipelines.text.queries import tokenize_query
    from train.reports import reproduce as work
    from train.reports.reproduce_report import read_report
    from train.reports.row_datasets import corpora_of
    from train.reports.row_results import write_report
    from train.sts.paper_rows import open_sts

    pairs = open_sts(job, tokenize_query)
    total = len(corpora_of(job)[0]) * job.seeds
    with CountDisplay(notes, "reproduce", unit="runs", total=total, monitoring=monitoring) as count:

        def report_done(done: FinishedRun) -> None:
            count(1, failed=int(done.failure is not None))
            if not monitoring.log_json:
                how = f": failed ({done.failure.kind})" if done.failure else ""
                notes.print(f"{done.count} of {done.total}: {done.task.preset}, seed {done.task.seed}{how}", highlight=False)

        failed = work.reproduce(job, report_done, print_remark)
    events.record(counts={"runs": total - len(failed), "failed": dict(Counter(run.failure.kind for run in failed))})
    report = read_report(job.output, job.paper)
    if any(row.results for row in report.rows):
        console.print(*report.notes, sep="\n", highlight=False, markup=False)
        render_tables(console, report.begun.to_tables())
        if (job.paper, job.table) == ("gella2017", 3):
            from train.reports.gold_ranks import gold_ranks

            ranks = gold_ranks(job.output)
            render_tables(console, ranks.to_tables())
            for path in write_report(job.output, "gella2017-table-3", ranks.to_markdown(), ranks.to_dict()):
                print_line(f"written: {escape(path)}")
    try:
        written = ", ".join(write_report(job.output, job.paper, report.to_markdown(), report.to_dict()))
        if plot and report.begun.sections:
            for kind in formats:
                plot_report(report.begun, Path(job.output, f"{job.paper}.{kind}"))
                written += f", {job.output}/{job.paper}.{kind}"
        print_line(f"written: {escape(written)}")
    except DatasetError as error:
        if not failed:
            raise
        print_remark(str(error), style="red")  # Mostly a full disk, which runs have reported, too.
    if pairs:
        _report_sts(job, pairs, monitoring=monitoring)
    if failed:
        _report_failures(failed, total)
        raise typer.Exit(3)


def _report_failures(failed: Sequence[FailedRun], total: int) -> None:
    """Report failed runs, one line per cause, with the first run of each."""
    from train.reports.row_results import causes_of

    for runs in causes_of(failed):
        count = f"all {total}" if len(runs) == total > 1 else f"{len(runs)} of {total}"
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        failure = runs[0].failure
        print_remark(f"{count} runs failed ({failure.kind}): {runs[0].name}{more}: {failure.reason}", style="red")
    print_remark("the same command retries failed runs", style="")
    if any(run.failure.kind == "diverged" for run in failed):
        print_remark("diverged runs would mostly diverge again: change their settings with --rows and --set", style="")


def _report_sts(job: ReproduceJob, pairs: Sequence[StsPairs], *, monitoring: Monitoring) -> None:
    from pipelines.text.queries import tokenize_query
    from train.reports.row_results import write_report
    from train.sts.paper_rows import measure_sts

    with CountDisplay(notes, "sts", unit="sentences", monitoring=monitoring) as count:
        rows = measure_sts(job, pairs, tokenize_query, count)
    render_tables(console, rows.to_tables())
    for path in write_report(job.output, f"{job.paper}-table-{rows.paper.table}", rows.to_markdown(), rows.to_dict()):
        print_line(f"written: {escape(path)}")

"""The command ``tables``: it turns arguments into a job, and has no logic of its own."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from train.commands.train import pairs

__all__ = ["register"]


class Paper(str, Enum):
    """A paper whose tables there are."""

    gella2017 = "gella2017"
    kadar2018 = "kadar2018"


def register(app: typer.Typer, *, console: Console, notes: Console) -> None:
    """Adds the command to the application.

    Args:
        app: the application.
        console: for results.
        notes: for progress and remarks.
    """

    @app.command(
        epilog="Example: imagepivot tables kadar2018 tables --rows 'bilingual*' --seeds 3 --captions encoded --features features "
        "--vocabulary vocabulary"
    )
    def tables(
        paper: Annotated[Paper, typer.Argument(help="The paper.", show_default=False)],
        output: Annotated[str, typer.Argument(help="Folder of runs, results and report.", show_default=False)],
        captions: Annotated[str, typer.Option("--captions", help="Folder of encoded captions.", show_default=False)],
        features: Annotated[str, typer.Option("--features", help="Folder of image features.", show_default=False)],
        vocabulary: Annotated[str, typer.Option("--vocabulary", help="Folder of the vocabulary.", show_default=False)],
        seeds: Annotated[int, typer.Option("--seeds", help="Runs of each row.")] = 10,
        rows: Annotated[
            list[str] | None,
            typer.Option("--rows", help="Only presets that fit this, e.g. [i]'bilingual*'[/i]; may be repeated."),
        ] = None,
        settings: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="A value of all configurations; may be repeated, see train."),
        ] = None,
        max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="Most steps of a run.")] = None,
        workers: Annotated[
            int, typer.Option("--workers", min=0, help="Runs at a time; 0: one a GPU, or one a core where there is none.")
        ] = 0,
        device: Annotated[
            str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: all GPUs where there are any.")
        ] = "auto",
        precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16; on a GPU also tf32.")] = "fp32",
        plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw OUTPUT/PAPER.png.")] = True,
    ) -> None:
        """Train the rows of a paper's tables, and print what they measure beside what was published.

        Each row is trained with several seeds and measured on the test images of 2016. OUTPUT/PAPER.md and OUTPUT/PAPER.png hold
        the report. It covers whatever OUTPUT has: rows which need other captions or another vocabulary are added by a command of
        their own. A command that was stopped goes on where it was.
        """
        if plot:
            from train.reports.table_plots import (
                plot_report,  # Now: what is not installed is found out before hours of training.
            )
        from train.reports.table_reports import read_report
        from train.reports.tables import Done, TablesJob, run_tables

        overrides = pairs(settings or [])
        if max_steps is not None:
            overrides["schedule.max_steps"] = str(max_steps)
        job = TablesJob(
            paper=paper.value,
            output=output,
            captions=captions,
            features=features,
            vocabulary=vocabulary,
            seeds=seeds,
            rows=tuple(rows or ()),
            overrides=overrides,
            workers=workers,
            device=device,
            precision=precision,
        )

        def watch(done: Done) -> None:
            notes.print(f"{done.count} of {done.total}: {done.task.preset}, seed {done.task.seed}", highlight=False)

        with notes.status("training"):
            run_tables(job, watch)
        report = read_report(job.output, paper.value)
        Path(job.output, f"{paper.value}.md").write_text(report.to_markdown(), encoding="utf-8")
        if plot:
            plot_report(report.begun, Path(job.output, f"{paper.value}.png"))
        for each in (*report.notes, *report.begun.to_tables()):
            console.print(each, highlight=False)
        written = " and ".join(f"{output}/{paper.value}.{kind}" for kind in (("md", "png") if plot else ("md",)))
        console.print(f"written: {escape(written)}", highlight=False, soft_wrap=True)

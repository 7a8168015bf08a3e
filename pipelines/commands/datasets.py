"""The commands ``inspect`` and ``validate``."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer
from rich.markup import escape

from pipelines.commands.binding import command
from pipelines.commands.results import AsJson, console, notes, remark
from schemas.console.tables import render_tables
from schemas.errors import DatasetError
from schemas.escapes import to_json
from schemas.options import Opt

Dataset: TypeAlias = Annotated[str, Opt("Folder of a dataset.")]


@command("inspect features --rows 3")
def inspect(
    dataset: Dataset,
    rows: Annotated[int, Opt("Sample rows to show.", least=0)] = 5,
    failures: Annotated[bool, Opt("List all inputs that failed; with --json one per line.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a dataset: parameters, statistics, failures and sample rows."""
    from pipelines.datasets.inspection import describe, describe_json, failures_table
    from schemas.dataset import open_dataset

    opened = open_dataset(dataset)
    if failures and as_json:
        for row in opened.failures().to_pylist():
            typer.echo(to_json(row))
    elif failures and opened.manifest.failed:
        failures_table(opened).render(console)
    elif failures:
        console.print(f"{escape(dataset)}: nothing failed", highlight=False, soft_wrap=True)
    elif as_json:
        typer.echo(to_json(describe_json(opened, rows=rows), indent=2))
    else:
        render_tables(console, describe(opened, rows=rows))


@command("validate features")
def validate(
    dataset: Dataset,
    mend: Annotated[
        bool,
        Opt(
            "First write anew what the rest determines, and delete what the command that made it must make again.",
            name="repair",
        ),
    ] = False,
    strict: Annotated[bool, Opt("Take files of other tools in the folder for breaches, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every promise of the format on the stored bytes.

    With --repair, damaged shards are deleted, and the same command as before makes them again, and only them.
    """
    from schemas.dataset import open_dataset
    from schemas.overlaps import find_overlap
    from schemas.writing.validation import STRAY
    from schemas.writing.validation import validate as problems_of

    if mend:
        _repair(dataset)
    remarks: list[str] = []
    problems = problems_of(dataset, strict=strict, remark=remarks.append)
    opened = open_dataset(dataset)
    if not problems and opened.kind in ("captions", "encoded") and (overlap := find_overlap(opened)) is not None:
        remarks.append(overlap.remark)
    if as_json:
        found = {"dataset": dataset, "holds": not problems, "problems": problems, "remarks": remarks}
        typer.echo(to_json(found, indent=2))
        raise typer.Exit(1 if problems else 0)
    for text in remarks:
        remark(text)
    for problem in problems:
        notes.print(f"[red]{escape(problem)}[/red]", highlight=False, soft_wrap=True)
    if problems:
        damaged = sum(not problem.endswith(STRAY) for problem in problems)
        advice = "copy it again, mend it with --repair, or make it again with --overwrite"
        advice = advice if damaged else "delete these files, or move them elsewhere"
        raise DatasetError(f"{dataset!r} breaks {len(problems)} promises of the format: {advice}")
    console.print(f"{escape(dataset)}: everything holds", highlight=False)


def _repair(dataset: str) -> None:
    from schemas.writing.output import left_alone
    from schemas.writing.repair import repair

    done = repair(dataset)
    for verb, names in (("written anew", done.mended), ("deleted", done.deleted)):
        for name in names:
            remark(f"{verb}: {name}")
    if done.left_alone:
        remark(left_alone(dataset, done.left_alone))
    if done.missing:
        raise DatasetError(
            f"{dataset!r} lacks {len(done.missing)} files now, e.g. {done.missing[0]!r}: run the command that made it again "
            "(without --overwrite): it keeps what is whole and makes only these"
        )

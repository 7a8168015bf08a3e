"""The command ``build``, and the same from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.commands.options import BEAM, LogJson, SharedDisk, StartTimeout, console, flags_of, notes, remark
from schemas.arguments import key_value_pairs

if TYPE_CHECKING:
    from pipelines.plans.job import Build, BuildJob
    from pipelines.plans.outlook import Outlook

__all__ = ["app", "build_plan", "outlook_of_plan"]

app = typer.Typer()


def build_plan(job: BuildJob, tell: Callable[[str, Mapping[str, Any]], None] = lambda step, event: None) -> Build:
    """Build a plan, as ``imagepivot build`` does.

    Args:
        job: what to build.
        tell: gets the name of a step and an event: those of its command as ``--log-json`` prints them, and ``step`` with a
            ``status`` at its start and end.

    Returns:
        What became of each step.

    Raises:
        UsageError: the plan is not understood.
        ImagepivotError: a step failed, something differs from the lock file, an input is missing, or another build is at work.
    """
    from pipelines.commands.steps import Commands
    from pipelines.plans.building import build

    return build(job, Commands(), tell)


def outlook_of_plan(job: BuildJob) -> Outlook:
    """Return what a build would do, as ``imagepivot build --dry-run`` shows it; nothing is written.

    Raises:
        UsageError: the plan is not understood.
        ImagepivotError: an input is missing or cannot be read.
    """
    from pipelines.commands.steps import Commands
    from pipelines.plans.outlook import look_ahead

    return look_ahead(job, Commands())


@app.command("build", context_settings=BEAM, epilog="Example: imagepivot build multi30k --set paths.photos=/data/flickr30k")
def build_(
    context: typer.Context,
    plan: Annotated[str, typer.Argument(help="A plan of the package, or a file that ends in .toml.", show_default=False)] = "",
    targets: Annotated[
        list[str] | None, typer.Argument(help="Steps to make, with all that they need; all when not given.", show_default=False)
    ] = None,
    output: Annotated[
        str, typer.Option("--output", help="Folder for the results; [i]build/NAME[/i] beside the plan when it names none.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A value in place of the plan's, e.g. [i]paths.photos=/data/photos[/i] or [i]steps.vocabulary.min-count=5[/i]; "
            "may be repeated.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            min=0,
            help="Most steps at a time; 0: all that are independent, but one at a time that computes with a model.",
        ),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make nothing: list the steps, what they would do and why, sizes and times.")
    ] = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Compare with the lock file, and say where something differs; it is not written.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run every step's command, with its --check: what is damaged is made again.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Delete what other values have made, instead of keeping it in OUTPUT/.plan/earlier."),
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="In the end, delete what is kept in OUTPUT/.plan/earlier.")] = False,
    list_plans: Annotated[bool, typer.Option("--list", help="List the plans of the package.")] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=0, help="Worker processes of each step on Beam; as in the plan when not given."),
    ] = None,
    shared_disk: SharedDisk = False,
    start_timeout: StartTimeout = None,
    log_json: LogJson = False,
) -> None:
    """Make a described data set: captions, vocabulary, encoding, features, trainings, each a step that is a command.

    PLAN is a TOML file with a section for each step, or the name of a plan of the package. Steps run in order, side by side where
    independent, and only where something has changed: options, inputs, or the result. What was stopped or killed goes on when the
    same command is given again.

    What each step was made from and what came of it is written to PLAN.lock, with which --locked compares on another machine. Flags
    behind -- go to Beam, for each step that runs on it: -- --runner=DataflowRunner --project=...
    """
    from pipelines.commands.building import Display, print_outlook, print_plans
    from pipelines.plans.job import BuildJob, StepError

    if list_plans:
        print_plans(console)
        return
    job = BuildJob(
        plan=plan,
        targets=tuple(targets or ()),
        output=output,
        settings=key_value_pairs(settings or [], "steps.vocabulary.min-count=5"),
        jobs=jobs,
        workers=workers,
        beam_flags=flags_of(context),
        shared_disk=shared_disk,
        start_timeout=start_timeout,
        check=check,
        replace=replace,
        prune=prune,
        locked=locked,
    )
    if dry_run:
        print_outlook(outlook_of_plan(job), console)
        return
    try:
        with Display(notes, log_json=log_json) as display:
            built = build_plan(job, display)
    except StepError as error:
        if error.code == 3:
            remark(str(error), style="red")
            raise typer.Exit(3) from None
        raise
    display.finish(built, console)

"""Command ``build``: runs the commands of a plan, each in its own process."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.markup import escape

from pipelines.commands.binding import Command, command
from pipelines.commands.results import console, print_line, print_remark
from schemas.conversion import key_value_pairs
from schemas.errors import UsageError
from schemas.options import Opt

_CODE = re.compile(r"[^=]*\.(import|beam[-_]flags)\s*=")


def build_plan(
    plan: str,
    targets: Sequence[str] = (),
    *,
    context: typer.Context,
    output: str = "",
    settings: Mapping[str, str] | None = None,
    overwrite: Sequence[str] = (),
    trust: bool = False,
    dry_run: bool = False,
) -> None:
    """Build a plan; arguments are those of the command, and its context.

    Raises:
        UsageError: the plan is invalid.
        Exit: a step failed; with its exit code.
    """
    from pipelines.plans.plan import StepError, build, command_lines, read_plan
    from schemas.process.steps import run_command

    known_commands: Mapping[str, Command] = context.find_root().command.commands  # type: ignore[attr-defined]
    table = read_plan(plan, known_commands, output=output, settings=settings, trust=trust)
    steps = table.choose(targets)
    table.choose(overwrite)  # Refuses unknown names.
    names = [step.name for step in steps]
    if others := [name for name in overwrite if name not in names]:
        raise UsageError(f"--overwrite {others[0]}: the step is not among those to run: {', '.join(names)}")
    commands = command_lines(steps, known_commands, overwrite)
    if dry_run:
        for step, words in zip(steps, commands, strict=True):
            variables = "".join(f"{name}={shlex.quote(value)} " for name, value in step.environment.items())
            console.print(f"{variables}imagepivot {shlex.join(words)}", highlight=False, markup=False, soft_wrap=True)
        return
    try:
        build(steps, commands, run_command, lambda text: print_remark(text, style="bold"))
    except StepError as error:
        print_remark(str(error), style="red")
        raise typer.Exit(error.code) from None


@command("build multi30k --set paths.photos=/data/flickr30k")
def build_(
    context: typer.Context,
    plan: Annotated[str, Opt("Name of a plan of the package, or a .toml file.", is_argument=True)] = "",
    targets: Annotated[tuple[str, ...], Opt("Steps to run, with all that they need. Default: all.", is_argument=True)] = (),
    output: Annotated[str, Opt("Write results to this folder. Default: the plan's, or [i]build/NAME[/i] beside it.")] = "",
    settings: Annotated[
        tuple[str, ...],
        Opt(
            "Replace a value of the plan, e.g. [i]paths.photos=/data/photos[/i] or "
            "[i]steps.vocabulary.min-count=5[/i]; repeatable.",
            name="set",
            metavar="K=V",
            is_repeated=True,
            code_in=lambda settings: list(filter(_CODE.match, settings)),
        ),
    ] = (),
    overwrite: Annotated[
        tuple[str, ...], Opt("Run this step with --overwrite; repeatable.", metavar="STEP", is_repeated=True)
    ] = (),
    trust: Annotated[bool, Opt("Allow the plan to name code to run, to set any variable, and to write anywhere.")] = False,
    dry_run: Annotated[bool, Opt("Print the commands in order, with their variables, without running them.")] = False,
    list_plans: Annotated[bool, Opt("List the plans of the package.", name="list")] = False,
) -> None:
    """Run the commands of a plan in order.

    PLAN is a TOML file with a section per step, or the name of a plan of the package. Each step is a command
    in its own process; the first failure ends the build with its exit code.

    The same command resumes a stopped build. A step with up-to-date output writes nothing. If its output
    holds another dataset, it fails and names the difference; --overwrite STEP replaces the dataset.
    """
    if list_plans:
        from pipelines.plans.plan import plan_names, read_plan_table

        for name in plan_names():
            print_line(f"[bold]{name}[/bold]  {escape(read_plan_table(name)['description'])}")
        return
    if not plan:
        raise UsageError("name a plan, or a file that ends in .toml; imagepivot build --list lists the plans of the package")
    build_plan(
        plan,
        targets,
        context=context,
        output=output,
        settings=key_value_pairs(settings, "steps.vocabulary.min-count=5"),
        overwrite=overwrite,
        trust=trust,
        dry_run=dry_run,
    )

"""The command ``build``: runs the commands of a plan, each in a process of its own."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from pipelines.commands.binding import bound
from pipelines.commands.configuration import BEAM_FLAGS, convert_options, options_by_key
from pipelines.commands.options import console, remark
from schemas.conversion import key_value_pairs
from schemas.errors import UsageError
from schemas.options import Opt
from schemas.process import steps as processes

app = typer.Typer()


class Commands:
    """The commands, see `pipelines.plans.plan.CommandLine`.

    Args:
        commands: the commands by name.
    """

    def __init__(self, commands: Mapping[str, Any]) -> None:
        self._commands = commands

    def names(self, command: str) -> Mapping[str, str]:
        """Return the names of the parameters of a command by their keys."""
        return {key: option.key for key, option in options_by_key(self._commands[command]).items()}

    def convert(self, command: str, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Check a table of options.

        Raises:
            UsageError: a key is unknown, or a value is of another type.
        """
        return convert_options(table, self._commands[command], place, command)

    def words(self, command: str, values: Mapping[str, Any]) -> list[str]:
        """Return the words of a command line: options, then arguments in their order, then the flags for Beam."""
        bound, flags = self._commands[command].callback, tuple(values.get(BEAM_FLAGS) or ())
        bound.arguments(values, flags)  # Refuses values that the command would refuse.
        words = {key: bound.options[key].words(value) for key, value in values.items() if value is not None}
        options = [word for key, option in bound.options.items() if not option.is_argument for word in words.get(key, ())]
        arguments = [word for key, option in bound.options.items() if option.is_argument for word in words.get(key, ())]
        return [command, *options, *arguments, *(("--", *flags) if flags else ())]


def build_plan(
    plan: str,
    targets: Sequence[str] = (),
    *,
    context: typer.Context,
    output: str = "",
    settings: Mapping[str, str] | None = None,
    overwrite: Sequence[str] = (),
    dry_run: bool = False,
) -> None:
    """Build a plan; the arguments are those of the command, and its context.

    Raises:
        UsageError: the plan is not understood.
        Exit: the command of a step failed; the exit code is that of the step.
    """
    from pipelines.plans.plan import StepError, build, read_plan, words_of

    line = Commands(context.find_root().command.commands)  # type: ignore[attr-defined]
    described = read_plan(plan, line, output=output, settings=settings)
    steps = described.choose(targets)
    described.choose(overwrite)  # Names that are unknown are errors.
    names = [step.name for step in steps]
    if others := [name for name in overwrite if name not in names]:
        raise UsageError(f"--overwrite {others[0]}: the step is not among those to run: {', '.join(names)}")
    commands = words_of(steps, line, overwrite)
    if dry_run:
        for words in commands:
            console.print(f"imagepivot {shlex.join(words)}", highlight=False, markup=False, soft_wrap=True)
        return
    try:
        build(steps, commands, processes.run_command, lambda text: remark(text, style="bold"))
    except StepError as error:
        remark(str(error), style="red")
        raise typer.Exit(error.code) from None


@app.command("build", epilog="Example: imagepivot build multi30k --set paths.photos=/data/flickr30k")
@bound
def build_(
    context: typer.Context,
    plan: Annotated[str, Opt("A plan of the package, or a file that ends in .toml.", is_argument=True)] = "",
    targets: Annotated[
        tuple[str, ...], Opt("Steps to run, with all that they need; all when not given.", is_argument=True)
    ] = (),
    output: Annotated[str, Opt("Folder for the results; [i]build/NAME[/i] beside the plan when it names none.")] = "",
    settings: Annotated[
        tuple[str, ...],
        Opt(
            "A value in place of the plan's, e.g. [i]paths.photos=/data/photos[/i] or [i]steps.vocabulary.min-count=5[/i]; "
            "may be repeated.",
            name="set",
            metavar="K=V",
            is_repeated=True,
        ),
    ] = (),
    overwrite: Annotated[
        tuple[str, ...],
        Opt("Give --overwrite to the command of a step; may be repeated.", metavar="STEP", is_repeated=True),
    ] = (),
    dry_run: Annotated[bool, Opt("Print the commands in order, and run none.")] = False,
    list_plans: Annotated[bool, Opt("List the plans of the package.", name="list")] = False,
) -> None:
    """Run the commands of a plan in order: captions, vocabulary, encoding, features, trainings.

    PLAN is a TOML file with a section for each step, or the name of a plan of the package. Each step is a command in a process of
    its own; the first that fails ends the build with its exit code.

    The same command again continues what was stopped. A step whose output is up to date writes nothing; one whose output holds
    something else fails and names the difference, and --overwrite STEP replaces it.
    """
    if list_plans:
        from pipelines.plans.plan import plan_names, read_table

        for name in plan_names():
            console.print(f"[bold]{name}[/bold]  {escape(read_table(name)['description'])}", highlight=False, soft_wrap=True)
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
        dry_run=dry_run,
    )

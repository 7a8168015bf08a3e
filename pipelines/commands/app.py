"""The command ``imagepivot``: composed here from one group of commands per module; errors become messages and exit codes.

Exit codes: 0 done; 1 the run or check failed; 2 wrong usage; 3 done, but more inputs failed than ``--max-failures`` allows; 130,
143 and 129 stopped by Ctrl-C, SIGTERM and SIGHUP; 141 the reader of the output has ended.
Modules that need Beam or torch are imported by the command that uses them, so that ``--help`` is quick and every command
works with its own extra only.
"""

from __future__ import annotations

import logging
import sys
import traceback
from inspect import getdoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from pipelines.commands import datasets, demo, exchange, features, text, view
from pipelines.commands.configuration import Command
from pipelines.commands.options import console, notes
from pipelines.commands.process import BROKEN_PIPE, flush_streams, prepare_streams, stop_signal, stopped_line
from schemas.errors import ImagepivotError, UsageError
from train.commands import runs, tables, train

if TYPE_CHECKING:
    from schemas.parameters import TextRecipe

__all__ = ["app", "main"]


class _Group(TyperGroup):
    """The command with its sub-commands; the end of the program that reads their output ends them."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise SystemExit(BROKEN_PIPE) from None


app = typer.Typer(
    name="imagepivot",
    cls=_Group,
    help="Prepares data for multilingual image-sentence retrieval: captions and images in, Parquet shards out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXTRAS = {
    "extractors": frozenset({"torch", "torchvision", "PIL", "safetensors"}),
    "pipelines": frozenset({"torch", "torchvision", "PIL", "safetensors", "apache_beam", "sacremoses", "ijson"}),
    "train": frozenset({"torch", "matplotlib", "tensorboard"}),
    "hdf5": frozenset({"h5py"}),
    "timm": frozenset({"timm"}),
}
"""The modules that each extra brings."""

_NEEDS = {
    **dict.fromkeys(("captions", "vocabulary", "encode", "features", "view", "import", "export", "demo"), "pipelines"),
    **dict.fromkeys(("train", "evaluate", "embed", "search", "tables"), "train"),
}
"""The extra that a command needs for all that it does."""


def _tokenize(text: str, language: str, steps: TextRecipe | None, truecaser: str) -> list[str]:
    from pipelines.text.queries import tokenize_query

    return tokenize_query(text, language, steps, truecaser)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        console.print(f"imagepivot {version('imagepivot')}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    context.obj = _tokenize  # Queries are tokenized as captions are, by a package that `train` must not import.


def _add(group: typer.Typer) -> None:
    """Add the commands of a group, with the paragraphs of their help on one line each: the terminal wraps them."""
    for command in group.registered_commands:
        command.cls = Command
        paragraphs = (getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.add_typer(group)


for _group in (
    *(text.app, features.app, datasets.app, view.app, demo.app, exchange.app),
    *(train.app, runs.app, tables.app),
):
    _add(_group)


def main() -> None:
    """Run the command, and turn errors into messages and exit codes."""
    logging.basicConfig(level=logging.ERROR)
    prepare_streams()
    Console.on_broken_pipe = _end_of_pipe  # type: ignore[method-assign]  # Typer and `train` have consoles of their own.
    code: Any = 0
    try:
        app()
    except BaseException as error:
        code = _code_of(error)
        if code is None:
            raise
    failed = flush_streams()
    if isinstance(failed, BrokenPipeError):
        code = BROKEN_PIPE
    elif failed is not None:
        code = _say(f"cannot write the output: {failed.strerror}")
    sys.exit(code)


def _code_of(error: BaseException) -> Any:
    """Print what a user should know about the end of a command, and return the exit code; None for a fault of ours."""
    code = error.code or 0 if isinstance(error, SystemExit) else None
    if stop_signal():  # Whatever became of the interrupt; `stoppable` ends the process with a line.
        return 128 + stop_signal()
    if code == 130 or isinstance(error, KeyboardInterrupt):
        notes.print(stopped_line(), highlight=False, soft_wrap=True)
        return 130
    if isinstance(error, ImagepivotError):
        return _say(str(error), code=2 if isinstance(error, UsageError) else 1)
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_for((error.name or "").partition(".")[0])):
        return _say(f"this command needs {error.name}, which is not installed: pip install 'imagepivot[{extra}]'")
    if isinstance(error, OSError) and _is_of_output(error):
        flush_streams()
        return _say(f"cannot write the output: {error.strerror}")
    return code


def _is_of_output(error: OSError) -> bool:
    """Return whether an error was raised where results are printed."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("rich", "typer", "click")


def _extra_for(module: str) -> str | None:
    """Return the extra that brings a module: the one that the command needs, or else the smallest; None if none does."""
    command = "".join(sys.argv[1:2])
    return next((extra for extra in (_NEEDS.get(command, ""), *_EXTRAS) if module in _EXTRAS.get(extra, ())), None)


def _say(message: str, *, code: int = 1) -> int:
    notes.print(f"[bold red]Error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)
    return code


def _end_of_pipe(self: Console) -> None:
    self.quiet = True
    raise SystemExit(BROKEN_PIPE)

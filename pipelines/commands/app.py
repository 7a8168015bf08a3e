"""The command ``imagepivot``: composed here from one group of commands per module; errors become messages and exit codes.

Exit codes: 0 done; 1 the run or check failed; 2 wrong usage; 3 done, but more inputs failed than ``--max-failures`` allows.
Modules that need Beam or torch are imported by the command that uses them, so that ``--help`` is quick and every command
works with its own extra only.
"""

from __future__ import annotations

import logging
import sys
from inspect import getdoc
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from pipelines.commands import datasets, demo, exchange, features, text, view
from pipelines.commands.configuration import Command
from pipelines.commands.options import console, notes
from schemas.errors import ImagepivotError, UsageError
from train.commands import runs, tables, train

if TYPE_CHECKING:
    from schemas.parameters import TextRecipe

__all__ = ["app", "main"]

app = typer.Typer(
    name="imagepivot",
    help="Prepares data for multilingual image-sentence retrieval: captions and images in, Parquet shards out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXTRAS = {
    "apache_beam": "pipelines",
    "ijson": "pipelines",
    "matplotlib": "train",
    "sacremoses": "pipelines",
    "PIL": "extractors",
    "safetensors": "extractors",
    "tensorboard": "train",
    "torch": "extractors",
    "torchvision": "extractors",
}
_TRAINING = frozenset({"train", "evaluate", "embed", "search", "tables"})


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
    try:
        app()
    except ImagepivotError as error:
        notes.print(f"[bold red]Error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        extra = "train" if missing == "torch" and _TRAINING.intersection(sys.argv[1:2]) else _EXTRAS[missing]
        notes.print(
            f"[bold red]Error:[/bold red] this command needs {error.name}, which is not installed: "
            f"pip install 'imagepivot\\[{extra}]'",
            highlight=False,
        )
        sys.exit(1)
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C, as typer hands it on.
            kept = "the last checkpoint is kept, --resume continues from it"
            if sys.argv[1:2] != ["train"]:
                kept = "finished shards are kept, the same command continues from here"
            notes.print(f"stopped; {kept}", highlight=False)
        raise

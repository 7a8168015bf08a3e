"""Program ``imagepivot``: its commands, consoles and error handling.

Exit codes:

- 0: done
- 1: the run or check failed
- 2: wrong usage
- 3: done, but more inputs failed than ``--max-failures`` allows, or runs of ``reproduce`` failed
- 130, 143, 129: stopped by Ctrl-C, SIGTERM, SIGHUP
- 141: the reader of the output has ended

Commands import Beam and torch when they run: ``--help`` is fast, and each command needs its own extra only.
"""

import logging
import sys
import warnings
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pipelines.commands import build, data, datasets, demo, doctor, looking, training
from pipelines.commands.binding import TextParameters
from pipelines.commands.exit_codes import run
from pipelines.commands.results import console, print_line, print_remark, set_console_of_typer
from schemas.console import events
from schemas.drawing.fonts import FontWarning
from schemas.process.shutdown import CLOSED_PIPE

_PANELS = {
    "Data": (
        *(data.captions, data.vocabulary, data.encode, data.word_vectors, data.text_features),
        *(datasets.inspect, datasets.validate, datasets.duplicates, looking.report),
    ),
    "Features": (data.features, data.extractors, datasets.view, doctor.doctor),
    "Training": (training.train, training.reproduce, build.build_, demo.demo),
    "Results": (training.evaluate, training.compare, training.embed, looking.search, training.sts, training.figures),
    "Exchange": (datasets.import_, datasets.export, datasets.publish, datasets.diff),
}
"""Commands by panel of ``--help``."""

_FIRST_STEPS = """\
[bold]imagepivot[/bold] prepares data for multilingual image-sentence retrieval, and
trains and evaluates models.

imagepivot demo                         try everything on drawn scenes
imagepivot captions SOURCE captions -h  tokenize captions; vocabulary, encode
imagepivot features IMAGES features -h  extract features of your images
imagepivot train --list-presets         train a model of a paper, or your own
imagepivot inspect DATASET              show a dataset; validate checks it
imagepivot doctor                       check devices, weights and stores
imagepivot --help                       list all commands"""
"""Output of ``imagepivot`` alone."""
_MODULES_OF_EXTRAS = {"text (apache-beam)": "apache_beam", "train (torch)": "torch"}
"""Extras that ``imagepivot`` alone names if their module is missing."""

_show_any_warning = warnings.showwarning  # `main` replaces it.


class _Group(TextParameters, TyperGroup):
    """Group of the commands; a closed pipe at the output ends them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, commands in _PANELS.items():
            for command in commands:
                command.rich_help_panel = panel
                self.add_command(command)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        set_console_of_typer()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise SystemExit(CLOSED_PIPE) from None


app = typer.Typer(
    name="imagepivot",
    cls=_Group,
    help="Prepare data for multilingual image-sentence retrieval, and train and evaluate models.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    if context.invoked_subcommand is None:
        print_line(_FIRST_STEPS)
        missing = [extra for extra, module in _MODULES_OF_EXTRAS.items() if find_spec(module) is None]
        if missing:
            print_line(f"Not installed yet: {', '.join(missing)}. To install everything: pip install 'imagepivot\\[all]'")


def main() -> None:
    """Run the command, and exit with its code."""
    logging.basicConfig(level=logging.ERROR)
    events.show_remarks(print_remark)
    warnings.showwarning = _show_warning
    words = sys.argv[1:]
    if "--log-json" in words[: words.index("--") if "--" in words else None]:
        events.start()  # Before parsing: usage errors are events, too.
    sys.exit(run(app))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **named: Any
) -> None:
    """Show our warnings as remarks, others as Python does."""
    if issubclass(category, FontWarning):
        print_remark(str(message))
    else:
        _show_any_warning(message, category, filename, lineno, *more, **named)

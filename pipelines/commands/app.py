"""The command ``imagepivot``: turns arguments into jobs, and errors into messages and exit codes. No logic of its own.

Exit codes: 0 done; 1 the run or check failed; 2 wrong usage; 3 done, but more inputs failed than ``--max-failures`` allows.
Modules that need Beam or torch are imported by the command that uses them, so that ``--help`` is quick and every command
works with its own extra only.
"""

from __future__ import annotations

import logging
import sys
from enum import Enum
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from pipelines.commands import exchange, view
from pipelines.commands import features as features_cli
from pipelines.commands.options import (
    BEAM,
    LogJson,
    MaxFailures,
    Output,
    Overwrite,
    Shards,
    Workers,
    console,
    execution_of,
    notes,
    several,
)
from pipelines.commands.results import finish
from pipelines.running.packages import resolve_our_packages_first

resolve_our_packages_first()  # Before the first import of another package of ours.

from schemas.errors import ImagepivotError, UsageError  # noqa: E402
from train.commands import runs as evaluation_cli  # noqa: E402
from train.commands import tables as tables_cli  # noqa: E402
from train.commands import train as train_cli  # noqa: E402

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


class CaptionFormat(str, Enum):
    """How raw captions are laid out."""

    multi30k = "multi30k"
    karpathy = "karpathy"
    coco = "coco"
    table = "table"


class CountScope(str, Enum):
    """What the threshold of a vocabulary is compared with."""

    language = "language"
    joint = "joint"


Languages = Annotated[str, typer.Option("--languages", help="Only these, e.g. [i]en,de[/i]; all when not given.")]
Portions = Annotated[
    str, typer.Option("--portions", help="Only these: [i]translation[/i], [i]comparable[/i]; all when not given.")
]


@app.command(
    context_settings=BEAM,
    epilog="Example: imagepivot captions multi30k build/captions --format multi30k --languages en,de",
)
def captions(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="File or folder with the raw captions.", show_default=False)],
    output: Output,
    format: Annotated[CaptionFormat, typer.Option("--format", help="How SOURCE is laid out.", show_default=False)],  # noqa: A002
    recipe: Annotated[
        str, typer.Option("--recipe", help="Text recipe: [i]multi30k-lc[/i], [i]moses-truecase[/i] or [i]raw[/i].")
    ] = "multi30k-lc",
    languages: Languages = "",
    portions: Portions = "",
    splits: Annotated[str, typer.Option("--splits", help="Only these, as the source names them; all when not given.")] = "",
    columns: Annotated[str, typer.Option("--columns", help="Columns of a table, e.g. [i]image_id=file,text=caption[/i].")] = "",
    language: Annotated[str, typer.Option("--language", help="Language of captions whose source does not say it.")] = "en",
    truecaser: Annotated[
        str, typer.Option("--truecaser", help="Folder with learned truecasers (LANGUAGE.model); learned when not given.")
    ] = "",
    train_splits: Annotated[str, typer.Option("--train-splits", help="Splits that truecasers are learned from.")] = "train",
    shards: Shards = 16,
    max_failures: MaxFailures = 0,
    overwrite: Overwrite = False,
    log_json: LogJson = False,
    workers: Workers = 0,
) -> None:
    """Tokenize raw captions into shards.

    SOURCE is, by --format: [b]multi30k[/b] the folder with task1 and task2; [b]karpathy[/b] a dataset_flickr30k.json or the
    like; [b]coco[/b] a captions_SPLIT.json or a folder of them; [b]table[/b] a CSV, TSV, JSON lines or Parquet file with the
    columns image_id, text and, if there are any, language, portion, index and split.

    An empty caption becomes a failure row. Flags behind -- go to Beam: -- --runner=DataflowRunner --project=...
    """
    from pipelines.inputs.captions import Selection, open_source, parse_columns
    from pipelines.running.progress import show_progress
    from pipelines.text.captions import CaptionsJob, prepare_captions

    job = CaptionsJob(
        source=open_source(format.value, source, language=language, columns=parse_columns(columns) if columns else None),
        output=output,
        selection=Selection(several(languages), several(portions), several(splits)),
        recipe=recipe,
        train_splits=several(train_splits),
        truecaser=truecaser or None,
        shards=shards,
        overwrite=overwrite,
    )
    with show_progress(notes, "captions", unit="captions", log_json=log_json) as meter:
        manifest = prepare_captions(job, execution_of(context, workers), meter)
    finish(manifest, output, max_failures)


@app.command(
    context_settings=BEAM,
    epilog="Example: imagepivot vocabulary build/captions build/vocabulary --min-count 4",
)
def vocabulary(
    context: typer.Context,
    captions: Annotated[str, typer.Argument(help="Folder of a captions dataset.", show_default=False)],
    output: Output,
    min_count: Annotated[int, typer.Option("--min-count", help="A token is kept when its count is at least this.")] = 4,
    count_scope: Annotated[
        CountScope,
        typer.Option("--count-scope", help="The count within at least one [i]language[/i], or the [i]joint[/i] count of all."),
    ] = CountScope.language,
    languages: Languages = "",
    portions: Portions = "",
    splits: Annotated[str, typer.Option("--splits", help="Splits that are counted.")] = "train",
    overwrite: Overwrite = False,
    workers: Workers = 1,
) -> None:
    """Build the joint vocabulary of captions: tokens under the threshold become <unk>.

    Writes a Parquet shard (id, token, count, counts by language) and vocabulary.txt, and prints how the languages' own
    vocabularies overlap.
    """
    from pipelines.text.vocabulary import VocabularyJob, build_vocabulary

    job = VocabularyJob(
        captions=captions,
        output=output,
        min_count=min_count,
        count_scope=count_scope.value,
        splits=several(splits),
        languages=several(languages),
        portions=several(portions),
        overwrite=overwrite,
    )
    with notes.status("counting tokens"):
        manifest = build_vocabulary(job, execution_of(context, workers))
    finish(manifest, output)


@app.command(
    context_settings=BEAM, epilog="Example: imagepivot encode build/captions build/vocabulary build/encoded --max-length 100"
)
def encode(
    context: typer.Context,
    captions: Annotated[str, typer.Argument(help="Folder of a captions dataset.", show_default=False)],
    vocabulary: Annotated[str, typer.Argument(help="Folder of a vocabulary.", show_default=False)],
    output: Output,
    max_length: Annotated[int, typer.Option("--max-length", help="Most tokens kept; <start> and <end> come on top.")] = 100,
    overwrite: Overwrite = False,
    log_json: LogJson = False,
    workers: Workers = 0,
) -> None:
    """Turn the tokens of captions into ids of a vocabulary."""
    from pipelines.running.progress import show_progress
    from pipelines.text.encoding import EncodeJob, encode_captions

    job = EncodeJob(captions=captions, vocabulary=vocabulary, output=output, max_length=max_length, overwrite=overwrite)
    with show_progress(notes, "encode", unit="captions", log_json=log_json) as meter:
        manifest = encode_captions(job, execution_of(context, workers), meter)
    finish(manifest, output)


features_cli.register(app, console=console, notes=notes, finish=finish)


@app.command(epilog="Example: imagepivot inspect build/features --rows 3")
def inspect(
    dataset: Annotated[str, typer.Argument(help="Folder of a dataset.", show_default=False)],
    rows: Annotated[int, typer.Option("--rows", min=0, help="Sample rows that are shown.")] = 5,
) -> None:
    """Show what a dataset is: parameters, statistics, failures and sample rows."""
    from pipelines.datasets.inspection import describe
    from schemas.dataset import open_dataset

    console.print(describe(open_dataset(dataset), rows=rows))


@app.command(epilog="Example: imagepivot validate build/features")
def validate(dataset: Annotated[str, typer.Argument(help="Folder of a dataset.", show_default=False)]) -> None:
    """Check every promise of the format again, on the bytes as they lie there."""
    from schemas.validation import validate as problems_of

    problems = problems_of(dataset)
    for problem in problems:
        notes.print(f"[red]{escape(problem)}[/red]", highlight=False, soft_wrap=True)
    if problems:
        raise ImagepivotError(f"{dataset!r} breaks {len(problems)} promises of the format: make it again, or copy it again")
    console.print(f"{escape(dataset)}: everything holds", highlight=False)


@app.command(epilog="Example: imagepivot demo build/demo --scenes 300")
def demo(
    output: Annotated[Path, typer.Argument(help="Folder for the scenes and the datasets.")] = Path("build/demo"),
    scenes: Annotated[int, typer.Option("--scenes", help="Number of scenes that are drawn.")] = 300,
) -> None:
    """Run everything on scenes that are drawn here: captions in four languages, vocabulary, encoding, features, regions, training.

    A small model is trained for some seconds, measured on scenes that were held out, and asked one query in each language.
    """
    from pipelines.demo.run import run_demo
    from train.demo import train_demo

    run_demo(output, scenes=scenes, console=console, notes=notes)
    train_demo(output, console=console, notes=notes, tokenize=_tokenize)


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
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


app.add_typer(exchange.app)
app.add_typer(view.app)
train_cli.register(app, console=console, notes=notes)
evaluation_cli.register(app, console=console, notes=notes, tokenize=_tokenize)
tables_cli.register(app, console=console, notes=notes)

for _command in (*app.registered_commands, *exchange.app.registered_commands, *view.app.registered_commands):
    # The terminal wraps lines, not the source file: one line a paragraph.
    _paragraphs = (getdoc(_command.callback) or "").split("\n\n")
    _command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in _paragraphs)


def main() -> None:
    """Entry point of the command."""
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
            kept = "the last checkpoint is kept, --resume goes on from it"
            if sys.argv[1:2] != ["train"]:
                kept = "finished shards are kept, the same command goes on from here"
            notes.print(f"stopped; {kept}", highlight=False)
        raise


if __name__ == "__main__":
    main()

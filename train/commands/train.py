"""The command ``train``: turns arguments into a training."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from schemas.console import events
from schemas.errors import UsageError
from schemas.interruption import leaving
from train.commands.options import (
    AllowMissingFeatures,
    Device,
    LogJson,
    MemoryMap,
    Precision,
    Settings,
    TokenFeatures,
    WordVectors,
    console,
    notes,
    overrides_of,
    presets,
    remark,
)

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="Example: imagepivot train kadar2018/bilingual-c2c runs/c2c --captions encoded --features features "
    "--vocabulary vocabulary"
)
def train(
    config: Annotated[
        str, typer.Argument(help="Name of a preset, or a TOML file.", show_default=False, autocompletion=presets)
    ] = "",
    output: Annotated[str, typer.Argument(help="Folder of the run.", show_default=False)] = "",
    captions: Annotated[str, typer.Option("--captions", help="Folder of encoded captions.", show_default=False)] = "",
    features: Annotated[str, typer.Option("--features", help="Folder of image features or regions.", show_default=False)] = "",
    vocabulary: Annotated[
        str, typer.Option("--vocabulary", help="Folder of the vocabulary of the captions.", show_default=False)
    ] = "",
    word_vectors: WordVectors = "",
    token_features: TokenFeatures = "",
    settings: Settings = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed for initial weights, order and sampling.")] = 0,
    device: Device = "auto",
    precision: Precision = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Compile model and loss; needs a GPU; not for SCAN.")] = False,  # noqa: A002
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUTPUT, if there is one.")] = False,
    allow_changed_content: Annotated[
        bool,
        typer.Option("--allow-changed-content", help="Resume although datasets, such as features, were updated since."),
    ] = False,
    start_from: Annotated[
        str,
        typer.Option(
            "--from", metavar="RUN", help="Start from the best weights of another run; its words and languages may differ."
        ),
    ] = "",
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, help="Maximum of steps: short for [i]--set schedule.max_steps=N[/i].")
    ] = None,
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between two checkpoints.")] = 500,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard/--no-tensorboard", help="Write events for TensorBoard into OUTPUT.")
    ] = True,
    curves: Annotated[bool, typer.Option("--curves/--no-curves", help="Draw OUTPUT/curves.png.")] = True,
    memory_map: MemoryMap = "",
    allow_missing_features: AllowMissingFeatures = False,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="List the presets.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the full configuration, and train nothing.")] = False,
    log_json: LogJson = False,
) -> None:
    """Train a joint embedding of images and sentences.

    CONFIG is a preset, which is a row of a paper's table, or a TOML file of your own: any value that it leaves out comes from the
    preset that it [b]extends[/b], or is a default.

    Training stops early by the sum of recalls on the validation split. OUTPUT then holds best.pt, last.pt, config.toml,
    log.jsonl, and made of the latter metrics.csv and curves.png. Ctrl-C stops after the current step and saves it; pressed again,
    it stops at once. A run that was stopped continues with --resume, on a CPU to the same weights, unless
    the number of threads or the content of its datasets has changed.
    """
    from train.config.presets import preset_names
    from train.config.sections import resolve, to_toml

    if list_presets:
        for name in preset_names():
            console.print(f"[bold]{name}[/bold]  {escape(resolve(name).description)}", highlight=False, soft_wrap=True)
        return
    if not config:
        raise UsageError("name a preset or a TOML file; imagepivot train --list-presets lists the presets")
    resolved = resolve(config, overrides_of(settings, max_steps))
    if show:
        console.print(to_toml(resolved), highlight=False, markup=False, soft_wrap=True, end="")
        return

    from train import loop
    from train.data.corpus import Corpus
    from train.progress import TrainingDisplay

    job = loop.TrainJob(
        config=resolved,
        corpus=Corpus(captions, features, vocabulary, word_vectors, token_features),
        output=output,
        seed=seed,
        device=device,
        precision=precision,
        compile=compile,
        resume=resume,
        save_every=save_every,
        tensorboard=tensorboard,
        curves=curves,
        memory_map=memory_map or None,
        allow_missing_features=allow_missing_features,
        start_from=start_from,
        allow_changed_content=allow_changed_content,
    )
    with leaving("stopped before training began; nothing was changed"), TrainingDisplay(notes, log_json=log_json) as watch:
        progress = loop.train(job, watch, remark).progress
    events.record(counts={"steps": progress.step})
    console.print(
        f"[bold]run[/bold]: {progress.step:,} steps in {escape(output)}, ended by {progress.stop_reason}; best sum of recalls "
        f"{progress.best_score:.1f} at step {progress.best_step:,}",
        highlight=False,
        soft_wrap=True,
    )

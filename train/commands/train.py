"""The command ``train``: it turns arguments into a training, and has no logic of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from schemas.errors import UsageError

__all__ = ["pairs", "register"]


def register(app: typer.Typer, *, console: Console, notes: Console) -> None:
    """Adds the command to the application.

    Args:
        app: the application.
        console: for results.
        notes: for progress and remarks.
    """

    @app.command(
        epilog="Example: imagepivot train kadar2018/bilingual-c2c runs/c2c --captions encoded --features features "
        "--vocabulary vocabulary"
    )
    def train(
        config: Annotated[str, typer.Argument(help="Name of a preset, or a TOML file.", show_default=False)] = "",
        output: Annotated[str, typer.Argument(help="Folder of the run.", show_default=False)] = "",
        captions: Annotated[str, typer.Option("--captions", help="Folder of encoded captions.", show_default=False)] = "",
        features: Annotated[str, typer.Option("--features", help="Folder of image features.", show_default=False)] = "",
        vocabulary: Annotated[
            str, typer.Option("--vocabulary", help="Folder of the vocabulary of the captions.", show_default=False)
        ] = "",
        settings: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help="A value of the configuration, e.g. [i]model.embedding=256[/i]; may be repeated.",
            ),
        ] = None,
        seed: Annotated[int, typer.Option("--seed", min=0, help="Of first weights, order, and whatever is drawn.")] = 0,
        device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: a GPU where there is one.")] = "auto",
        precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16; on a GPU also tf32.")] = "fp32",
        compile: Annotated[bool, typer.Option("--compile", help="Compile model and loss; needs a GPU.")] = False,  # noqa: A002
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUTPUT, if there is one.")] = False,
        max_steps: Annotated[
            int | None, typer.Option("--max-steps", min=1, help="Most steps: short for [i]--set schedule.max_steps=N[/i].")
        ] = None,
        save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between two checkpoints.")] = 500,
        tensorboard: Annotated[
            bool, typer.Option("--tensorboard/--no-tensorboard", help="Write events for TensorBoard into OUTPUT.")
        ] = True,
        memory_map: Annotated[
            str, typer.Option("--memory-map", help="Folder for a copy of features that do not fit into memory.")
        ] = "",
        list_presets: Annotated[bool, typer.Option("--list-presets", help="List the presets.")] = False,
        show: Annotated[bool, typer.Option("--show", help="Print the configuration in full, and train nothing.")] = False,
    ) -> None:
        """Train a joint embedding of images and sentences.

        CONFIG is a preset, which is a row of a paper's table, or a TOML file of your own: what it does not say is taken from the
        preset that it [b]extends[/b], or has a default.

        Training stops early by the sum of recalls on the validation split. OUTPUT then holds best.pt, last.pt, config.toml and
        log.jsonl. A run that was stopped goes on with --resume, to the same weights on a CPU.
        """
        from train.config.presets import preset_names
        from train.config.sections import resolve, to_toml

        if list_presets:
            for name in preset_names():
                console.print(f"[bold]{name}[/bold]  {escape(resolve(name).description)}", highlight=False, soft_wrap=True)
            return
        if not config:
            raise UsageError("name a preset or a TOML file; imagepivot train --list-presets lists the presets")
        overrides = pairs(settings or [])
        if max_steps is not None:
            overrides["schedule.max_steps"] = str(max_steps)
        resolved = resolve(config, overrides)
        if show:
            console.print(to_toml(resolved), highlight=False, markup=False, soft_wrap=True, end="")
            return
        for name, value in {
            "OUTPUT": output,
            "--captions": captions,
            "--features": features,
            "--vocabulary": vocabulary,
        }.items():
            if not value:
                raise UsageError(
                    f"{name} is missing: imagepivot train CONFIG OUTPUT --captions ... --features ... --vocabulary ..."
                )

        from train.loop import train as run_training
        from train.progress import ProgressLine

        with ProgressLine(notes) as watch:
            result = run_training(
                resolved,
                captions=captions,
                features=features,
                vocabulary=vocabulary,
                output=output,
                seed=seed,
                device=device,
                precision=precision,
                compile=compile,
                resume=resume,
                save_every=save_every,
                tensorboard=tensorboard,
                memory_map=memory_map or None,
                watch=watch,
            )
        standing = result.standing
        console.print(
            f"[bold]run[/bold]: {standing.step:,} steps in {escape(output)}, ended by {standing.stopped}; best sum of recalls "
            f"{standing.best_score:.1f} at step {standing.best_step:,}",
            highlight=False,
            soft_wrap=True,
        )


def pairs(settings: list[str]) -> dict[str, str]:
    """Dotted keys and values of ``KEY=VALUE``.

    Raises:
        UsageError: a setting is of another form.
    """
    pairs = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {setting!r} is not KEY=VALUE, e.g. --set optimizer.learning_rate=1e-3")
        pairs[key.strip()] = value.strip()
    return pairs

"""Consoles and options that several commands share, and how the text of an option becomes values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from schemas.console import events
from schemas.conversion import key_value_pairs
from schemas.escapes import escape_text

if TYPE_CHECKING:
    from schemas.manifest import Manifest

__all__ = [
    "AllowMissingFeatures",
    "AsJson",
    "Captions",
    "Device",
    "Features",
    "LogJson",
    "MemoryMap",
    "Precision",
    "Settings",
    "TokenFeatures",
    "Vocabulary",
    "WordVectors",
    "console",
    "notes",
    "overrides_of",
    "presets",
    "record_written",
    "remark",
    "several",
]

console = Console()
"""For results."""

notes = Console(stderr=True)
"""For progress and remarks."""


def _log_json(context: typer.Context, value: bool) -> bool:
    if value and not context.resilient_parsing:
        events.start()
    return value


def presets(incomplete: str) -> list[str]:
    """Complete the name of a preset; the shell itself completes the name of a file."""
    from train.config.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def _devices(incomplete: str) -> list[str]:
    return [name for name in ("auto", "cpu", "cuda", "cuda:0") if name.startswith(incomplete)]


def _precisions(incomplete: str) -> list[str]:
    return [name for name in ("fp32", "bf16", "tf32") if name.startswith(incomplete)]


Captions = Annotated[str, typer.Option("--captions", help="Folder of encoded captions.", show_default=False)]
Features = Annotated[str, typer.Option("--features", help="Folder of image features or regions.", show_default=False)]
Vocabulary = Annotated[str, typer.Option("--vocabulary", help="Folder of the vocabulary of the captions.", show_default=False)]
WordVectors = Annotated[
    str,
    typer.Option(
        "--word-vectors", help="Folder of pretrained word vectors, for [i]model.word_vectors[/i] finetuned or frozen."
    ),
]
TokenFeatures = Annotated[
    str,
    typer.Option(
        "--token-features",
        help="Folder of vectors of tokens, for a model that reads these: [i]model.word_vectors[/i] precomputed.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: a GPU if there is one.", autocompletion=_devices)
]
Precision = Annotated[str, typer.Option("--precision", help="fp32 or bf16; on a GPU also tf32.", autocompletion=_precisions)]
MemoryMap = Annotated[
    str,
    typer.Option(
        "--memory-map", help="Folder for a copy of the features, which is mapped into memory and which all runs share."
    ),
]
AllowMissingFeatures = Annotated[
    bool, typer.Option("--allow-missing-features", help="Leave out captions whose images lack features, and say how many.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value of the configuration, e.g. [i]model.embed_dim=256[/i], [i]data.l2_features=true[/i] or "
        "[i]'schedule.monitor_languages=[\"en\"]'[/i]; may be repeated.",
    ),
]
LogJson = Annotated[
    bool,
    typer.Option("--log-json", callback=_log_json, is_eager=True, help="Make stderr lines of JSON, for programs that watch."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def remark(text: str, style: str = "yellow") -> None:
    """Say something on standard error, in a style of rich's, or as an event."""
    if not events.emit("remark", message=text):
        notes.print(Text(escape_text(text, lines=True), style=style), soft_wrap=True)


def record_written(manifests: Sequence[Manifest]) -> None:
    """Record for the last event what was written."""
    rows, shards = (sum(counts) for counts in zip(*((m.rows, len(m.shards)) for m in manifests), strict=True))
    events.record(counts={"rows": rows, "shards": shards, "failed": {}})


def several(text: str) -> tuple[str, ...]:
    """Split the text of an option that takes several values, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def overrides_of(settings: Sequence[str] | None, max_steps: int | None) -> dict[str, str]:
    """Return the values that ``--set`` and ``--max-steps`` put into a configuration.

    Raises:
        UsageError: a setting is not of the form ``KEY=VALUE``.
    """
    overrides = key_value_pairs(settings or [], "optimizer.learning_rate=1e-3")
    if max_steps is not None:
        overrides["schedule.max_steps"] = str(max_steps)
    return overrides

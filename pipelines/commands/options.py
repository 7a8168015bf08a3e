"""Consoles, options that several commands share, and remarks."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from rich.console import Console
from rich.text import Text

from schemas.console import events
from schemas.escapes import escape_text
from schemas.options import Opt

console = Console()
"""For results, on standard output."""

notes = Console(stderr=True)
"""For progress and remarks, on standard error."""

MaxFailures: TypeAlias = Annotated[int, Opt("Inputs that may fail before the exit code is 3.", least=0)]
LogJson: TypeAlias = Annotated[bool, Opt("Make stderr lines of JSON, for programs that watch.")]
AsJson: TypeAlias = Annotated[bool, Opt("Print JSON.", name="json")]


def remark(text: str, style: str = "yellow") -> None:
    """Say something on standard error, in a style of rich's, or as an event."""
    if not events.emit("remark", message=text):
        notes.print(Text(escape_text(text, lines=True), style=style), soft_wrap=True)


def remark_on_precision(precision: str, device: str) -> None:
    """Say where the processor only emulates the precision that is asked for."""
    from schemas.process.resources import bfloat16_remark

    sentence = bfloat16_remark(precision, "cpu") if device in ("cpu", "auto") else ""
    if sentence and device == "auto":  # To look for a GPU loads torch.
        from extractors.computing.devices import resolve_device

        sentence = bfloat16_remark(precision, resolve_device(device).type)
    if sentence:
        remark(sentence)

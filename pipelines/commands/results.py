"""Output of the commands: consoles, remarks, summaries of written datasets."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeAlias

import rich.console
import typer
from rich.markup import escape
from rich.text import Text

from schemas.console import events
from schemas.console.progress import format_duration
from schemas.console.tables import render_tables
from schemas.escapes import counted, escape_text
from schemas.options import Opt
from schemas.process.shutdown import stop_at_closed_pipe
from schemas.writing.reuse_policy import FailureLimit

if TYPE_CHECKING:
    from rich.segment import Segment

    from schemas.manifest import Manifest


class Console(rich.console.Console):
    """Console that escapes control characters of data, and ends with its reader."""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render as rich does, with escaped text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_text(segment.text, lines=True))

    def on_broken_pipe(self) -> None:
        """Stop the command."""
        self.quiet = True
        stop_at_closed_pipe()


def set_console_of_typer() -> None:
    """Let typer print help and usage errors on our consoles."""
    from typer import rich_utils  # Only help and errors need it.

    rich_utils.Console = Console  # type: ignore[misc]


console = Console()
"""For results, on standard output."""

notes = Console(stderr=True)
"""For progress and remarks, on standard error."""

MaxFailures: TypeAlias = Annotated[
    FailureLimit,
    Opt("Exit with code 3 if more inputs fail than this number or share ([i]1%[/i]).", metavar="N"),
]
AsJson: TypeAlias = Annotated[bool, Opt("Print JSON.", name="json")]

_LARGE_UPDATE = 1e9  # Bytes; rewriting less takes seconds.

_started = time.monotonic()  # The program imports this module before it runs a command.
_NOT_SHOWN = {"images", "failed", "listing", "content"}  # Statistics in the summary already, or digests.


def print_remark(text: str, style: str = "yellow") -> None:
    """Print a remark on standard error, in a style of rich's, or as an event."""
    if not events.emit("remark", message=text, severity="INFO" if style == "dim" else "WARNING"):
        notes.print(Text(escape_text(text, lines=True), style=style), soft_wrap=True)


def print_line(text: str) -> None:
    """Print a line of a result, in rich's markup."""
    console.print(text, highlight=False, soft_wrap=True)


def print_dataset(manifest: Manifest, output: str) -> None:
    """Print a line about a written dataset."""
    size = sum(entry.bytes for entry in manifest.shards)
    size_text = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
    facts = [f"{manifest.failed:,} failed", size_text, format_duration(time.monotonic() - _started)]
    if any((manifest.parameters.get(source) or {}).get("untrained") for source in ("extractor", "model")):
        facts.append("untrained weights")
    rows = f"{counted(manifest.rows, 'row')} in {counted(len(manifest.shards), 'shard')} in {escape(output)}"
    print_line(f"[bold]{manifest.kind}[/bold]: {rows} ({', '.join(facts)})")


def finish_dataset(
    manifest: Manifest,
    output: str,
    max_failures: FailureLimit = FailureLimit(),
    changes: Mapping[str, int] | None = None,
) -> None:
    """Print the summary of a dataset; exit with code 3 after too many failures.

    ``changes`` holds the numbers of new, changed and removed images of an update. Digests are left to ``inspect``.
    """
    from pipelines.datasets.inspection import statistics_tables

    failed = dict(sorted(manifest.failure_reasons.items()))
    events.record(counts={"rows": manifest.rows, "shards": len(manifest.shards), "failed": failed})
    print_dataset(manifest, output)
    if changes is not None:
        new, changed, removed = (changes.get(name, 0) for name in ("new", "changed", "removed"))
        unchanged = manifest.rows + manifest.failed - new - changed
        print_line(f"[bold]update[/bold]: {new:,} new, {changed:,} changed, {removed:,} removed, {unchanged:,} kept")
        share = changes.get("rewritten", 0) / len(manifest.shards)
        size = share * sum(entry.bytes for entry in manifest.shards)
        if size > _LARGE_UPDATE and share > 4 * (new + changed + removed) / max(1, manifest.rows):
            print_remark(
                f"the update rewrote {share:.0%} of {len(manifest.shards):,} shards, {size / 1e9:,.1f} GB: "
                "with more shards (--shards, once with --overwrite) a small change rewrites less"
            )
    shown = {name: value for name, value in manifest.statistics.items() if name not in _NOT_SHOWN}
    render_tables(console, statistics_tables(replace(manifest, statistics=shown)))
    if manifest.failed:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in failed.items())
        listed = f"They are listed by: imagepivot inspect {shlex.quote(output)} --failures"
        print_remark(f"{'' if manifest.rows else 'all '}{manifest.failed:,} inputs failed: {counts}. {listed}", style="red")
    if max_failures.is_exceeded(failed=manifest.failed, rows=manifest.rows):
        raise typer.Exit(3)

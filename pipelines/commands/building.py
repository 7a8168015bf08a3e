"""What ``imagepivot build`` prints: how far each step is, what would be done, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipelines.plans.job import Build
from pipelines.plans.outlook import Outlook
from pipelines.plans.reading import plan_names, read_table
from schemas import events
from schemas.progress import duration

__all__ = ["Display", "print_outlook", "print_plans"]

_PLAIN_SECONDS = 10.0
_STYLES = {"failed": "bold red", "made": "green", "taken back": "green", "started": "dim", "up to date": "dim"}


def print_plans(console: Console) -> None:
    """List the plans of the package."""
    for name in plan_names():
        console.print(f"[bold]{name}[/bold]  {escape(read_table(name)['description'])}", highlight=False, soft_wrap=True)


def print_outlook(outlook: Outlook, console: Console) -> None:
    """Print what a build would do."""
    table = Table(title=f"into {outlook.output}", title_justify="left", title_style="bold")
    for heading in ("step", "command", "state", "because", "rows", "size", "time"):
        table.add_column(heading, justify="right" if heading in ("rows", "size", "time") else "left")
    for step in outlook.steps:
        count = f"{step.count:,}" if step.count is not None else "" if step.state == "up to date" else "?"
        length = "?" if step.seconds is None else "" if step.state == "up to date" else duration(step.seconds)
        table.add_row(step.name, step.command, step.state, escape(step.why), count, _size(step.bytes), length)
    console.print(table)
    todo = [step for step in outlook.steps if step.state != "up to date"]
    sizes, times = [step.bytes for step in todo], [step.seconds for step in todo]
    known = f"{_size(sum(size or 0 for size in sizes))}{' and what is unknown' if None in sizes else ''}"
    long = f"{duration(sum(seconds or 0 for seconds in times))}{' and what is unknown' if None in times else ''}"
    console.print(f"{len(todo)} of {len(outlook.steps)} steps to do: {known}, {long}", highlight=False, soft_wrap=True)
    if outlook.kept:
        console.print(f"{len(outlook.kept)} results of other values are kept; --prune deletes them", highlight=False)


def _size(size: int | None) -> str:
    if size is None:
        return "?"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:,.1f} GiB"


class Display:
    """Shows the steps of a build: on a terminal a line each while they run, else a line at start and end and now and then."""

    def __init__(self, console: Console, *, log_json: bool = False) -> None:
        self._console = console
        self._log_json = log_json
        self._running: dict[str, str] = {}
        self._printed: dict[str, float] = {}
        self._lock = threading.Lock()
        self._live = Live(console=console, transient=True, get_renderable=self._lines, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._log_json:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, step: str, event: Mapping[str, Any]) -> None:
        """Take an event of a step."""
        fields = {name: value for name, value in event.items() if name not in ("time", "event")}
        with self._lock:
            if self._log_json:
                events.emit(event["event"], step=step, **fields)
            elif event["event"] == "step":
                self._tell_step(step, fields)
            elif event["event"] == "progress":
                self._tell_progress(step, fields)
            elif event["event"] == "remark":
                self._print(step, str(event["message"]), "yellow")

    def finish(self, built: Build, console: Console) -> None:
        """Print what came of the build."""
        made = sum(end.done != "up to date" for end in built.steps)
        events.record(output=built.output, counts={"steps": len(built.steps), "made": made})
        done = f"{made} of {len(built.steps)} steps made now" if made else f"all {len(built.steps)} steps are up to date"
        console.print(f"[bold]build[/bold]: {done}, in {escape(built.output)}", highlight=False, soft_wrap=True)

    def _tell_step(self, step: str, fields: Mapping[str, Any]) -> None:
        status = fields["status"]
        if status == "started":
            self._running[step] = fields["message"]
            self._printed[step] = time.monotonic()
            self._print(step, f"runs: {fields['message']}", _STYLES[status])
            return
        self._running.pop(step, None)
        if status == "failed":
            return  # The error follows.
        if status != "up to date":
            rows = "" if fields["rows"] is None else f"{fields['rows']:,} rows, "
            self._print(step, f"{status}: {rows}{_size(fields['bytes'])} in {duration(fields['seconds'])}", _STYLES[status])

    def _tell_progress(self, step: str, fields: Mapping[str, Any]) -> None:
        done, total, left = fields.get("done"), fields.get("total"), fields.get("seconds_left")
        text = f"{done:,}{f' of {total:,}' if total else ''} {fields.get('unit', '')}" if done is not None else "running"
        text += f", {duration(left)} left" if left else ""
        self._running[step] = text
        if not self._console.is_terminal and time.monotonic() - self._printed.get(step, 0.0) >= _PLAIN_SECONDS:
            self._printed[step] = time.monotonic()
            self._print(step, text, "")

    def _print(self, step: str, text: str, style: str) -> None:
        self._console.print(Text(f"{step}: ", style="bold").append(text, style=style), soft_wrap=True, highlight=False)

    def _lines(self) -> Text:
        return Text("\n".join(f"{step}: {text}" for step, text in self._running.items()))

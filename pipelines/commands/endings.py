"""How a command ends: errors become messages, or events, and exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape

from pipelines.commands.options import notes, remark
from schemas import events
from schemas.errors import ImagepivotError, UsageError

__all__ = ["run", "wants_events"]

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
    "urllib3": "pipelines",
}
_TRAINING = frozenset({"train", "evaluate", "embed", "search", "tables"})
_STOPPED = 130  # Ctrl-C, as typer hands it on.


def wants_events(words: Sequence[str]) -> bool:
    """Return whether the words of a command ask for events, as far as one can tell before they are parsed."""
    return "--log-json" in words[: words.index("--") if "--" in words else None]


def run(app: Callable[..., Any]) -> int:
    """Run the command and return its exit code; say why it failed. Errors that are our fault are raised."""
    code, message = 0, None
    try:
        code = app(standalone_mode=False) or 0
    except ImagepivotError as error:
        code, message = 2 if isinstance(error, UsageError) else 1, str(error)
        _report(error, message)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (advice := _advice(error)):
            code, message = 1, advice
            _report(error, message)
        elif hasattr(error, "format_message"):  # An error of typer's, about the words of the command.
            code, message = error.exit_code, error.format_message() or None  # type: ignore[attr-defined]
            _report_usage(error, message)
        else:
            code, message = 1, f"{type(error).__name__}: {error}"
            if not events.emit("error", message=message, kind=type(error).__name__, traceback=traceback.format_exc()):
                raise
    if code == _STOPPED:
        message = "stopped; finished shards are kept, the same command continues from here"
        if sys.argv[1:2] == ["train"]:
            message = "stopped; the last checkpoint is kept, --resume continues from it"
        remark(message, style="")
    events.finish(code, message)
    return code


def _report(error: Exception, message: str) -> None:
    if not events.emit("error", message=message, kind=type(error).__name__):
        notes.print(f"[bold red]Error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)


def _report_usage(error: Any, message: str | None) -> None:
    if not events.emit("error", message=message, kind="UsageError"):
        from typer import rich_utils

        rich_utils.rich_format_error(error)


def _advice(error: ModuleNotFoundError) -> str | None:
    """Return which extra brings a missing package; None where it is no package of any extra."""
    missing = (error.name or "").partition(".")[0]
    if missing not in _EXTRAS:
        return None
    extra = "train" if missing == "torch" and _TRAINING.intersection(sys.argv[1:2]) else _EXTRAS[missing]
    return f"this command needs {error.name}, which is not installed: pip install 'imagepivot[{extra}]'"

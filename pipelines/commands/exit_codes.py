"""Error reporting as messages or events, and exit codes."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.markup import escape

from pipelines.commands.results import console, notes, print_remark, set_console_of_typer
from pipelines.commands.signals import flush_streams, stop_signal, stopped_line
from schemas.console import events
from schemas.errors import ImagepivotError, UsageError, errno_of
from schemas.escapes import to_json
from schemas.process.shutdown import CLOSED_PIPE, DetachedError

_MODELS = frozenset({"torch", "torchvision", "PIL", "safetensors", "simplejpeg"})
_STORES = frozenset({"botocore", "google", "requests"})
_TEXT = _STORES | {"apache_beam", "sacremoses", "ijson", "urllib3", "grpc", "packaging"}
_EXTRAS = {
    "stores": _STORES,
    "text": _TEXT,
    "extractors": _MODELS,
    "pipelines": _MODELS | _TEXT,
    "train": frozenset({"torch", "matplotlib", "scipy", "tensorboard"}),
    "figures": frozenset({"torch", "matplotlib", "scipy", "tensorboard", "sklearn", "threadpoolctl", "jinja2", "markupsafe"}),
    "serve": frozenset({"starlette", "uvicorn"}),
    "hdf5": frozenset({"h5py"}),
    "heif": frozenset({"pillow_heif"}),
    "fasttext": frozenset({"gensim"}),
    "timm": frozenset({"timm"}),
    "clip": frozenset({"open_clip"}),
    "bert": frozenset({"transformers", "huggingface_hub"}),
    "mteb": frozenset({"mteb"}),
}
_EXTRAS["duplicates"] = _EXTRAS["pipelines"] | {"scipy", "faiss"}
_EXTRAS["all"] = frozenset.union(*(_EXTRAS[name] for name in ("pipelines", "train", "figures", "hdf5", "timm", "duplicates")))
"""Modules by extra."""

_NEEDS = {
    **dict.fromkeys(("captions", "vocabulary", "encode", "word-vectors", "import", "export"), "text"),
    **dict.fromkeys(("text-features", "features", "build"), "pipelines"),
    **dict.fromkeys(("view", "demo", "report"), "all"),
    **dict.fromkeys(("train", "evaluate", "compare", "embed", "search", "sts", "reproduce"), "train"),
    "figures": "figures",
    "duplicates": "duplicates",
}
"""Extras that cover all of a command."""

_INTERRUPTED = 130  # Ctrl-C in typer.


def run(app: Callable[..., Any]) -> int:
    """Run the command, print errors, and return the exit code; raise bugs of ours."""
    code, message = 0, None
    try:
        code = app(standalone_mode=False) or 0
    except BaseException as error:
        ending = _ending(error)
        if ending is None:
            _record_for_torchrun(traceback.format_exc())
            raise
        code, message = ending
        _record_for_torchrun(message)
    if stop_signal():  # Even if a library swallowed the interrupt; `stoppable` prints the last line.
        return 128 + stop_signal()
    if code == _INTERRUPTED:
        message = stopped_line()
        print_remark(message, style="")
    failed = flush_streams()
    if isinstance(failed, BrokenPipeError):
        code = CLOSED_PIPE
    elif failed is not None:
        code, message = 1, f"cannot write the output: {failed.strerror}"
        _report(failed, message)
    events.finish(code, message)
    return code


def _record_for_torchrun(message: str | None) -> None:
    """Write an error to the file that `torchrun` prints, even of a hidden rank."""
    if message and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        error = {"message": message, "extraInfo": {"timestamp": int(time.time())}}
        unfinished = Path(f"{file}.part")
        unfinished.write_text(to_json({"message": error}))
        unfinished.replace(
            file
        )  # `torchrun` may stop this process at any time, and reads a half-written file as an error of its own.


def _ending(error: BaseException) -> tuple[int, str | None] | None:
    """Print an error, and return exit code and message; None for a bug of ours."""
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else int(error.code is not None)), None
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED, None
    if isinstance(error, DetachedError):  # The command was asked to detach.
        if error.job:
            events.record(status="detached", job=error.job)
        console.print(str(error), highlight=False, markup=False, soft_wrap=True)
        return 0, str(error)
    if isinstance(error, ImagepivotError):
        return _report(error, str(error), code=2 if isinstance(error, UsageError) else 1)
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_for((error.name or "").partition(".")[0].replace("-", "_"))):
        return _report(error, f"this command needs {error.name}, which is not installed: pip install 'imagepivot[{extra}]'")
    if isinstance(error, OSError):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("rich", "typer", "click"):  # Printing raised it.
            flush_streams()
            return _report(error, f"cannot write the output: {error.strerror}")
    if hasattr(error, "format_message"):  # A usage error of typer.
        message = error.format_message() or "wrong usage"
        if not events.emit("error", message=message, kind="UsageError"):
            from typer import rich_utils

            set_console_of_typer()
            rich_utils.rich_format_error(error)  # type: ignore[arg-type]
        return error.exit_code, message  # type: ignore[attr-defined]
    if stop_signal():
        return 128 + stop_signal(), None
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if events.emit("error", message=message, **_class_and_number(error), traceback=traceback.format_exc()):
        return 1, message
    return None


def _report(error: BaseException, message: str, *, code: int = 1) -> tuple[int, str]:
    if not events.emit("error", message=message, **_class_and_number(error)):
        notes.print(f"[bold red]Error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)
    return code, message


def _class_and_number(error: BaseException) -> dict[str, str | int]:
    """Return the class of an error, and the number of the system's error if any."""
    number = errno_of(error)
    return {"kind": type(error).__name__, **({} if number is None else {"errno": number})}


def _extra_for(module: str) -> str | None:
    """Return the extra for a module: the command's own, or else the smallest."""
    command = "".join(sys.argv[1:2])
    return next((extra for extra in (_NEEDS.get(command, ""), *_EXTRAS) if module in _EXTRAS.get(extra, ())), None)

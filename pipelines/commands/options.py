"""What the commands share: consoles, options with one meaning everywhere, and how their text becomes values."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from pipelines import jobs
from pipelines.commands import completion
from pipelines.commands.configuration import BEAM_FLAGS, COMMAS, NUMBERS, PAIRS
from schemas.console import events
from schemas.errors import UsageError
from schemas.escapes import escape_text
from schemas.keys import ShardsRequest, check_shards_request

if TYPE_CHECKING:
    from pipelines.running.accelerators import Accelerator
    from pipelines.running.execution import Execution

__all__ = [
    "BEAM",
    "AllowPrivateAddresses",
    "AsJson",
    "Check",
    "Columns",
    "Delimiter",
    "Detach",
    "Device",
    "Gpu",
    "GpusPerWorker",
    "IdRule",
    "Ids",
    "Languages",
    "LogJson",
    "MaxFailures",
    "Output",
    "Overwrite",
    "Portions",
    "Precision",
    "Quoting",
    "Shards",
    "SharedDisk",
    "StartTimeout",
    "StoredType",
    "WorkerMachine",
    "Workers",
    "accelerator_of",
    "console",
    "execution_of",
    "flags_of",
    "notes",
    "remark",
    "remark_on_precision",
    "several",
]

console = Console()
"""For results, on standard output."""

notes = Console(stderr=True)
"""For progress and remarks, on standard error."""


def _log_json(context: typer.Context, value: bool) -> bool:
    if value and not context.resilient_parsing:
        events.start()
    return value


def _shards(text: str | int) -> ShardsRequest:
    if re.fullmatch(r"-?[0-9]+", str(text)):
        return int(text)
    try:
        check_shards_request(str(text))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    return text


BEAM = {"allow_extra_args": True}
"""Context settings of a command whose flags behind ``--`` go to Beam."""

IdRule = Literal["name", "path"]
Output = Annotated[str, typer.Argument(help=jobs.OUTPUT.help, show_default=False)]
Device = Annotated[
    str,
    typer.Option("--device", help=jobs.DEVICE.help, autocompletion=completion.devices),
]

Precision = Annotated[
    str,
    typer.Option("--precision", help=jobs.PRECISION.help, autocompletion=completion.precisions),
]

StoredType = Annotated[
    Literal["float32", "float16"],
    typer.Option("--dtype", help=jobs.STORED_TYPE.help),
]

Overwrite = Annotated[bool, typer.Option("--overwrite", help=jobs.OVERWRITE.help)]
Check = Annotated[bool, typer.Option("--check", help=jobs.VERIFY.help)]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Local worker processes; 0: one per core.")]
SharedDisk = Annotated[
    bool, typer.Option("--shared-disk", help="With a --runner behind --: its workers see local paths as this machine does.")
]
StartTimeout = Annotated[
    float | None,
    typer.Option(
        "--start-timeout",
        help="With a --runner behind --: seconds in which its first worker must have started; 1200 by default.",
    ),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        help="With a --runner behind --: end as soon as it has accepted the job; the same command without it waits for the job.",
    ),
]
_ELSEWHERE = "Workers on other machines"
Gpu = Annotated[
    str,
    typer.Option(
        "--gpu",
        help="Type of GPU for the workers that run the model, e.g. [i]nvidia-l4[/i]; the model runs nowhere else.",
        rich_help_panel=_ELSEWHERE,
    ),
]
GpusPerWorker = Annotated[
    int, typer.Option("--gpus-per-worker", help="With --gpu: number of GPUs of a worker.", rich_help_panel=_ELSEWHERE)
]
WorkerMachine = Annotated[
    str,
    typer.Option(
        "--worker-machine",
        help="With --gpu: type of machine of these workers, e.g. [i]g2-standard-4[/i]; the runner's own choice by default.",
        rich_help_panel=_ELSEWHERE,
    ),
]
MaxFailures = Annotated[int, typer.Option("--max-failures", min=0, help="Inputs that may fail before the exit code is 3.")]
LogJson = Annotated[
    bool,
    typer.Option("--log-json", callback=_log_json, is_eager=True, help="Make stderr lines of JSON, for programs that watch."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Shards = Annotated[
    str,
    typer.Option(
        "--shards",
        parser=_shards,
        metavar="N|auto|like:DATASET",
        help="Number of shards; [i]auto[/i]: by the size of the work, at least 16; [i]like:DATASET[/i]: as many as that dataset of "
        "the same images has, so that the two join shard by shard.",
    ),
    NUMBERS,
]
Ids = Annotated[
    IdRule,
    typer.Option("--ids", help="Image id: the file [i]name[/i] without extension, or the whole [i]path[/i] without extension."),
]
AllowPrivateAddresses = Annotated[
    bool,
    typer.Option(
        "--allow-private-addresses",
        help="A table's http addresses may lead to private and local networks, or through a proxy: nothing is checked.",
    ),
]
Columns = Annotated[str, typer.Option("--columns", help="Columns of a table: OURS=THEIRS, e.g. [i]image_id=file[/i]."), PAIRS]
Delimiter = Annotated[
    str,
    typer.Option(
        "--delimiter", help="Character between the values of CSV or TSV, e.g. [i];[/i] or [i]tab[/i]; found if not given."
    ),
]
Quoting = Annotated[
    Literal["auto", "rfc4180", "none"],
    typer.Option(
        "--quoting",
        help="Quotes of CSV or TSV: as in RFC 4180, but [i]auto[/i] refuses a value that looks like rows; [i]none[/i]: ordinary "
        "characters.",
    ),
]
Languages = Annotated[str, typer.Option("--languages", help=jobs.LANGUAGES.help), COMMAS]
Portions = Annotated[str, typer.Option("--portions", help=jobs.PORTIONS.help), COMMAS]


def remark(text: str, style: str = "yellow") -> None:
    """Say something on standard error, in a style of rich's, or as an event."""
    if not events.emit("remark", message=text):
        notes.print(Text(escape_text(text, lines=True), style=style), soft_wrap=True)


def remark_on_precision(precision: str, device: str) -> None:
    """Say where the processor only emulates the precision that is asked for."""
    from schemas.limits import bfloat16_remark

    sentence = bfloat16_remark(precision, "cpu") if device in ("cpu", "auto") else ""
    if sentence and device == "auto":  # To look for a GPU loads torch.
        from extractors.computing.devices import resolve_device

        sentence = bfloat16_remark(precision, resolve_device(device).type)
    if sentence:
        remark(sentence)


def several(text: str) -> tuple[str, ...]:
    """Split the value of an option that takes several, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def flags_of(context: typer.Context) -> tuple[str, ...]:
    """Return the flags for Beam: those behind ``--`` or, without any, those of the file.

    Raises:
        UsageError: an argument behind ``--`` is not a flag.
    """
    flags = context.args or (context.default_map or {}).get(BEAM_FLAGS, ())
    stray = [flag for flag in flags if not flag.startswith("--")]
    if stray:
        raise UsageError(f"unexpected argument {stray[0]!r}: flags for Beam stand behind -- and begin with --")
    return tuple(flags)


def execution_of(
    context: typer.Context,
    workers: int,
    *,
    shared_disk: bool = False,
    start_timeout: float | None = None,
    accelerator: Accelerator | None = None,
    detach: bool = False,
) -> Execution:
    """Return how to run a pipeline, from its options and the flags for Beam, see `flags_of`."""
    from pipelines.running.execution import START_SECONDS, Execution

    return Execution(
        workers=workers,
        beam_flags=flags_of(context),
        shared_disk=shared_disk,
        start_timeout=START_SECONDS if start_timeout is None else start_timeout,
        accelerator=accelerator,
        detach=detach,
        note=partial(remark, style="dim"),
    )


def accelerator_of(gpu: str, count: int, machine: str) -> Accelerator | None:
    """Return the GPUs of workers on other machines; None where none are asked for.

    Raises:
        UsageError: there is a number or a machine, and no type.
    """
    from pipelines.running.accelerators import Accelerator

    if not gpu and count != 1:
        raise UsageError(f"--gpus-per-worker is {count} and says how many of which --gpu names the type: give --gpu, too")
    if not gpu and machine:
        raise UsageError(
            f"--worker-machine is {machine!r}, the machine of workers with GPUs: give --gpu, too. That of all workers of Dataflow "
            "is --worker_machine_type, behind --"
        )
    return Accelerator(gpu, count, machine) if gpu else None

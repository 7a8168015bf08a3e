"""The command ``doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.configuration import Config
from pipelines.commands.options import (
    BEAM,
    AllowPrivateAddresses,
    AsJson,
    Columns,
    Delimiter,
    Gpu,
    GpusPerWorker,
    Ids,
    LogJson,
    Quoting,
    SharedDisk,
    StartTimeout,
    WorkerMachine,
    accelerator_of,
    console,
    execution_of,
    flags_of,
)
from schemas.errors import UsageError
from schemas.escapes import to_json

if TYPE_CHECKING:
    from pipelines.doctor.findings import Diagnosis, Finding

__all__ = ["app"]

app = typer.Typer()


@app.command(context_settings=BEAM, epilog="Example: imagepivot doctor features --extractor resnet50-pool --measure")
def doctor(
    context: typer.Context,
    locations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOCATION", help="Folders that a run would write to, local, gs:// or s3://.", show_default=False
        ),
    ] = None,
    extractor: Annotated[
        str,
        typer.Option(
            "--extractor",
            help="Check the weights of this extractor, and let it run.",
            show_default=False,
            autocompletion=completion.extractor_names,
        ),
    ] = "",
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            help="With --extractor: its weights, as [i]features[/i] takes them.",
            autocompletion=completion.weights_requests,
        ),
    ] = "default",
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="The device that must be there: cpu, cuda, cuda:N, or auto.",
            show_default=False,
            autocompletion=completion.devices,
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option("--precision", help="With --extractor: its precision on a GPU.", autocompletion=completion.precisions),
    ] = "fp32",
    images: Annotated[
        str,
        typer.Option("--images", help="Read a few of these images, as [i]features[/i] takes them.", show_default=False),
    ] = "",
    ids: Ids = "name",
    columns: Columns = "",
    delimiter: Delimiter = "",
    quoting: Quoting = "auto",
    allow_private_addresses: AllowPrivateAddresses = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure rates: of decoding and the model for some seconds, of each LOCATION with 64 MiB."
        ),
    ] = False,
    gpu: Gpu = "",
    gpus_per_worker: GpusPerWorker = 1,
    worker_machine: WorkerMachine = "",
    shared_disk: SharedDisk = False,
    start_timeout: StartTimeout = None,
    as_json: AsJson = False,
    log_json: LogJson = False,
    config: Config = "",
) -> None:
    """Find out what this machine, a bucket or a cluster can do, and what to do where it cannot.

    Without arguments only the installation and this machine are looked at: versions, extras, cores, memory, disks, and a small
    network on each GPU, compared with the CPU. That takes a few seconds and no network.

    Each LOCATION is written to and read, and cleaned up again. With a runner behind --, as in -- --runner=DataflowRunner
    --project=..., a job of one step starts a worker, which makes the same checks there and writes what it finds to the first
    LOCATION.

    The exit code is 1 where something that was asked for cannot work. No keys, tokens or values of variables are shown.
    """
    from pipelines.doctor.diagnosis import DoctorJob, examine

    request = None
    if extractor:
        from extractors import ExtractorRequest

        request = ExtractorRequest(extractor, weights=weights, precision=precision)
    elif weights != "default" or precision != "fp32":
        name = "--weights" if weights != "default" else "--precision"
        raise UsageError(f"{name} is that of an extractor: give --extractor, too")
    execution = None
    if flags_of(context) or gpu or worker_machine or gpus_per_worker != 1:
        accelerator = accelerator_of(gpu, gpus_per_worker, worker_machine)
        execution = execution_of(
            context, 0, shared_disk=shared_disk, start_timeout=start_timeout, accelerator=accelerator, detach=False
        )
        if execution.is_local:
            raise UsageError("flags for Beam choose a runner, and these name none: give --runner behind --, too")
    elif shared_disk or start_timeout is not None:
        raise UsageError(
            f"{'--shared-disk' if shared_disk else '--start-timeout'} is for a runner: give --runner behind --, too"
        )
    renamed = None
    if columns:
        from pipelines.inputs.columns import parse_columns

        renamed = parse_columns(columns)
    job = DoctorJob(
        locations=tuple(locations or ()),
        extractor=request,
        images=images,
        ids=ids,
        columns=renamed,
        delimiter=delimiter,
        quoting=quoting,
        allow_private_addresses=allow_private_addresses,
        device=device,
        measure=measure,
        execution=execution,
    )
    diagnosis = _collected(examine(job), show=not as_json)
    if as_json:
        typer.echo(to_json(diagnosis.to_json(), indent=2))
    if not diagnosis.works:
        raise typer.Exit(1)


def _collected(findings: Iterator[Finding], *, show: bool) -> Diagnosis:
    """Return all findings, and show each as soon as it is there."""
    from pipelines.doctor.findings import Diagnosis

    found: list[Finding] = []
    for finding in findings:
        if show:
            if not found or found[-1].group != finding.group:
                _print(finding.group)
            _print(finding.to_text())
        found.append(finding)
    diagnosis = Diagnosis(tuple(found))
    if show:
        _print(diagnosis.summary)
    return diagnosis


def _print(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)

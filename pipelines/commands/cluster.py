"""The command ``cluster``: what a job of another command would be, and what it would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipelines.commands import groups
from pipelines.commands.configuration import NUMBERS
from pipelines.commands.options import BEAM, AsJson, accelerator_of, console, execution_of
from pipelines.commands.text import captions_job, encode_job, vocabulary_job
from schemas.errors import UsageError
from schemas.escapes import to_json

if TYPE_CHECKING:
    from pipelines.estimates.estimate import Estimate, Work
    from pipelines.estimates.graph import Graph
    from pipelines.running.execution import Execution

__all__ = ["app"]

app = typer.Typer()

Planned = Literal["captions", "vocabulary", "encode", "features"]


@app.command(
    context_settings={**BEAM, "ignore_unknown_options": True},
    epilog="Example: imagepivot cluster plan features gs://bucket/photos gs://bucket/features --count 1000000 --rate 400",
)
def cluster(
    context: typer.Context,
    action: Annotated[Literal["plan"], typer.Argument(help="What to do: plan.", show_default=False)],
    command: Annotated[Planned, typer.Argument(help="The command that would be given.", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(help="Its arguments and options, as they would be given.", show_default=False)
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", help="Images, or captions; without it images are listed, and captions counted by no one."),
    ] = None,
    item_bytes: Annotated[
        float | None, typer.Option("--item-bytes", help="Mean size of an image file, or of a raw caption in its file.")
    ] = None,
    machines: Annotated[
        int | None,
        typer.Option("--machines", help="Machines at work; by default as many as the flags for Beam allow, or one."),
    ] = None,
    rate: Annotated[
        str,
        typer.Option(
            "--rate",
            help="Images or captions a second of one machine; or a file: what [i]doctor[/i] printed there as JSON, or the events "
            "that a command wrote there.",
        ),
        NUMBERS,
    ] = "",
    prices: Annotated[str, typer.Option("--prices", help="TOML file with what machines, requests and storage cost.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show the job that a command would submit, and what it would take: shards, hours, requests, bytes, cost.

    COMMAND is captions, vocabulary, encode or features. Its arguments, its options and the flags for Beam behind -- stand as they
    would in the command itself. Nothing is submitted and nothing is written.

    With --count, features looks at nothing: neither images nor OUTPUT nor weights; captions with --item-bytes, too. Hours need
    --rate, cost needs --prices: what nobody has measured or stated is a question mark.
    """
    from pipelines.commands.estimating import print_plan
    from pipelines.estimates.estimate import Cluster, Estimate
    from pipelines.estimates.prices import Prices
    from pipelines.estimates.rates import read_rate

    planned = groups.commands()[command]
    flags = ["--", *context.args] if context.args else []
    with planned.make_context(command, [*(words or []), *flags], parent=context.parent) as inner:
        values = inner.params
        accelerator = accelerator_of(*(values.get(name, default) for name, default in _GPU.items()))
        execution = execution_of(
            inner,
            values["workers"],
            shared_disk=values["shared_disk"],
            start_timeout=values["start_timeout"],
            accelerator=accelerator,
            detach=values["detach"],
        )
    work, graph = _planned(command, values, execution, count, item_bytes)
    on = Cluster(
        machines=_machines_of(execution) if machines is None else machines,
        slots=accelerator.count if accelerator is not None else 1,
        rate=read_rate(rate) if rate else None,
        machine=_machine_of(execution),
        gpu=accelerator.type if accelerator is not None else "",
    )
    estimate = Estimate(work, on, Prices.read(prices) if prices else None)
    if as_json:
        typer.echo(to_json(_to_json(estimate, graph, execution), indent=2))
        return
    print_plan(estimate, graph, execution.runner, console)


_GPU: Mapping[str, Any] = {"gpu": "", "gpus_per_worker": 1, "worker_machine": ""}


def _planned(
    command: str, values: Mapping[str, Any], execution: Execution, count: int | None, item_bytes: float | None
) -> tuple[Work, Graph | None]:
    from pipelines.estimates import works

    if command == "features":
        return _features(values, execution, count, item_bytes)
    if command == "captions":
        if count is not None and item_bytes is not None:
            _check(execution, ("SOURCE", values["source"]), ("OUTPUT", values["output"]))
            given = values["source"], values["output"], values["shards"]
            return works.invented_captions(*given, count=count, item_bytes=item_bytes), None
        job = captions_job(values)
        _check(execution, ("SOURCE", job.source.folder.location), ("OUTPUT", job.output))
        return works.plan_of_captions(job, execution, count=count)
    if count is not None or item_bytes is not None:
        option = "--count" if count is not None else "--item-bytes"
        raise UsageError(f"{option} is for captions and features: for {command} the dataset of captions tells it, leave it out")
    _check(execution, ("CAPTIONS", values["captions"]), ("OUTPUT", values["output"]))
    if command == "vocabulary":
        return works.plan_of_vocabulary(vocabulary_job(values), execution)
    return works.plan_of_encoding(encode_job(values), execution)


def _features(
    values: Mapping[str, Any], execution: Execution, count: int | None, item_bytes: float | None
) -> tuple[Work, Graph]:
    from pipelines.commands.features import job_of
    from pipelines.estimates.works import plan_of_features
    from pipelines.inputs.columns import parse_columns
    from pipelines.inputs.files import locate
    from pipelines.inputs.images import ImagesInFolder, open_images
    from schemas.storage import Folder

    for name in ("images", "output"):
        if not values[name]:
            raise UsageError(f"{name.upper()} is missing, expected two: imagepivot cluster plan features IMAGES OUTPUT")
    if count is not None:
        source: Any = ImagesInFolder(Folder(locate(values["images"])), ids=values["ids"])
    else:
        source = open_images(
            values["images"],
            ids=values["ids"],
            columns=parse_columns(values["columns"]) if values["columns"] else None,
            delimiter=values["delimiter"],
            quoting=values["quoting"],
            allow_private_addresses=values["allow_private_addresses"],
        )
    job = job_of(source, values)
    job.check_execution(execution)
    execution.check_locations(job.locations() if count is None else [("IMAGES", values["images"]), ("OUTPUT", job.output)])
    return plan_of_features(job, execution, count=count, item_bytes=item_bytes)


def _check(execution: Execution, *locations: tuple[str, str]) -> None:
    execution.check_locations(locations)


def _machines_of(execution: Execution) -> int:
    from apache_beam.options.pipeline_options import WorkerOptions

    options = execution.options.view_as(WorkerOptions)
    return options.max_num_workers or options.num_workers or 1


def _machine_of(execution: Execution) -> str:
    from apache_beam.options.pipeline_options import WorkerOptions

    accelerator = execution.accelerator
    own = accelerator.machine if accelerator is not None else ""
    return own or execution.options.view_as(WorkerOptions).machine_type or ""


def _to_json(estimate: Estimate, graph: Graph | None, execution: Execution) -> dict[str, Any]:
    from dataclasses import asdict

    return {"runner": execution.runner, "graph": None if graph is None else asdict(graph), **estimate.to_json()}

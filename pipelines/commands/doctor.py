"""The command ``doctor``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.configuration import Config
from pipelines.commands.options import AsJson, console
from schemas.errors import UsageError
from schemas.escapes import to_json

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot doctor features --extractor resnet50-pool")
def doctor(
    output: Annotated[
        str | None,
        typer.Argument(help="Folder to write and delete a file in, local, gs:// or s3://.", show_default=False),
    ] = None,
    extractor: Annotated[
        str,
        typer.Option(
            "--extractor",
            help="Load the weights of this extractor, and run it once.",
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
        str,
        typer.Option("--device", help="Device to compute on: cpu, cuda, cuda:N, or auto.", autocompletion=completion.devices),
    ] = "auto",
    as_json: AsJson = False,
    config: Config = "",
) -> None:
    """Check versions and device, and optionally the weights of an extractor and OUTPUT.

    The device computes a small network, which is compared with the CPU. Without arguments the checks take a few seconds and no
    network. The exit code is 1 if a check fails.
    """
    from pipelines.doctor import run_checks

    request = None
    if extractor:
        from extractors import ExtractorRequest

        request = ExtractorRequest(extractor, weights=weights)
    elif weights != "default":
        raise UsageError("--weights is that of an extractor: give --extractor, too")
    checks = run_checks(output, request, device)
    is_ok = all(check.status != "failed" for check in checks)
    if as_json:
        typer.echo(to_json({"ok": is_ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            console.print(str(check), highlight=False, markup=False, soft_wrap=True)
    if not is_ok:
        raise typer.Exit(1)

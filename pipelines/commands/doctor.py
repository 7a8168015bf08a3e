"""Command ``doctor``."""

from dataclasses import asdict
from typing import Annotated

import typer

from extractors.request import WeightsRequest, extractor_completions
from pipelines.commands.binding import command
from pipelines.commands.results import AsJson, console
from pipelines.jobs import Device
from schemas.errors import UsageError
from schemas.escapes import to_json
from schemas.options import Opt


@command("doctor features --extractor resnet50-pool")
def doctor(
    output: Annotated[str | None, Opt("Folder to write a test file to, local, gs:// or s3://.", is_argument=True)] = None,
    extractor: Annotated[
        str, Opt("Check the weights of this extractor, and run it once.", completion=extractor_completions)
    ] = "",
    weights: WeightsRequest = "default",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Check versions and device, and optionally extractor weights and OUTPUT.

    The device computes a small network, which is compared with the CPU. Without arguments, checks take a few
    seconds and use no internet. The exit code is 1 if a check fails.
    """
    from pipelines.doctor import run_checks

    request = None
    if extractor:
        from extractors import ExtractorRequest

        request = ExtractorRequest(extractor, weights=weights)
    elif weights != "default":
        raise UsageError("--weights needs --extractor: name the extractor, e.g. --extractor resnet50-pool")
    checks = run_checks(output, request, device)
    is_ok = all(check.status != "failed" for check in checks)
    if as_json:
        typer.echo(to_json({"ok": is_ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            console.print(str(check), highlight=False, markup=False, soft_wrap=True)
    if not is_ok:
        raise typer.Exit(1)

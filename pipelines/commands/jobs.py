"""The command ``cancel``."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.commands.configuration import Config
from pipelines.commands.options import BEAM, LogJson, console, flags_of

__all__ = ["app"]

app = typer.Typer()


@app.command(context_settings=BEAM, epilog="Example: imagepivot cancel gs://bucket/features")
def cancel(
    context: typer.Context,
    output: Annotated[str, typer.Argument(help="Folder that the job writes.", show_default=False)],
    log_json: LogJson = False,
    config: Config = "",
) -> None:
    """Cancel the job that another runner works on, and wait until that runner says that it has ended.

    OUTPUT is the folder that the job writes; the file _job.json in it says which runner to ask. Finished shards are kept: the
    command that submitted the job continues from there. Flags behind -- go to Beam, e.g. for credentials.
    """
    from pipelines.running.launching import cancel_job

    console.print(cancel_job(output, flags_of(context)), highlight=False, markup=False, soft_wrap=True)

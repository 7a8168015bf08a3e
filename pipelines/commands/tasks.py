"""The command ``commit``."""

from __future__ import annotations

import typer

from pipelines.commands.configuration import Config
from pipelines.commands.options import LogJson, MaxFailures, Output, remark
from pipelines.commands.results import finish

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot commit features")
def commit(
    output: Output,
    max_failures: MaxFailures = 0,
    log_json: LogJson = False,
    config: Config = "",
) -> None:
    """Finish the dataset whose shards the tasks of an array job have made.

    OUTPUT is the folder that the tasks of imagepivot features wrote. Every shard is read again and the manifest is written: the
    dataset is the same, byte for byte, as that of one plain run. Where shards are missing or damaged, nothing is written, and the
    message names the tasks to give again. A dataset that is finished stays as it is.
    """
    from schemas.manifest import TASKS_NAME
    from schemas.storage.folder import Folder
    from schemas.writing.tasks import commit_tasks

    is_waiting = Folder(output).size(TASKS_NAME) is not None
    manifest = commit_tasks(output)
    if not is_waiting:
        remark("the dataset was committed before: nothing to do", style="dim")
    finish(manifest, output, max_failures)

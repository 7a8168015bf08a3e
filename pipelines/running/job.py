"""Pipeline jobs: the workers write the shards of a dataset, and the last step of the pipeline commits it.

Beam is loaded when there is something to make, and not to find that nothing is: that takes a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from pipelines.running.execution import Execution
from pipelines.running.meter import Meter
from pipelines.running.per_shard import ShardWork, write_missing
from schemas.errors import CommittedError, DatasetError, ImagepivotError, LostJobError, UsageError
from schemas.fingerprints import sha256_of_json
from schemas.manifest import Manifest
from schemas.process.shutdown import DetachedError
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import complete_dataset
from schemas.writing.output import OutputDataset, is_temporary
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy

if TYPE_CHECKING:
    import apache_beam as beam

    from pipelines.running.preflight import FirstWorker


def run_job(
    output: OutputDataset,
    build: Callable[[beam.Pipeline, frozenset[int], FirstWorker | None], object],
    policy: ReusePolicy,
    *,
    execution: Execution,
    extras: Iterable[str] = ("pipelines",),
    ready: Callable[[], None] | None = None,
    check: Callable[[], None] | None = None,
    here: Callable[[frozenset[int]], bool | None] | None = None,
    task: ArrayTask | None = None,
    libraries: tuple[str, ...] = (),
    meter: Meter = Meter(),
) -> Manifest:
    """Run a pipeline that writes a dataset, or the part of it that an earlier run did not finish.

    Args:
        output: the dataset.
        build: adds the transforms, given the numbers of the shards that are already finished, and what `Begin` does first.
        policy: what the run keeps of the dataset that the folder holds.
        execution: where and how to run.
        extras: names of the extras that workers on other machines need.
        ready: raises where this machine cannot do the work; called if there is something to do, before anything is replaced.
        check: checks on the first worker on another machine what only this work needs.
        here: writes the shards as the pipeline does, without Beam, given the finished ones, and returns whether it has committed
            them, too; called where one worker of this machine does all of it. None if only the pipeline can do it.
        task: the task of an array job, whose pipeline does not commit; None for a whole dataset.
        libraries: distributions whose versions matter to the content, where neither the pipeline nor ``here`` commits.
        meter: shows what the runner says of workers on other machines.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: the folder is in use, or holds data that must not be lost.
        DetachedError: a job goes on without this process, or there is a template of one; or shards of other tasks are missing.
        ImagepivotError: the pipeline met an error that the user can fix.
    """
    folder = output.folder
    if execution.runs_here:
        first, watch = None, None
    elif execution.template:
        _write_template(output, build, execution=execution, extras=extras, check=check)
    else:
        from pipelines.running import remote
        from pipelines.running.preflight import FirstWorker

        remote.check_detach(execution)
        execution = execution.with_job_name(_job_name(output, policy))
        first = FirstWorker.of_launcher(folder, check)
        watch = partial(remote.watch, execution=execution, output=folder, meter=meter)

    def run(finished: frozenset[int]) -> bool:
        try:
            if here is not None and execution.is_one_process:
                return bool(here(finished))
            from pipelines.running.runner import run_pipeline

            run_pipeline(lambda pipeline: build(pipeline, finished, first), execution, extras=extras, watch=watch)
            return task is None
        except BaseException as error:
            # Unless a job goes on; and temporary files may be those of another task.
            if task is None and (first is None or not isinstance(error, (DetachedError, LostJobError, KeyboardInterrupt))):
                _delete_temporaries(folder, elsewhere=not execution.is_local)  # The commit does so where a run ends well.
            raise

    def before() -> None:
        if ready is not None:
            ready()
        if first is not None:
            first.forget()

    complete = partial(complete_dataset, output, run, policy, task=task, check=before, libraries=libraries)
    try:
        return complete()
    except CommittedError:
        # By a job that nobody waited for: what it committed is looked at anew.
        return complete()


def run_per_shard(
    output: OutputDataset,
    work: ShardWork,
    policy: ReusePolicy,
    *,
    execution: Execution,
    libraries: tuple[str, ...],
    extras: Iterable[str] = ("pipelines",),
    ready: Callable[[], None] | None = None,
    check: Callable[[], None] | None = None,
    meter: Meter = Meter(),
) -> Manifest:
    """Run a job that makes each shard of the same shard of its inputs.

    ``work`` writes one shard; the other arguments, result and errors are those of `run_job`.
    """

    def build(pipeline: beam.Pipeline, finished: frozenset[int], first: FirstWorker | None) -> None:
        from pipelines.running.transforms import CommitDataset, WriteShards, spread_shards

        shards = spread_shards(pipeline, output.missing(finished), first)
        written = shards | "WriteShards" >> WriteShards(output, work)
        _ = written | "CommitDataset" >> CommitDataset(output, libraries=libraries)

    here = partial(write_missing, output, work)
    return run_job(
        output,
        build,
        policy,
        execution=execution,
        extras=extras,
        ready=ready,
        check=check,
        here=here,
        libraries=libraries,
        meter=meter,
    )


def _job_name(output: OutputDataset, policy: ReusePolicy) -> str:
    """Return a name that jobs of the same work share: Dataflow refuses a second one while the first is active."""
    work = {"dataset": output.fingerprint, "listings": output.listings, "policy": asdict(policy)}
    return f"imagepivot-{output.kind.replace('_', '-')}-{sha256_of_json(work)[:12]}"


def _write_template(
    output: OutputDataset,
    build: Callable[[beam.Pipeline, frozenset[int], FirstWorker | None], object],
    *,
    execution: Execution,
    extras: Iterable[str],
    check: Callable[[], None] | None,
) -> NoReturn:
    """Write a template of Dataflow's for all shards, since what is finished is known only when it is launched, and say so."""
    from pipelines.running.preflight import FirstWorker
    from pipelines.running.runner import run_pipeline

    folder = output.folder
    if execution.detach:
        raise UsageError("--detach is for a job, and --template_location makes none: leave out one of them")
    stray = [name for name in folder.names() if name not in output.files]
    if stray:
        raise DatasetError(
            f"{folder.location!r} holds {stray[0]!r}, and a template makes a dataset from its beginning: choose another folder, or "
            "leave out --template_location to finish what is there"
        )
    folder.check_bucket()
    for name, data in output.files.items():
        folder.write(name, data)  # A run does so before its job.
    first = FirstWorker.of_launcher(folder, check)
    run_pipeline(lambda pipeline: build(pipeline, frozenset(), first), execution, extras=extras, watch=lambda result: None)
    raise DetachedError(
        f"the template is written to {execution.template!r}. Launch it once: the job makes {folder.location!r}, which must "
        "still be empty then"
    )


def _delete_temporaries(folder: Folder, *, elsewhere: bool) -> None:
    """Delete what workers of a run that failed left; in a store only those on other machines leave anything."""
    if not folder.is_local and not elsewhere:
        return
    with contextlib.suppress(ImagepivotError):  # The next run into the folder does it.
        folder.map(folder.delete, [name for name in folder.names() if is_temporary(name)])

"""Pipeline jobs: workers write a dataset's shards, and the last step commits it.

1. Lock the folder and read its state (`schemas.writing.dataset_writer.complete_dataset`).
2. Return the manifest if all shards are up to date, without loading Beam.
3. Check the launcher; on other machines the first worker passes its preflight check.
4. Run the pipeline, or the local workers without Beam; commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from pipelines.running.execution import Execution
from pipelines.running.meter import Meter
from pipelines.running.process_pool import Map, ShardWorker, open_workers
from schemas.errors import CommittedError, DatasetError, ImagepivotError, LostJobError, UsageError
from schemas.fingerprints import sha256_of_json
from schemas.manifest import Manifest
from schemas.process.shutdown import DetachedError
from schemas.writing.dataset_writer import commit, complete_dataset
from schemas.writing.file_names import is_temporary
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ArrayTask, ReusePolicy

if TYPE_CHECKING:
    import apache_beam as beam

    from pipelines.running.preflight import PreflightCheck

Build: TypeAlias = "Callable[[beam.Pipeline, frozenset[int], PreflightCheck | None], beam.PCollection]"
RunHere: TypeAlias = Callable[[frozenset[int], Map], tuple[str, ...] | None]


@dataclass(frozen=True)
class DatasetJob:
    """A dataset, and the ways to write its shards.

    Attributes:
        policy: reuse of an existing dataset in the folder.
        execution: runner and workers.
        build: adds the transforms to a pipeline, given finished shards and preflight check; returns the input of `CommitDataset`.
        run_here: writes the shards with local workers, given the finished ones, and returns the paths of other files, if any.
        extras: extras that workers on other machines need.
        check_launcher: raises if this machine cannot run the job; called before anything is replaced.
        check_worker: part of the preflight check for this kind of job.
        task: task of an array job; None for a whole dataset.
        libraries: distributions whose versions affect the content.
        meter: shows counts of workers on other machines.
    """

    output: OutputDataset
    policy: ReusePolicy
    execution: Execution
    build: Build
    run_here: RunHere
    _: KW_ONLY
    extras: Iterable[str] = ("text",)
    check_launcher: Callable[[], object] | None = None
    check_worker: Callable[[], None] | None = None
    task: ArrayTask | None = None
    libraries: tuple[str, ...] = ()
    meter: Meter = Meter()


def run_job(job: DatasetJob) -> Manifest:
    """Write the missing shards of a dataset, on this machine or with a pipeline.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: the folder is in use, or holds data that must not be lost.
        DetachedError: a job continues without this process, a template was written, or shards of other tasks are missing.
        ImagepivotError: the user can fix an error of the pipeline.
    """
    output, execution, folder = job.output, job.execution, job.output.folder
    if execution.runs_here:
        preflight, watch = None, None
    elif execution.template:
        _write_template(job)
    else:
        from pipelines.running import remote
        from pipelines.running.preflight import PREFLIGHT_MARKER, PreflightCheck

        remote.check_detach(execution)
        # A name per work, since Dataflow refuses a second active job of a name.
        work = {"dataset": output.fingerprint, "listings": output.listings, "policy": asdict(job.policy)}
        execution = execution.with_job_name(f"imagepivot-{output.kind.replace('_', '-')}-{sha256_of_json(work)[:12]}")
        preflight = PreflightCheck(folder, job.check_worker)
        watch = partial(remote.watch, execution=execution, output=folder, meter=job.meter)

    def run(finished: frozenset[int]) -> Manifest | None:
        try:
            if not execution.is_local:
                _run_pipeline(job, execution, finished, preflight, watch)
                return Manifest.read(folder)
            with open_workers(execution.local_workers) as workers:
                files = job.run_here(finished, workers)
            return commit(output, libraries=job.libraries, files=files or ()) if job.task is None else None
        except BaseException as error:
            may_continue = preflight is not None and isinstance(error, (DetachedError, LostJobError, KeyboardInterrupt))
            # Temporary files may belong to another task. In an object store only remote workers leave any.
            if job.task is None and not may_continue and (folder.is_local or not execution.is_local):
                with contextlib.suppress(ImagepivotError):  # The next run or, after success, the commit deletes them.
                    folder.map(folder.delete, [name for name in folder.names() if is_temporary(name)])
            raise

    def check() -> None:
        if job.check_launcher is not None:
            job.check_launcher()
        if preflight is not None:
            folder.delete(PREFLIGHT_MARKER)  # A marker of an earlier job.

    complete = partial(complete_dataset, output, run, job.policy, task=job.task, check=check, libraries=job.libraries)
    try:
        return complete()
    except CommittedError:  # A detached job has committed in the meantime: read the folder's state again.
        return complete()


def run_per_shard(worker: ShardWorker, policy: ReusePolicy, execution: Execution, **settings: Any) -> Manifest:
    """Write each missing shard from the same shard of the inputs, without a shuffle.

    The settings are other fields of `DatasetJob`; result and errors are those of `run_job`.
    """
    output = worker.output

    def build(pipeline: beam.Pipeline, finished: frozenset[int], check: PreflightCheck | None) -> beam.PCollection:
        from pipelines.running.transforms import WriteShards, spread_shards

        return spread_shards(pipeline, output.missing(finished), check) | "WriteShards" >> WriteShards(worker)

    def run_here(finished: frozenset[int], run: Map) -> None:
        for _ in run(worker, output.missing(finished)):
            pass

    return run_job(DatasetJob(output, policy, execution, build, run_here, **settings))


def _run_pipeline(
    job: DatasetJob,
    execution: Execution,
    finished: frozenset[int],
    check: PreflightCheck | None,
    watch: Callable[[Any], None] | None,
) -> None:
    """Run a pipeline that writes the unfinished shards, and commits."""
    from pipelines.running.runner import run_pipeline
    from pipelines.running.transforms import CommitDataset

    def build(pipeline: beam.Pipeline) -> None:
        written = job.build(pipeline, finished, check)
        _ = written | "CommitDataset" >> CommitDataset(job.output, libraries=job.libraries)

    run_pipeline(build, execution, extras=job.extras, watch=watch)


def _write_template(job: DatasetJob) -> NoReturn:
    """Write a Dataflow template for all shards, finished or not."""
    from pipelines.running.preflight import PreflightCheck

    output, execution, folder = job.output, job.execution, job.output.folder
    if execution.detach:
        raise UsageError("--detach needs a job, and --template_location writes only a template: leave one of them out")
    stray = [name for name in folder.names() if name not in output.files]
    if stray:
        raise DatasetError(
            f"{folder.location!r} holds {stray[0]!r}, expected an empty folder for a template: choose "
            "another folder, or leave --template_location out to finish the dataset"
        )
    folder.check_writable()
    for name, data in output.files.items():
        folder.put(name, data)  # As a run does before its job.
    _run_pipeline(job, execution, frozenset(), PreflightCheck(folder, job.check_worker), lambda result: None)
    raise DetachedError(
        f"the template is written to {execution.template!r}. Launch it once: the job writes "
        f"{folder.location!r}, which must be empty until then"
    )

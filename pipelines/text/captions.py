"""``imagepivot captions``: turns raw captions into shards of tokenized captions; `caption_transforms` says how.

Beam is not loaded to find that there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipelines.jobs import CaptionsJob
from pipelines.running.execution import Execution
from pipelines.running.jobs import run_job
from pipelines.running.meter import Meter
from pipelines.running.places import staging
from pipelines.text.moses import recipe
from pipelines.text.truecasers import TRUECASER_FILES, Truecasers, load_truecasers
from schemas.errors import UsageError
from schemas.manifest import Manifest
from schemas.parameters import CaptionsParameters
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_count import TEXT_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards

if TYPE_CHECKING:
    import apache_beam as beam

    from pipelines.running.first_worker import FirstWorker

_PACKED = (".gz", ".parquet")
_UNPACKED = 4
"""Bytes of text to a byte of a compressed file, roughly: it decides the number of shards, which doubles or not."""


def prepare_captions(job: CaptionsJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Make a dataset of kind ``captions``.

    Args:
        job: what to make.
        execution: where and how to run.
        meter: counts captions, for a progress display.

    Returns:
        The manifest of the committed dataset.

    Raises:
        UsageError: truecasers are given to a recipe that does not truecase.
        ImagepivotError: the source is broken, or the folder cannot be written.
    """
    if job.truecaser is not None and not recipe(job.recipe).truecase:
        raise UsageError(f"recipe {job.recipe!r} does not truecase: leave --truecaser out, or use --recipe moses-truecase")
    source = job.open_source()
    job = replace(job, source=source)
    execution.check_locations((("SOURCE", source.location), ("OUTPUT", job.output)))
    models = load_truecasers(job.truecaser) if job.truecaser is not None else None
    source.parts(job.selection)  # Refuses a selection that names nothing, before the files are hashed.
    output = plan_captions(job, source.inputs(job.selection), models)
    with staging(output.folder) if execution.is_local else nullcontext() as staged:

        def build(pipeline: beam.Pipeline, finished: frozenset[int], check: FirstWorker | None) -> None:
            from pipelines.text.caption_transforms import build_captions

            build_captions(pipeline, finished, check, job=job, output=output, models=models, staged=staged, meter=meter)

        return run_job(output, build, ReusePolicy(overwrite=job.overwrite, verify=job.verify), execution=execution, meter=meter)


def plan_captions(job: CaptionsJob, inputs: list[dict[str, Any]], models: Truecasers | None = None) -> OutputDataset:
    """Return the dataset that a job writes.

    Args:
        job: what to make.
        inputs: the files of its source, as `pipelines.inputs.captions.CaptionSource.inputs` returns them.
        models: truecasers, if they are given.
    """
    steps = recipe(job.recipe)
    selection = job.selection
    parameters = CaptionsParameters(
        text=steps.parameters(),
        languages=tuple(sorted(selection.languages)),
        portions=tuple(sorted(selection.portions)),
        splits=tuple(sorted(selection.splits)),
        train_splits=tuple(sorted(job.train_splits)) if steps.truecase and models is None else None,
        source=job.open_source().parameters(),
    )
    folder = Folder(job.output)
    shards = _shards(job, folder, inputs)
    inputs = inputs + (models.inputs() if models is not None else [])
    return OutputDataset(
        folder=folder,
        kind="captions",
        parameters=parameters.to_json(),
        inputs=tuple(inputs),
        shards=shards,
        other_files=TRUECASER_FILES,
    )


def _shards(job: CaptionsJob, folder: Folder, inputs: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of shards of a job, by the bytes of its files: how many captions they hold only reading them would tell."""
    size = sum(entry["bytes"] * (_UNPACKED if entry["name"].endswith(_PACKED) else 1) for entry in inputs)
    shards = known_shards(job.shards, folder, overwrite=job.overwrite) or choose_shards(size, TEXT_SHARD_BYTES)
    check_shard_bytes(shards, size, folder)
    return shards

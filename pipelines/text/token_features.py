"""``imagepivot token-features``: captions in, the last layer of a model of text over their tokens out, shard by shard.

`token_feature_transforms` says how. Beam is not loaded to find that there is nothing to do.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pipelines.jobs import TokenFeaturesJob
from pipelines.running.execution import Execution
from pipelines.running.jobs import run_job
from pipelines.running.meter import Meter
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.manifest import Manifest
from schemas.parameters import TokenFeaturesParameters
from schemas.storage.folder import Folder
from schemas.storage.locations import absolute_location
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy

if TYPE_CHECKING:
    import apache_beam as beam

    from pipelines.running.first_worker import FirstWorker


def _check_worker(job: TokenFeaturesJob, output: OutputDataset) -> None:
    """Check that this process has the device and the model of a job."""
    job.check_model(output, job.request().load(job.device))


def extract_token_features(job: TokenFeaturesJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Make a dataset of kind ``token-features`` with as many shards as the captions have.

    Args:
        job: what to make.
        execution: where and how to run. Without a number of workers, one that uses all cores.
        meter: counts captions, for a progress display.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: ``job.captions`` is not a captions dataset, or holds none.
        InputError: there is no such model on this machine, or it cannot be used.
        UsageError: the device is not on this machine, or the package transformers is not installed.
    """
    files = [("--model", location) for location in job.files()]
    execution.check_locations((("CAPTIONS", job.captions), ("OUTPUT", job.output), *files))
    captions = open_dataset(job.captions, kind="captions")
    if captions.manifest.rows == 0:
        raise DatasetError(f"{job.captions!r} holds no captions, so there is nothing to read: prepare the captions again")
    description = job.describe(job.device if execution.runs_here else "cpu")
    if files and not execution.runs_here:
        job = replace(job, model=absolute_location(job.model))
    output = OutputDataset(
        folder=Folder(job.output),
        kind="token-features",
        parameters=TokenFeaturesParameters(
            feature=description.spec,
            model=description.parameters,
            model_fingerprint=description.fingerprint,
            max_length=job.max_length,
        ).to_json(),
        inputs=({"name": "captions", "fingerprint": captions.fingerprint},),
        shards=captions.num_shards,
    ).made_from(captions)
    if execution.is_local and not execution.workers:
        execution = replace(execution, workers=1)
    workers = execution.local_workers if execution.is_local else 1
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else 0

    def build(pipeline: beam.Pipeline, finished: frozenset[int], check: FirstWorker | None) -> None:
        from pipelines.text.token_feature_transforms import build_token_features

        build_token_features(pipeline, finished, check, job=job, captions=captions, output=output, meter=meter, threads=threads)

    return run_job(
        output,
        build,
        ReusePolicy(overwrite=job.overwrite, verify=job.verify),
        execution=execution,
        extras=("pipelines", "extractors", "bert"),
        ready=job.check_device if execution.is_local else None,
        check=partial(_check_worker, job, output),
        meter=meter,
    )

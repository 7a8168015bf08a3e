"""``imagepivot encode``: turns tokens into ids of a vocabulary, shard by shard; `encoding_transforms` says how.

Beam is not loaded to find that there is nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.jobs import EncodeJob
from pipelines.running.execution import Execution
from pipelines.running.jobs import run_job
from pipelines.running.meter import Meter
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError
from schemas.manifest import Manifest
from schemas.parameters import CaptionsParameters, EncodedParameters
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy

if TYPE_CHECKING:
    import apache_beam as beam

    from pipelines.running.first_worker import FirstWorker


def encode_captions(job: EncodeJob, execution: Execution = Execution(), meter: Meter = Meter()) -> Manifest:
    """Make a dataset of kind ``encoded`` with as many shards as the captions have.

    Args:
        job: what to make.
        execution: where and how to run.
        meter: counts captions, for a progress display.

    Returns:
        The manifest of the committed dataset.

    Raises:
        DatasetError: an input is not a dataset of the expected kind.
    """
    execution.check_locations((("CAPTIONS", job.captions), ("VOCABULARY", job.vocabulary), ("OUTPUT", job.output)))
    captions = open_dataset(job.captions, kind="captions")
    vocabulary = open_dataset(job.vocabulary, kind="vocabulary")
    if captions.manifest.rows == 0:
        raise DatasetError(f"{job.captions!r} holds no captions, so there is nothing to encode: prepare the captions again")
    output = plan_encoding(job, captions, vocabulary)

    def build(pipeline: beam.Pipeline, finished: frozenset[int], check: FirstWorker | None) -> None:
        from pipelines.text.encoding_transforms import build_encoding

        build_encoding(pipeline, finished, check, job=job, captions=captions, vocabulary=vocabulary, output=output, meter=meter)

    return run_job(output, build, ReusePolicy(overwrite=job.overwrite, verify=job.verify), execution=execution, meter=meter)


def plan_encoding(job: EncodeJob, captions: Dataset, vocabulary: Dataset) -> OutputDataset:
    """Return the dataset that a job writes."""
    return OutputDataset(
        folder=Folder(job.output),
        kind="encoded",
        parameters=EncodedParameters(
            max_length=job.max_length,
            vocabulary_size=vocabulary.manifest.rows,
            # A model trained on these ids can only answer queries that went through the same recipe.
            text=CaptionsParameters.from_json(captions.manifest.parameters).text,
        ).to_json(),
        inputs=(
            {"name": "captions", "fingerprint": captions.fingerprint},
            {"name": "vocabulary", "fingerprint": vocabulary.fingerprint},
        ),
        shards=captions.num_shards,
    ).made_from(captions, vocabulary)

"""From the job of a command to what it has to do and the pipeline that it would submit. Nothing is written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import apache_beam as beam

from pipelines.estimates.estimate import Work
from pipelines.estimates.graph import Graph, graph_of
from pipelines.features.extract import list_images, plan_features
from pipelines.features.job import FeaturesJob, stored_bytes
from pipelines.features.transforms import ExtractFeatures
from pipelines.inputs.images import ImagesInFolder, ImageTable, Listing, kept_refs
from pipelines.running.commits import CommitDataset
from pipelines.running.execution import Execution
from pipelines.running.first_worker import FirstWorker
from pipelines.text.caption_transforms import build_captions
from pipelines.text.captions import CaptionsJob, plan_captions
from pipelines.text.encoding import EncodeJob, plan_encoding
from pipelines.text.encoding_transforms import build_encoding
from pipelines.text.truecasers import load_truecasers
from pipelines.text.vocabulary import VocabularyJob, plan_vocabulary
from pipelines.text.vocabulary_transforms import build_counts
from schemas.dataset import Dataset, open_dataset
from schemas.fingerprints import sha256_of_bytes
from schemas.keys import LIKE
from schemas.output import Output
from schemas.remote_jobs import RemoteJob
from schemas.sharding import TEXT_SHARD_BYTES, VECTOR_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards
from schemas.storage import Folder

__all__ = ["invented_captions", "plan_of_captions", "plan_of_encoding", "plan_of_features", "plan_of_vocabulary"]


def plan_of_features(
    job: FeaturesJob, execution: Execution, *, count: int | None = None, item_bytes: float | None = None
) -> tuple[Work, Graph]:
    """Return what a job of features has to do, and its pipeline.

    Args:
        job: what to make.
        execution: where it would run.
        count: number of images; then neither they nor the folder of the dataset nor weights are looked at.
        item_bytes: mean size of an image file; None for that of the images.

    Raises:
        ImagepivotError: the images cannot be listed, or the shards would be too large.
    """
    if count is None:
        Folder(job.output).check_writable()
        listing = list_images(job, keep=True)
        count, item_bytes = listing.count, _mean_bytes(listing) if item_bytes is None else item_bytes
    else:
        listing = _invented_listing(job, count)
        job = replace(
            job, extractor=replace(job.extractor, weights="random:0"), overwrite=True, update=None, retry_failed=False
        )
    work = Work(
        *("features", "images", count, len(listing.shards), job.images.location, job.output),
        item_bytes=item_bytes,
        row_bytes=stored_bytes(job.extractor),
        are_objects=isinstance(job.images, (ImagesInFolder, ImageTable)),
    )
    output = plan_features(job, listing)
    return work, graph_of(partial(_build_features, job=job, output=output, execution=execution), execution, job.extras())


def plan_of_captions(job: CaptionsJob, execution: Execution, *, count: int | None = None) -> tuple[Work, Graph]:
    """Return what a job of captions has to do, and its pipeline. The files are asked for their sizes, and not read.

    Args:
        job: what to make.
        execution: where it would run.
        count: number of captions, which only reading would tell; None if it is unknown.

    Raises:
        ImagepivotError: the source is not as it should be, or the shards would be too large.
    """
    Folder(job.output).check_writable()
    folder = job.source.folder
    parts = job.source.parts(job.selection)
    names = sorted({name for part in parts for name in (part.name, part.images) if name})
    sizes = [folder.size(name) or 0 for name in names]
    inputs = [{"name": name, "bytes": size, "sha256": _digest(name)} for name, size in zip(names, sizes, strict=True)]
    models = load_truecasers(job.truecaser) if job.truecaser is not None else None
    output = plan_captions(job, inputs, models)
    work = Work(
        *("captions", "captions", count, output.shards, folder.location, job.output),
        item_bytes=sum(sizes) / count if count else None,
        are_objects=False,
    )
    build = partial(build_captions, check=_first_worker(output, execution), job=job, output=output, models=models)
    return work, graph_of(build, execution)


def invented_captions(source: str, output: str, shards: int | str, *, count: int, item_bytes: float) -> Work:
    """Return the work of a job of captions, nothing of which is looked at.

    Args:
        source: where they would be.
        output: folder of the dataset.
        shards: the number of shards that is asked for.
        count: number of captions.
        item_bytes: mean size of a raw caption, with what stands beside it in its file.

    Raises:
        UsageError: the shards would be too large.
    """
    chosen = _shards(shards, output, round(count * item_bytes), TEXT_SHARD_BYTES)
    return Work("captions", "captions", count, chosen, source, output, item_bytes=item_bytes, are_objects=False)


def plan_of_vocabulary(job: VocabularyJob, execution: Execution) -> tuple[Work, Graph]:
    """Return what a job of a vocabulary has to do, and its pipeline. Its shards are those of the captions.

    Raises:
        DatasetError: there are no captions.
    """
    Folder(job.output).check_writable()
    captions = open_dataset(job.captions, kind="captions")
    output = plan_vocabulary(job, captions)
    build = partial(build_counts, check=_first_worker(output, execution), job=job, captions=captions, output=output)
    return _of_dataset("vocabulary", captions, job.output), graph_of(build, execution)


def plan_of_encoding(job: EncodeJob, execution: Execution) -> tuple[Work, Graph]:
    """Return what a job that encodes captions has to do, and its pipeline.

    Raises:
        DatasetError: there are no captions, or no vocabulary.
    """
    Folder(job.output).check_writable()
    captions, vocabulary = open_dataset(job.captions, kind="captions"), open_dataset(job.vocabulary, kind="vocabulary")
    output = plan_encoding(job, captions, vocabulary)
    check = _first_worker(output, execution)
    build = partial(build_encoding, check=check, job=job, captions=captions, vocabulary=vocabulary, output=output)
    return _of_dataset("encode", captions, job.output), graph_of(build, execution)


def _of_dataset(command: str, captions: Dataset, output: str) -> Work:
    manifest = captions.manifest
    size = sum(shard.bytes for shard in manifest.shards)
    return Work(
        *(command, "captions", manifest.rows or None, len(manifest.shards), captions.folder.location, output),
        item_bytes=size / manifest.rows if manifest.rows else None,
        are_objects=False,
    )


def _build_features(pipeline: beam.Pipeline, *, job: FeaturesJob, output: Output, execution: Execution) -> None:
    """Add the steps that `pipelines.features.extract.extract_features` adds."""
    job = job.for_workers(execution)
    extract = ExtractFeatures(job, output, check=_first_worker(output, execution), accelerator=execution.accelerator)
    commit = CommitDataset(output, libraries=job.libraries())
    _ = pipeline | "ExtractFeatures" >> extract | "CommitDataset" >> commit


def _first_worker(output: Output, execution: Execution) -> FirstWorker | None:
    if execution.runs_here:
        return None
    return FirstWorker.of_launcher(output.folder, None, RemoteJob.of_launcher(execution.runner, (), ""))


def _invented_listing(job: FeaturesJob, count: int) -> Listing:
    shards = _shards(job.shards, job.output, count * job.feature_bytes(), VECTOR_SHARD_BYTES)
    counts = tuple(count // shards + (number < count % shards) for number in range(shards))
    digests = tuple(_digest(str(number)) for number in range(shards))
    return Listing(counts, digests, digests)


def _shards(asked: int | str, output: str, size: int, shard_bytes: int) -> int:
    """Return the number of shards of a new folder."""
    is_known = isinstance(asked, int) or asked.startswith(LIKE)
    known = known_shards(asked, Folder(output), overwrite=True) if is_known else None
    shards = known or choose_shards(size, shard_bytes)
    check_shard_bytes(shards, size, None)
    return shards


def _digest(text: str) -> str:
    """Return a digest that stands for another one, which takes as many bytes."""
    return sha256_of_bytes(text.encode())


def _mean_bytes(listing: Listing) -> float | None:
    """Return the mean size of the images of a listing that was kept; None where listing does not tell sizes."""
    assert listing.kept is not None
    total = known = 0
    for ref in kept_refs(listing.kept.path):
        if ref.bytes >= 0:
            total, known = total + ref.bytes, known + 1
    return total / known if known else None

"""Staging of images in row groups: each group is read once.

Its images are copied to a staging area for the shard workers. Consecutive groups form batches, which are large enough for chunks of
about a dozen images per shard. In an update each shard first selects the images that it will read.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import TypeAlias

from pipelines.features.feature_shards import reusable_rows
from pipelines.features.ref_chunks import RefChunk, from_chunks, partition_by_shard, to_chunks
from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.listing import REFS_SCHEMA
from pipelines.inputs.images.staged_images import STAGED_SCHEMA, StagingArea
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from pipelines.running.process_pool import Map, by_key
from pipelines.running.spill_files import gather, spill_folder
from schemas.errors import DatasetError
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset

_MIN_BATCH_REFS, _MAX_BATCH_REFS = 1 << 10, 1 << 17
_SHARD_REFS = 16  # Mean images of a shard in a batch.

RowGroupBatch: TypeAlias = tuple[int, RefChunk]
"""Index of a batch of row groups, and the references in it of one shard."""


@contextmanager
def staging_area(job: FeaturesJob, execution: Execution, output: Folder) -> Iterator[StagingArea | None]:
    """Yield a staging area: in the output for remote workers, else on a local disk.

    None if images have no row groups.
    """
    if not isinstance(job.open_images(), ImagesInParquet):
        yield None
    elif not execution.is_local:
        yield StagingArea.of_run(output)
    else:
        with spill_folder(output) as folder:
            copies = StagingArea.of_run(Folder(folder))
            try:
                yield copies
            finally:
                with suppress(DatasetError):  # The commit or the next run deletes them.
                    copies.delete()


def row_group_batches(
    images: ImagesInParquet, refs: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int], folder: str | None = None
) -> Iterator[tuple[int, RowGroupBatch]]:
    """Yield shard index and batch part, see `ref_chunks.chunk_refs`."""
    size = min(max(_MIN_BATCH_REFS, _SHARD_REFS * shards), _MAX_BATCH_REFS)
    for index, groups in enumerate(gather(images.groups(refs), size, len)):
        batch = chain.from_iterable(groups)
        for shard, chunk in partition_by_shard(batch, shards, skip_shards=skip_shards, folder=folder):
            yield shard, (index, chunk)


def stage_images(
    job: FeaturesJob,
    output: OutputDataset,
    refs: Iterable[ImageRef],
    copies: StagingArea,
    *,
    skip_shards: frozenset[int],
    folder: str,
    run: Map,
) -> dict[int, list[RefChunk]]:
    """Copy images with local workers, and return the chunks of each shard.

    Chunks hold references, or copies in the staging area. ``folder`` is a local folder for chunks.
    """
    images = job.open_images()
    assert isinstance(images, ImagesInParquet), "only Parquet has row groups"
    batches = by_key(row_group_batches(images, refs, output.shards, skip_shards=skip_shards, folder=folder))
    chunks = {shard: [chunk for _, chunk in parts] for shard, parts in batches.items()}
    wanted: Iterable[RowGroupBatch] = chain.from_iterable(batches.values())
    if job.policy.update or job.policy.retry_failed:
        wanted = chain.from_iterable(run(partial(select_refs, job=job, output=output, folder=folder), batches.items()))
    copy = partial(copy_images, images=images, copies=copies, shards=output.shards, folder=folder)
    for shard, chunk in chain.from_iterable(run(copy, by_key(wanted).items())):
        chunks[shard].append(chunk)
    return chunks


def select_refs(
    element: tuple[int, Iterable[RowGroupBatch]], job: FeaturesJob, output: OutputDataset, folder: str | None
) -> list[RowGroupBatch]:
    """Return references to the images that a shard will read, by batch."""
    shard, parts = element
    batches = {index: from_chunks([chunk])[0] for index, chunk in parts}
    refs = sorted(ref for batch in batches.values() for ref in batch)
    wanted = {ref.uri for ref in reusable_rows(output, shard, refs, job.policy, read=None).todo}
    selected = ((index, [ref for ref in batch if ref.uri in wanted]) for index, batch in batches.items())
    return list(to_chunks(((index, batch) for index, batch in selected if batch), REFS_SCHEMA, folder))


def copy_images(
    element: tuple[int, Iterable[RefChunk]], images: ImagesInParquet, copies: StagingArea, shards: int, folder: str | None
) -> list[tuple[int, RefChunk]]:
    """Copy the images of a batch, and return shard indices and chunks of copies."""
    refs = images.in_reading_order(from_chunks(element[1])[0])
    shard = {ref.uri: shard_of(ref.image_id, shards) for ref in refs}
    by_shard = by_key((shard[copy.uri], copy) for copy in copies.write(images, refs))
    return list(to_chunks(sorted(by_shard.items()), STAGED_SCHEMA, folder))

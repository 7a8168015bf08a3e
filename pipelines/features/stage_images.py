"""Images that cost a whole group, such as a row group of Parquet, are copied before the shards are made: each group is read once.

What is copied at once is a portion: groups that follow one another, of so many images that the places of their copies travel in
pieces of a dozen. Where a run updates a dataset, each shard says first which of its images it will read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import apache_beam as beam

from pipelines.features.feature_shards import reusable_rows
from pipelines.features.ref_chunks import RefChunk, partition_by_shard, refs_in, to_chunks
from pipelines.inputs.images import STAGED_SCHEMA, ImageRef, ImageSource, StagedImage, StagingArea
from pipelines.inputs.images.listing import REFS_SCHEMA
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from pipelines.running.spill_files import staging
from schemas.errors import DatasetError
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset

_LEAST, _MOST = 1 << 10, 1 << 17
_OF_A_SHARD = 16

RowGroupBatch: TypeAlias = tuple[int, RefChunk]
"""Number of a portion, and references to those of its images that are of one shard."""


@contextmanager
def place_of_copies(job: FeaturesJob, execution: Execution, output: Folder) -> Iterator[StagingArea | None]:
    """Yield where a run copies images to; None where that saves nothing, because one process reads them or each costs only itself.

    On other machines that is the folder of the dataset, and here one on a local disk.
    """
    if not job.open_images().has_row_groups or (execution.is_local and execution.local_workers == 1):
        yield None
    elif not execution.is_local:
        yield StagingArea.of_run(output)
    elif job.task is not None and not output.is_local:  # Other tasks may run on this machine.
        with tempfile.TemporaryDirectory(prefix="imagepivot-images-", ignore_cleanup_errors=True) as folder:
            yield StagingArea.of_run(Folder(folder))
    else:
        with staging(output) as folder:
            copies = StagingArea.of_run(Folder(folder))
            try:
                yield copies
            finally:
                with suppress(DatasetError):  # Whatever commits, or runs next, deletes them.
                    copies.delete()


def row_group_batches(
    images: ImageSource, refs: Iterable[ImageRef], shards: int, *, skip_shards: frozenset[int], folder: str | None
) -> Iterator[tuple[int, RowGroupBatch]]:
    """Cut references into portions, and these by shards; arguments and errors as of `pipelines.features.ref_chunks.chunk_refs`.

    Yields:
        The number of a shard, and its part of a portion.
    """
    for number, gathered in enumerate(_gather(images, refs, min(max(_LEAST, _OF_A_SHARD * shards), _MOST))):
        yield from (
            (shard, (number, piece))
            for shard, piece in partition_by_shard(gathered, shards, skip_shards=skip_shards, folder=folder)
        )


def _gather(images: ImageSource, refs: Iterable[ImageRef], size: int) -> Iterator[list[ImageRef]]:
    gathered: list[ImageRef] = []
    for group in images.groups(refs):
        gathered += group
        if len(gathered) >= size:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


@dataclass(eq=False)
class CopyImages(beam.PTransform):
    """Copies the images of portions, and yields the places of the copies by the numbers of their shards.

    Attributes:
        copies: where the copies go.
        folder: where all workers see the same local disk, a folder on it for the places.
    """

    job: FeaturesJob
    output: OutputDataset
    copies: StagingArea
    folder: str | None = None

    def expand(self, portions: beam.PCollection) -> beam.PCollection:
        """Take the references by portion, or for an update first by shard, and copy each portion in one call."""
        if not self.job.policy.update and not self.job.policy.retry_failed:
            wanted = portions | "AllImages" >> beam.Values()
        else:
            choose = beam.FlatMap(_wanted, self.job, self.output, self.folder)
            wanted = portions | "GroupByShard" >> beam.GroupByKey() | "WantedImages" >> choose
        copy = beam.FlatMap(_copied, self.job.open_images(), self.copies, self.output.shards, self.folder)
        return wanted | "GroupByPortion" >> beam.GroupByKey() | "CopyPortion" >> copy


def _wanted(
    element: tuple[int, Iterable[RowGroupBatch]], job: FeaturesJob, output: OutputDataset, folder: str | None
) -> Iterator[RowGroupBatch]:
    """Yield the references to those images of a shard that will be read."""
    shard, portions = element
    by_portion = {number: refs_in([piece]) for number, piece in portions}
    read: list[ImageRef] = []

    def note(ref: ImageRef) -> NoReturn:
        read.append(ref)
        raise OSError

    everything = sorted(ref for refs in by_portion.values() for ref in refs)
    reuse = reusable_rows(output, shard, everything, job.policy, read=note)
    wanted = {ref.uri for ref in (*read, *reuse.todo)}
    chosen = ((number, [ref for ref in refs if ref.uri in wanted]) for number, refs in by_portion.items())
    yield from to_chunks(((number, refs) for number, refs in chosen if refs), REFS_SCHEMA, folder)


def _copied(
    element: tuple[int, Iterable[RefChunk]], images: ImageSource, copies: StagingArea, shards: int, folder: str | None
) -> Iterator[tuple[int, RefChunk]]:
    """Copy the images of a portion, and yield the places of the copies by shard."""
    refs = images.in_reading_order(refs_in(element[1]))
    shard = {ref.uri: shard_of(ref.image_id, shards) for ref in refs}
    by_shard: dict[int, list[StagedImage]] = {}
    for copy in copies.write(images, refs):
        by_shard.setdefault(shard[copy.uri], []).append(copy)
    yield from to_chunks(sorted(by_shard.items()), STAGED_SCHEMA, folder)

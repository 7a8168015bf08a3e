"""Write one shard of features, extracting only what is missing or has changed: a plain function, without Beam."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import extractors
from pipelines.features.decoding_processes import DecodingProcesses
from pipelines.features.forward import Tally, extract_shard, merge_rows
from pipelines.features.reuse import Reuse, is_intact, plan_reuse, source_of, statistics_of
from pipelines.inputs.images import ImageRef, ImageSource, Listing, digest_of
from schemas.errors import InputError
from schemas.kinds import batch_rows
from schemas.shards import shard_entry
from schemas.storage.locations import is_remote
from schemas.storage.storage_errors import content_errors
from schemas.writing.output import OutputDataset
from schemas.writing.records import Record, Source, write_record
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import open_shard

_SORTED_ROWS = 64  # at most


def make_shard(
    output: OutputDataset,
    number: int,
    refs: Sequence[ImageRef],
    policy: ReusePolicy = ReusePolicy(),
    *,
    images: ImageSource,
    extractor: extractors.Extractor,
    batch_size: int,
    threads: int,
    processes: DecodingProcesses | None = None,
    on_batch: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Write one shard.

    If the shard exists, from an earlier run of the same fingerprint, what `plan_reuse` lets stay is kept and only the rest is
    extracted: the result is the same as if all had been extracted at once. If everything stays, the shard is left alone.

    Args:
        output: the dataset.
        number: number of the shard.
        refs: the images of the shard, in any order.
        policy: what stays of the shard.
        images: reads them.
        extractor: the loaded extractor.
        batch_size: images that the model takes at once.
        threads: decoding threads; without ``processes``.
        processes: what decodes; None for threads of this process.
        on_batch: is called after each batch with the tally of that batch.

    Returns:
        The tally of the shard.

    Raises:
        InputError: two images have the same id, the list of images has changed since the run began, or the source is gone.
    """
    refs = sorted(refs)
    images.check_ids(refs)
    _refuse_other_list(output, number, refs, images)
    refs = images.with_versions(refs)
    reuse = plan_reuse(output, number, refs, policy, read=images.read)
    if (reuse.rows or reuse.failures) and not is_intact(output, number):
        reuse = Reuse(todo=refs)
    tally = Tally(failures=list(reuse.failures))
    if _is_left_alone(output, number, reuse):
        return tally
    name, schema = output.name(number), output.schema
    expected = len(reuse.todo) + len(tally.failures)
    ordered = images.in_reading_order(reuse.todo)
    new: Iterable[pa.Table] = extract_shard(
        ordered,
        extractor=extractor,
        read=images.read,
        schema=schema,
        batch_size=batch_size,
        threads=threads,
        tally=tally,
        reads=images.parallel_reads,
        processes=processes,
        on_batch=on_batch,
    )
    if ordered is not reuse.todo:
        new = _sort_rows(new, schema)
    with open_shard(output, number) as shard:
        for table in merge_rows(_batches(output, name, reuse.rows), new) if reuse.rows else new:
            shard.write(table)
        if tally.images + len(tally.failures) != expected:
            raise RuntimeError(f"{name}: {tally.images} rows and {len(tally.failures)} failures of {expected} images")
        _refuse_gone(images, tally)
        shard.add_failures(tally.failures)
        sources = [*reuse.sources, *(source_of(ref, tally.digests.get(ref.image_id, "")) for ref in reuse.todo)]
        shard.statistics = statistics_of(sources, images=len(reuse.rows) + tally.images, failed=len(tally.failures))
        shard.sources, shard.state = sources, _state(sources)
    return tally


def _is_left_alone(output: OutputDataset, number: int, reuse: Reuse) -> bool:
    """Whether a shard would become what it is. What lies beside it is then brought up to date."""
    if reuse.footer is None or reuse.todo or reuse.dropped:
        return False
    name, state = output.name(number), _state(reuse.sources)
    if statistics_of(reuse.sources, images=len(reuse.rows), failed=len(reuse.failures)) != reuse.footer.statistics:
        return False
    if reuse.record is None or reuse.record.state != state:
        entry = shard_entry(output.folder, name, reuse.footer.rows)
        write_record(output.folder, name, Record.of(entry, reuse.footer, state, reuse.sources))
    return True


def _state(sources: Iterable[Source]) -> str:
    return digest_of((source.image_id, source.uri, str(source.bytes), source.version) for source in sources)


def _refuse_other_list(output: OutputDataset, number: int, refs: Sequence[ImageRef], images: ImageSource) -> None:
    """Refuse a shard whose images are not those that the launcher listed: a shard of others must not count as finished."""
    if output.listings is not None and Listing.of(refs, 1).shards[0] != output.listings[number]:
        raise InputError(
            f"the images in {images.location!r} changed while the run was going on: shard {number} has {len(refs)} images now, and "
            "its list is another one. Wait until they are all there, and run the same command again; finished shards are kept"
        )


def _refuse_gone(images: ImageSource, tally: Tally) -> None:
    """Refuse to commit a shard if the whole source is gone, say a network disk: its images have not failed one by one."""
    unreadable = any(row["reason"] == "unreadable" for row in tally.failures)
    if unreadable and not is_remote(images.location) and not Path(images.location).exists():
        raise InputError(
            f"the images {images.location!r} were there when the run began and are gone: bring them back (a network disk?) and run "
            "the same command again; finished shards are kept"
        )


def _sort_rows(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """Sort rows by image id, through a temporary file, so that memory does not grow with the shard."""
    with tempfile.NamedTemporaryFile(prefix="imagepivot-") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for table in tables:
                writer.write_table(table)
        file.flush()
        with pa.memory_map(file.name) as mapped:
            reader = pa.ipc.open_file(mapped)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            ids = ((key, number, row) for number, batch in enumerate(batches) for row, key in enumerate(batch[0].to_pylist()))
            places = iter(sorted(ids))
            while chosen := list(islice(places, min(_SORTED_ROWS, batch_rows(schema)))):
                rows = [batches[number].slice(row, 1) for _, number, row in chosen]
                yield pa.Table.from_batches(rows).combine_chunks()


def _batches(output: OutputDataset, name: str, ids: frozenset[str]) -> Iterator[pa.RecordBatch]:
    """Yield the stored rows with these ids."""
    kept = pa.array(sorted(ids), pa.string())
    with output.folder.open(name) as file, content_errors(output.folder.path_of(name)):
        parquet = pq.ParquetFile(file)
        for batch in parquet.iter_batches(batch_size=batch_rows(parquet.schema_arrow)):
            rows = batch.filter(pc.is_in(batch["image_id"], kept))
            if rows.num_rows:
                yield rows

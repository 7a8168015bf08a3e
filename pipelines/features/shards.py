"""Write one shard of features, extracting only what is missing: a plain function, without Beam."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import extractors
from pipelines.features.forward import Tally, extract_shard, merge_rows, refuse_duplicates
from pipelines.inputs.images import ImageRef, ImageSource, Listing
from schemas.batches import batch_rows
from schemas.errors import InputError
from schemas.output import Output
from schemas.shards import failures_name, read_footer
from schemas.storage import is_remote
from schemas.writing import open_shard

__all__ = ["make_shard"]

_SORTED_ROWS = 64


def make_shard(
    output: Output,
    number: int,
    refs: Sequence[ImageRef],
    *,
    images: ImageSource,
    extractor: extractors.Extractor,
    batch_size: int,
    threads: int,
    retry_failed: bool = False,
    on_batch: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Write one shard.

    If the shard exists, from an earlier run of the same identity, its rows are kept and only images that have neither a row nor
    a failure are extracted: the result is the same as if all had been extracted at once.

    Args:
        output: the dataset.
        number: number of the shard.
        refs: the images of the shard, in any order.
        images: reads them.
        extractor: the loaded extractor.
        batch_size: images that the model takes at once.
        threads: decoding threads.
        retry_failed: try the images again that failed before.
        on_batch: is called after each batch with the tally of that batch.

    Returns:
        The tally of the shard.

    Raises:
        InputError: two images have the same id, the list of images has changed since the run began, or the source is gone.
    """
    refs = sorted(refs)
    refuse_duplicates(refs)
    _refuse_other_list(output, number, refs, images)
    name, schema, tally = output.name(number), output.schema, Tally()
    kept_ids, kept_failures = _kept(output, number)
    wanted = {ref.image_id for ref in refs}
    again = {key for key in kept_failures if retry_failed and key in wanted}
    tally.failures += [row for key, row in kept_failures.items() if key not in again]
    todo = [
        ref for ref in refs if ref.image_id not in kept_ids and (ref.image_id not in kept_failures or ref.image_id in again)
    ]
    expected = len(todo) + len(tally.failures)
    ordered = images.in_reading_order(todo)
    new: Iterable[pa.Table] = extract_shard(
        ordered,
        extractor=extractor,
        read=images.read,
        schema=schema,
        batch_size=batch_size,
        threads=threads,
        tally=tally,
        on_batch=on_batch,
    )
    if ordered is not todo:
        new = _sort_rows(new, schema)
    with open_shard(output, number) as shard:
        for table in merge_rows(_batches(output, name), new) if kept_ids else new:
            shard.write(table)
        if tally.images + len(tally.failures) != expected:
            raise RuntimeError(f"{name}: {tally.images} rows and {len(tally.failures)} failures of {expected} images")
        _refuse_gone(images, tally)
        shard.add_failures(tally.failures)
        shard.statistics = {
            "listing": output.listings[number] if output.listings is not None else "",
            "images": len(kept_ids) + tally.images,
            "failed": len(tally.failures),
        }
    return tally


def _refuse_other_list(output: Output, number: int, refs: Sequence[ImageRef], images: ImageSource) -> None:
    """Refuse a shard whose images are not those that the launcher listed: a shard of fewer must not count as finished."""
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
            while chosen := list(islice(places, _SORTED_ROWS)):
                rows = [batches[number].slice(row, 1) for _, number, row in chosen]
                yield pa.Table.from_batches(rows).combine_chunks()


def _kept(output: Output, number: int) -> tuple[set[str], dict[str, dict[str, str]]]:
    """Return the ids of the rows that an earlier run wrote, and its failures by key."""
    if output.footer(number) is None:
        return set(), {}
    with output.folder.open(output.name(number)) as file:
        ids = set(pq.read_table(file, columns=["image_id"])["image_id"].to_pylist())
    failures = failures_name(output.name(number))
    if output.own(read_footer(output.folder, failures)) is None:
        return ids, {}
    with output.folder.open(failures) as file:
        return ids, {row["key"]: row for row in pq.read_table(file).to_pylist()}


def _batches(output: Output, name: str) -> Iterator[pa.RecordBatch]:
    with output.folder.open(name) as file:
        parquet = pq.ParquetFile(file)
        yield from (batch for batch in parquet.iter_batches(batch_size=batch_rows(parquet.schema_arrow)) if batch.num_rows)

"""Write one shard of features without Beam: reuse the rows whose images are unchanged, extract the others.

An image is unchanged if its address, size and modification time are those on record beside the shard, or on request if its bytes
have the same digest. Where nothing is on record, all images are read: their digests together are in the footer of the shard. If
they differ, the whole shard is extracted again, since nothing says which image changed.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.features.inference import LoadedExtractor, Tally, extract_rows, merge_rows
from pipelines.inputs.images import ImageRef, ImageSource, Listing, digest_of
from schemas.errors import DatasetError, InputError
from schemas.failures import read_failures
from schemas.footers import Footer, shard_entry
from schemas.kinds import batch_rows
from schemas.storage.locations import is_remote
from schemas.storage.storage_errors import content_errors
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import read_state
from schemas.writing.records import Record, Source, read_record, write_record
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import open_shard

_READING_THREADS = 8

Read = Callable[[ImageRef], bytes]


@dataclass(frozen=True)
class Reuse:
    """What stays of a shard, and what has to be made.

    Attributes:
        todo: the images to extract, sorted by image id.
        rows: ids of the stored rows that stay.
        failures: the stored failures that stay.
        sources: what the rows and failures that stay were made from.
        dropped: number of stored rows and failures that do not stay.
        footer: footer of the stored shard; None if there is none.
        record: the record beside it; None if there is none.
    """

    todo: list[ImageRef]
    rows: frozenset[str] = frozenset()
    failures: list[dict[str, str]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    dropped: int = 0
    footer: Footer | None = None
    record: Record | None = None


@dataclass(frozen=True)
class _Stored:
    footer: Footer
    record: Record | None
    rows: frozenset[str]
    failures: Mapping[str, dict[str, str]]
    sources: Mapping[str, Source] | None


def source_of(ref: ImageRef, sha256: str) -> Source:
    """Return what lies beside a shard about one of its images."""
    return Source(ref.image_id, ref.uri, ref.bytes, ref.version, sha256)


def statistics_of(sources: Iterable[Source], *, images: int, failed: int) -> dict[str, object]:
    """Return the statistics of a shard's footer: counts, and digests of what it was made from.

    ``listing`` is the digest of ids, addresses and sizes, ``content`` that of ids and the SHA-256 of the images' bytes.
    """
    sources = list(sources)
    return {
        "images": images,
        "failed": failed,
        "listing": digest_of((source.image_id, source.uri, str(source.bytes)) for source in sources),
        "content": digest_of((source.image_id, source.sha256) for source in sources),
    }


def reusable_rows(output: OutputDataset, number: int, refs: Sequence[ImageRef], policy: ReusePolicy, *, read: Read) -> Reuse:
    """Decide what stays of a shard whose images, sorted by image id, are these now.

    ``read`` returns the bytes of an image, or raises OSError; it is called where digests have to be compared.
    """
    stored = _read_stored(output, number)
    if stored is None:
        return Reuse(todo=list(refs))
    tried = [ref for ref in refs if not _try_again(stored.failures.get(ref.image_id), policy)]
    if policy.only_add:
        stay = {ref.image_id: _unchanged(stored, ref.image_id) for ref in tried if _is_stored(stored, ref.image_id)}
    else:
        stay = {source.image_id: source for source in _same(stored, refs, tried, output, number, read, policy)}
    if policy.only_add or policy.keep_removed:
        wanted = {ref.image_id for ref in refs}
        gone = (stored.rows | stored.failures.keys()) - wanted
        stay |= {image_id: _unchanged(stored, image_id) for image_id in gone}
    rows = stored.rows & stay.keys()
    failures = [row for key, row in stored.failures.items() if key in stay]
    return Reuse(
        todo=[ref for ref in refs if ref.image_id not in stay],
        rows=rows,
        failures=failures,
        sources=list(stay.values()),
        dropped=len(stored.rows) + len(stored.failures) - len(rows) - len(failures),
        footer=stored.footer,
        record=stored.record,
    )


def _read_stored(output: OutputDataset, number: int) -> _Stored | None:
    """Read what an earlier run of the same fingerprint wrote; None if it wrote nothing, or what is there is damaged."""
    folder, name = output.folder, output.name(number)
    shard = read_state(output, number)
    record = read_record(folder, name, whole=True) if shard.is_intact else None
    if shard.footer is None or record is None:
        return None
    try:
        with folder.open(name) as file, content_errors(folder.path_of(name)):
            rows = pq.ParquetFile(file).read(columns=["image_id"])["image_id"].to_pylist()
        failures = [] if shard.failures is None else read_failures(folder, shard.failures.path).to_pylist()
    except (FileNotFoundError, DatasetError):
        return None
    return _Stored(
        footer=shard.footer,
        record=record,
        rows=frozenset(rows),
        failures={row["key"]: row for row in failures},
        # Where only the manifest knew the digest of the shard, there is a record without sources.
        sources={source.image_id: source for source in record.sources or ()} if record.state else None,
    )


def _try_again(failure: Mapping[str, str] | None, policy: ReusePolicy) -> bool:
    # A file may have become readable without a change of its own.
    return failure is not None and (policy.retry_failed or (failure["reason"] == "unreadable" and not policy.only_add))


def _is_stored(stored: _Stored, image_id: str) -> bool:
    return image_id in stored.rows or image_id in stored.failures


def _unchanged(stored: _Stored, image_id: str) -> Source:
    return (stored.sources or {}).get(image_id, Source(image_id, "", -1, "", ""))


def _same(
    stored: _Stored,
    refs: Sequence[ImageRef],
    tried: Sequence[ImageRef],
    output: OutputDataset,
    number: int,
    read: Read,
    policy: ReusePolicy,
) -> list[Source]:
    """Return the sources of the images whose rows and failures stay."""
    sources = stored.sources
    if sources is None:
        if output.listings is None or stored.footer.statistics.get("listing") != output.listings[number]:
            return []
        now = [source_of(ref, sha256) for ref, sha256 in zip(refs, _digests(refs, read), strict=True)]
        content = statistics_of(now, images=0, failed=0)["content"]
        if content != stored.footer.statistics.get("content"):
            return []  # Some image is another one, and nothing says which.
        ids = {ref.image_id for ref in tried}
        return [source for source in now if source.image_id in ids and _is_stored(stored, source.image_id)]
    known = [ref for ref in tried if ref.image_id in sources]
    if policy.check_content:
        now = [source_of(ref, sha256) for ref, sha256 in zip(known, _digests(known, read), strict=True)]
        return [source for source in now if source.sha256 and _has_same_bytes(source, sources[source.image_id], stored)]
    return [sources[ref.image_id] for ref in known if sources[ref.image_id] == source_of(ref, sources[ref.image_id].sha256)]


def _has_same_bytes(now: Source, before: Source, stored: _Stored) -> bool:
    # A failure names the address of its image.
    return now.sha256 == before.sha256 and (now.uri == before.uri or now.image_id not in stored.failures)


def _digests(refs: Sequence[ImageRef], read: Read) -> list[str]:
    """Return the SHA-256 of the bytes of images; an empty string for those that cannot be read."""

    def digest(ref: ImageRef) -> str:
        try:
            return hashlib.sha256(read(ref)).hexdigest()
        except (OSError, DatasetError):
            return ""

    with ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="digest") as pool:
        return list(pool.map(digest, refs))


_SORTED_ROWS = 64  # at most


def write_feature_shard(
    output: OutputDataset,
    number: int,
    refs: Sequence[ImageRef],
    policy: ReusePolicy,
    images: ImageSource,
    loaded: LoadedExtractor,
    *,
    on_batch: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Write one shard.

    If the shard exists, from an earlier run of the same fingerprint, what `reusable_rows` lets stay is kept and only the rest is
    extracted: the result is the same as if all had been extracted at once. If everything stays, the shard is left alone.
    References come in any order. ``on_batch`` gets the tally of each batch after it; that of the shard is returned.

    Raises:
        InputError: two images have the same id, the list of images has changed since the run began, or the source is gone.
    """
    refs = sorted(refs)
    images.check_ids(refs)
    _refuse_other_list(output, number, refs, images)
    refs = images.with_versions(refs)
    reuse = reusable_rows(output, number, refs, policy, read=images.read)
    if (reuse.rows or reuse.failures) and not read_state(output, number, read_all=True).is_intact:
        reuse = Reuse(todo=refs)
    tally = Tally(failures=list(reuse.failures))
    if _is_left_alone(output, number, reuse):
        return tally
    name, schema = output.name(number), output.schema
    expected = len(reuse.todo) + len(tally.failures)
    ordered = images.in_reading_order(reuse.todo)
    new: Iterable[pa.Table] = extract_rows(
        ordered, loaded, read=images.read, schema=schema, tally=tally, reads=images.parallel_reads, on_batch=on_batch
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

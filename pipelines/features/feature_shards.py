"""Writing of a feature shard: reuse of unchanged rows, extraction of the others.

An image is unchanged if address, size and modification time match the shard's record, or with ``check_content`` if its digest does.
Without a record, a shard is extracted again unless all images together have the joint digest in its footer.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.features.inference import LoadedExtractor, Tally, extract_rows, merge_rows
from pipelines.inputs.images.base import ImageRef, ImageSource
from pipelines.inputs.images.listing import Listing, digest_of
from schemas.damage import content_errors
from schemas.errors import DatasetError, InputError
from schemas.escapes import redact_address
from schemas.failures import failure_row, failures_name, parse_failures
from schemas.footers import Footer, ShardRows, shard_entry
from schemas.kinds import batch_rows
from schemas.sample_outputs import are_equal
from schemas.storage.locations import is_remote
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import read_state
from schemas.writing.records import Record, Source, read_record, write_record
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import open_shard

_READING_THREADS = 8

Read = Callable[[ImageRef], bytes]
_MAX_SORTED_ROWS = 64


@dataclass(frozen=True)
class Reuse:
    """Reusable part of a stored shard, and images to extract.

    Attributes:
        todo: images to extract, sorted by image id.
        rows: ids of reusable stored rows.
        failures: reusable stored failures.
        sources: sources of reusable rows and failures.
        dropped: number of other stored rows and failures.
        changed: number of images to extract that the shard holds already.
    """

    todo: list[ImageRef]
    rows: frozenset[str] = frozenset()
    failures: list[dict[str, str]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    dropped: int = 0
    changed: int = 0
    stored: _Stored | None = None


@dataclass(frozen=True)
class _Stored:
    footer: Footer
    record: Record
    rows: frozenset[str]
    failures: Mapping[str, dict[str, str]]
    sources: Mapping[str, Source] | None

    @property
    def ids(self) -> frozenset[str]:
        return self.rows | self.failures.keys()


def source_of(ref: ImageRef, sha256: str) -> Source:
    """Return the entry of an image in a shard's record."""
    return Source(ref.image_id, redact_address(ref.uri), ref.bytes, ref.version, sha256)


def statistics_of(sources: Iterable[Source], *, images: int, failed: int) -> dict[str, object]:
    """Return the statistics of a shard's footer.

    ``listing`` is the digest of ids, addresses and sizes, ``content`` that of ids and SHA-256 of the images' bytes.
    """
    sources = list(sources)
    return {
        "images": images,
        "failed": failed,
        "listing": digest_of((source.image_id, source.uri, str(source.bytes)) for source in sources),
        "content": digest_of((source.image_id, source.sha256) for source in sources),
    }


def reusable_rows(
    output: OutputDataset, shard: int, refs: Sequence[ImageRef], policy: ReusePolicy, *, read: Read | None
) -> Reuse:
    """Find the reusable rows of a shard, given its current images sorted by image id.

    ``read`` returns the bytes of an image, or raises OSError; it is called to compare digests. Without it, images whose digests
    would be compared are not reused: ``todo`` has the images that a shard's writer reads, to extract or to compare.
    """
    stored = _read_stored(output, shard)
    if stored is None:
        return Reuse(todo=list(refs))
    candidates = [ref for ref in refs if not _is_retried(stored.failures.get(ref.image_id), policy)]
    if policy.only_add:
        reused = {ref.image_id: _stored_source(stored, ref.image_id) for ref in candidates if ref.image_id in stored.ids}
    else:
        reused = {source.image_id: source for source in _unchanged(stored, refs, candidates, output, shard, read, policy)}
    if policy.only_add or policy.keep_removed:
        removed = stored.ids - {ref.image_id for ref in refs}
        reused |= {image_id: _stored_source(stored, image_id) for image_id in removed}
    rows = stored.rows & reused.keys()
    failures = [row for key, row in stored.failures.items() if key in reused]
    todo = [ref for ref in refs if ref.image_id not in reused]
    return Reuse(
        todo=todo,
        rows=rows,
        failures=failures,
        sources=list(reused.values()),
        dropped=len(stored.rows) + len(stored.failures) - len(rows) - len(failures),
        changed=sum(ref.image_id in stored.ids for ref in todo),
        stored=stored,
    )


def _read_stored(output: OutputDataset, shard: int) -> _Stored | None:
    """Read a shard of an earlier run; None if it is missing or damaged."""
    folder, name = output.folder, output.name(shard)
    state = read_state(output, shard)
    record = read_record(folder, name, whole=True) if state.is_intact else None
    if state.footer is None or record is None:
        return None
    try:
        with folder.open(name) as file, content_errors(folder.path_of(name)):
            rows = ShardRows(file, folder.path_of(name)).read(["image_id"])["image_id"].to_pylist()
        path = failures_name(name)
        failures = [] if state.failures is None else parse_failures(folder.read(path), folder.path_of(path)).to_pylist()
    except (FileNotFoundError, DatasetError):
        return None
    # Earlier versions stored passwords and signatures in records and failures.
    sources = (source._replace(uri=redact_address(source.uri)) for source in record.sources or ())
    return _Stored(
        footer=state.footer,
        record=record,
        rows=frozenset(rows),
        failures={row["key"]: failure_row(**row) for row in failures},
        # A record without sources holds a digest that only the manifest had.
        sources={source.image_id: source for source in sources} if record.version_digest else None,
    )


def _is_retried(failure: Mapping[str, str] | None, policy: ReusePolicy) -> bool:
    # An unreadable file may become readable without a change.
    return failure is not None and (policy.retry_failed or (failure["reason"] == "unreadable" and not policy.only_add))


def _stored_source(stored: _Stored, image_id: str) -> Source:
    return (stored.sources or {}).get(image_id, Source(image_id, "", -1, "", ""))


def _unchanged(
    stored: _Stored,
    refs: Sequence[ImageRef],
    candidates: Sequence[ImageRef],
    output: OutputDataset,
    shard: int,
    read: Read | None,
    policy: ReusePolicy,
) -> list[Source]:
    """Return the sources of unchanged images among the candidates."""
    sources = stored.sources
    if sources is None:
        if output.listings is None or stored.footer.statistics.get("listing") != output.listings[shard]:
            return []
        now = _read_sources(refs, read)
        content = statistics_of(now, images=0, failed=0)["content"]
        if content != stored.footer.statistics.get("content"):
            return []  # Some image has changed, and its id is unknown.
        ids = {ref.image_id for ref in candidates} & stored.ids
        return [source for source in now if source.image_id in ids]
    known = [ref for ref in candidates if ref.image_id in sources]
    if policy.check_content:
        now = _read_sources(known, read)
        return [source for source in now if source.sha256 and _has_same_bytes(source, sources[source.image_id], stored)]
    return [sources[ref.image_id] for ref in known if sources[ref.image_id] == source_of(ref, sources[ref.image_id].sha256)]


def _has_same_bytes(now: Source, before: Source, stored: _Stored) -> bool:
    # A failure row holds the address of its image.
    return now.sha256 == before.sha256 and (now.uri == before.uri or now.image_id not in stored.failures)


def _read_sources(refs: Sequence[ImageRef], read: Read | None) -> list[Source]:
    """Read images, and return their sources; SHA-256 is empty for unreadable ones."""
    if read is None:
        return []

    def source(ref: ImageRef) -> Source:
        try:
            return source_of(ref, hashlib.sha256(read(ref)).hexdigest())
        except (OSError, DatasetError):
            return source_of(ref, "")

    with ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="digest") as pool:
        return list(pool.map(source, refs))


def write_feature_shard(
    output: OutputDataset,
    shard: int,
    refs: Sequence[ImageRef],
    policy: ReusePolicy,
    images: ImageSource,
    loaded: LoadedExtractor,
    *,
    on_batch: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Write one shard.

    Reusable rows of an existing shard are copied and other images extracted, with the bytes of a full extraction. An up-to-date
    shard is not written. References have any order. ``on_batch`` gets the tally of each batch; that of the shard is returned.

    Raises:
        InputError: two images have the same id, the list of images has changed during the run, the source is gone, or this
            worker's extractor computes other values than that of the stored rows, or the first images of this process all fail.
    """
    refs = sorted(refs)
    images.check_ids(refs)
    # A shard with other images than the launcher listed must not count as finished.
    if output.listings is not None and Listing.of(refs, 1).shards[0] != output.listings[shard]:
        raise InputError(
            f"the images in {images.location!r} changed during the run: shard {shard} now has {len(refs)} images, not those listed "
            "at the start. Wait until all are there, and run the same command again; finished shards are kept"
        )
    refs = images.with_versions(refs)
    reuse = reusable_rows(output, shard, refs, policy, read=images.read)
    stored = reuse.stored.record.sample_outputs if reuse.stored is not None and reuse.rows and reuse.todo else ()
    if not are_equal(stored, loaded.sample_outputs, output.parameters):
        raise InputError(
            f"a worker computes other values than those stored in {output.folder.location!r}: it has another version of the model's"
            " code; finished shards are kept. Install the version that wrote them on all machines, or give --overwrite"
        )
    if (reuse.rows or reuse.failures) and not read_state(output, shard, read_all=True).is_intact:
        reuse = Reuse(todo=refs)
    removed = reuse.dropped - reuse.changed
    tally = Tally(failures=list(reuse.failures), new=len(reuse.todo) - reuse.changed, changed=reuse.changed, removed=removed)
    if _is_left_alone(output, shard, reuse):
        return tally
    known = {} if reuse.stored is None else reuse.stored.failures

    def report(batch: Tally) -> None:
        on_batch(batch)
        loaded.first_images.add(batch, known)

    name, schema = output.name(shard), output.schema
    expected = len(reuse.todo) + len(tally.failures)
    ordered = images.in_reading_order(reuse.todo)
    new: Iterable[pa.Table] = extract_rows(
        ordered, loaded, read=images.read, schema=schema, tally=tally, reads=images.parallel_reads, on_batch=report
    )
    if ordered is not reuse.todo:
        new = _sort_rows(new, schema)
    with open_shard(output, shard) as writer:
        for table in merge_rows(_batches(output, name, reuse.rows), new) if reuse.rows else new:
            writer.write(table)
        if tally.images + len(tally.failures) != expected:
            raise RuntimeError(f"{name}: {tally.images} rows and {len(tally.failures)} failures of {expected} images")
        is_unreadable = any(row["reason"] == "unreadable" for row in tally.failures)
        if is_unreadable and not is_remote(images.location) and not Path(images.location).exists():
            raise InputError(
                f"the images {images.location!r} disappeared during the run: restore them (a network "
                "disk?), and run the same command again; finished shards are kept"
            )
        writer.add_failures(tally.failures)
        sources = [*reuse.sources, *(source_of(ref, tally.digests.get(ref.image_id, "")) for ref in reuse.todo)]
        writer.statistics = statistics_of(sources, images=len(reuse.rows) + tally.images, failed=len(tally.failures))
        writer.sources, writer.version_digest, writer.sample_outputs = sources, _version_digest(sources), loaded.sample_outputs
    tally.rewritten = int(reuse.stored is not None)
    return tally


def _is_left_alone(output: OutputDataset, shard: int, reuse: Reuse) -> bool:
    """Return whether a shard is up to date; then also update its record."""
    if reuse.stored is None or reuse.todo or reuse.dropped:
        return False
    footer, name, digest = reuse.stored.footer, output.name(shard), _version_digest(reuse.sources)
    if statistics_of(reuse.sources, images=len(reuse.rows), failed=len(reuse.failures)) != footer.statistics:
        return False
    if reuse.stored.record.version_digest != digest:
        with output.folder.open(name) as file:
            entry = shard_entry(file, name, footer.rows)
        record = Record.of(entry, footer, digest, reuse.sources, reuse.stored.record.sample_outputs)
        write_record(output.folder, name, record)
    return True


def _version_digest(sources: Iterable[Source]) -> str:
    return digest_of((source.image_id, source.uri, str(source.bytes), source.version) for source in sources)


def _sort_rows(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """Sort rows by image id through a temporary file, with constant memory."""
    with tempfile.NamedTemporaryFile(prefix="imagepivot-") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for table in tables:
                writer.write_table(table)
        file.flush()
        with pa.memory_map(file.name) as mapped:
            rows = pa.ipc.open_file(mapped).read_all()
            order = pc.sort_indices(rows["image_id"]).to_pylist()
            size = min(_MAX_SORTED_ROWS, batch_rows(schema))
            for start in range(0, len(order), size):
                yield pa.concat_tables(rows.slice(row, 1) for row in order[start : start + size]).combine_chunks()


def _batches(output: OutputDataset, name: str, ids: frozenset[str]) -> Iterator[pa.RecordBatch]:
    """Yield stored rows by id."""
    wanted = pa.array(sorted(ids), pa.string())
    path = output.folder.path_of(name)
    with output.folder.open(name) as file, content_errors(path):
        for batch in ShardRows(file, path).batches(batch_size=batch_rows(output.schema)):
            rows = batch.filter(pc.is_in(batch["image_id"], wanted))
            if rows.num_rows:
                yield rows

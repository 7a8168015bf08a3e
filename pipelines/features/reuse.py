"""What stays of a shard that an earlier run wrote, now that the images may have changed.

An image is unchanged if its address, size and modification time are those on record beside the shard, or on request if its bytes
have the same digest. Where nothing is on record, all images are read: their digests together are in the footer of the shard. If
they differ, all of the shard is made again, since nothing says which image is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from pipelines.inputs.images import ImageRef, digest_of
from schemas.errors import DatasetError
from schemas.failures import read_failures
from schemas.shards import Footer
from schemas.storage.storage_errors import content_errors
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import look_at
from schemas.writing.records import Record, Source, read_record
from schemas.writing.reuse_policy import ReusePolicy

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


def plan_reuse(
    output: OutputDataset,
    number: int,
    refs: Sequence[ImageRef],
    policy: ReusePolicy = ReusePolicy(),
    *,
    read: Read,
) -> Reuse:
    """Decide what stays of a shard.

    Args:
        output: the dataset.
        number: number of the shard.
        refs: the images of the shard as they are now, sorted by image id.
        policy: treatment of images that have changed or failed.
        read: returns the bytes of an image, or raises OSError; called where digests have to be compared.
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
    shard = look_at(output, number)
    record = read_record(folder, name, whole=True) if shard.is_whole else None
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


def is_intact(output: OutputDataset, number: int) -> bool:
    """Read all bytes of a shard and of its failures, and return whether they are those that were written."""
    return look_at(output, number, read_all=True).is_whole


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

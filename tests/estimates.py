"""Arithmetic of docs/internals/estimates.md: ``python -m tests.estimates`` prints its tables.

Rates are those of the catalogue, bytes those of ``tests/benchmarks/bench_large.py``, times of listing those of the page. Requests
are those of `schemas.writing.attempts` and of docs/how-to/object-stores.md, in S3.
"""

from math import ceil, prod

from extractors.catalogue import ENTRIES
from schemas.keys import MAX_SHARDS
from schemas.writing.shard_count import MAX_CHOSEN

COLLECTIONS = (10**7, 10**9)
EXTRACTORS = ("resnet50-pool", "vgg19-10crop", "faster-rcnn-36")
MAX_SHARD_BYTES = 4 << 30

REF_BYTES = {MAX_CHOSEN: 31.5, MAX_SHARDS: 65}
MANIFEST_BYTES = 272
COMMIT_BYTES = 1000  # Of memory, for each shard.

LISTING_SECONDS, LISTED_BYTES, KEPT_BYTES = 8e-6, 32, 24  # For each image: processor, memory, temporary file.
PAGE_IMAGES = 1000  # Of a response to a listing.

WRITES, READS = 3, 3
"""Requests of an attempt: claim, shard, record; record and twice the manifest before."""

COMMIT_READS = 2


def work() -> str:
    """Return the table of work by images, shards and extractor."""
    lines = [
        "| images | shards | extractor | GPU hours | written | a shard | minutes a shard |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for images in COLLECTIONS:
        for shards in REF_BYTES:
            for name in EXTRACTORS:
                entry = ENTRIES[name]
                size = 4 * prod(entry.spec.shape)
                cells = [f"{images:,}", f"{shards:,}", f"`{name}`", f"{images / entry.gpu_rate / 3600:,.1f}"]
                cells += [f"{images * size / 1e12:,.2f} TB", f"{images * size / shards / 1e6:,.1f} MB"]
                minutes = f"{images / shards / entry.gpu_rate / 60:,.2f}"
                cells.append("refused: over 4 GiB" if images * size > shards * MAX_SHARD_BYTES else minutes)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def launching() -> str:
    """Return the table of what does not depend on the extractor."""
    lines = [
        "| images | shards | references | manifest | commit's memory | requests: images in a bucket | listing | shards | commit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for images in COLLECTIONS:
        for shards, size in REF_BYTES.items():
            cells = [f"{images:,}", f"{shards:,}", f"{images * size / 1e9:,.2f} GB", f"{shards * MANIFEST_BYTES / 1e6:,.1f} MB"]
            cells += [f"{shards * COMMIT_BYTES / 1e6:,.0f} MB", f"{images:,}", f"{ceil(images / PAGE_IMAGES):,}"]
            listings = 2 * ceil(2 * shards / PAGE_IMAGES)
            cells += [f"{shards * (WRITES + READS):,}", f"{shards * COMMIT_READS + listings + 1:,}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def listing() -> str:
    """Return the table of the launcher that lists the images."""
    lines = ["| images | processor | memory, at most | temporary file, at most |", "| --- | --- | --- | --- |"]
    for images in COLLECTIONS:
        hours, sizes = images * LISTING_SECONDS / 3600, (images * size / 1e9 for size in (LISTED_BYTES, KEPT_BYTES))
        lines.append(f"| {images:,} | {hours:.2f} hours | {' | '.join(f'{size:.2f} GB' for size in sizes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(work(), launching(), listing(), sep="\n\n")

"""Cost per item from a hundred thousand captions to 100 million, and from ten thousand images to 10 million, by simulation.

Ids, sentences and vectors are invented; keys, shards, listings, vocabularies, records, commit and manifest are the code of real
runs, see `tests/simulation.py`. Each size runs in a process of its own, one after the other: the peak is that process's. The
largest takes about 9 GB in the folder for temporary files.

    python tests/benchmarks/bench_simulation.py              # up to 100 million captions of 10 million images
    python tests/benchmarks/bench_simulation.py 10000000     # up to 10 million captions of 1 million images
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import machine

sys.path.insert(0, str(Path(__file__).parents[2]))

from schemas.writing.shard_count import TEXT_SHARD_BYTES, VECTOR_SHARD_BYTES, choose_shards
from tests.simulation import CAPTIONS_PER_IMAGE, Cost, captions, features, images, vocabulary

MOST = 100_000_000
RAW_BYTES = 70  # Of a caption in a table, with its id: it decides the number of shards.
VECTOR_BYTES = 4 * 2048


def main() -> None:
    """Print the costs."""
    print(machine(), flush=True)
    most = int(sys.argv[1]) if len(sys.argv) > 1 else MOST
    count = 100_000
    while count <= most:
        pictures = count // CAPTIONS_PER_IMAGE
        of_images = choose_shards(pictures * VECTOR_BYTES, VECTOR_SHARD_BYTES)
        of_captions = choose_shards(count * RAW_BYTES, TEXT_SHARD_BYTES)
        print(f"\n{count:,} captions in {of_captions} shards, {pictures:,} images in {of_images} shards", flush=True)
        alone(list_and_deal, pictures)
        alone(write_features, pictures, of_images)
        alone(write_captions, count, of_captions)
        count *= 10
    for types in (10_000, 100_000, 1_000_000):
        print(f"\nvocabulary of {types:,} types from 128 shards", flush=True)
        alone(merge_counts, types)


def alone(work: Callable[..., list[Cost]], *arguments: Any) -> None:
    """Do some work in a process of its own, and print its costs, the peak of its memory, and the load."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        costs, before, peak = pool.apply(measured, (work, *arguments))
    for cost in costs:
        size = f", {cost.bytes / cost.items:,.2f} bytes" if cost.bytes else ""
        print(
            f"  {cost.phase:<34} {cost.seconds:9.1f} s, {1e6 * cost.seconds / cost.items:7.2f} us{size} for each {cost.unit}",
            flush=True,
        )
    print(
        f"  {'memory':<34} {peak / 1e6:9.0f} MB at most, {before / 1e6:.0f} before; load {os.getloadavg()[0]:.1f}", flush=True
    )


def measured(work: Callable[..., list[Cost]], *arguments: Any) -> tuple[list[Cost], int, int]:
    """Return costs, and the peak of this process's memory before and after, in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    costs = work(*arguments)
    return costs, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def list_and_deal(count: int) -> list[Cost]:
    """List images."""
    with tempfile.TemporaryDirectory(prefix="imagepivot-simulation-") as folder:
        return images(count, Path(folder))[0]


def write_features(count: int, shards: int) -> list[Cost]:
    """Write features."""
    with tempfile.TemporaryDirectory(prefix="imagepivot-simulation-") as folder:
        return features(count, shards, Path(folder))


def write_captions(count: int, shards: int) -> list[Cost]:
    """Write captions."""
    with tempfile.TemporaryDirectory(prefix="imagepivot-simulation-") as folder:
        return captions(count, shards, Path(folder))


def merge_counts(types: int) -> list[Cost]:
    """Merge counts of tokens."""
    return vocabulary(types, 128)


if __name__ == "__main__":
    main()

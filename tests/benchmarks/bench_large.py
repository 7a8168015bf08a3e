"""Large collections, simulated: bytes of references, memory of a commit, time of opening, with up to 99,999 shards.

References are of 10 million invented images in 8,192 shards, and of a million in 99,999. A commit's memory is that of a further
shard, between 1,000 and 5,000 shards of ten images. All times are of the processor.
"""

import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from targets import floor

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelines.features.ref_chunks import chunk_refs
from schemas.fingerprints import fingerprint_of
from schemas.keys import MAX_SHARDS, shard_name
from schemas.manifest import MANIFEST_NAME, Manifest, ShardEntry
from schemas.writing.dataset_writer import commit
from tests.simulation import Images, features, features_output

SHARD_IMAGES = 10
OPENINGS = 5


def main() -> None:
    """Print the figures."""
    for count, shards, name in (
        (10_000_000, 8192, floor("bytes of a reference, 8,192 shards")),
        (1_000_000, MAX_SHARDS, floor("bytes of a reference, 99,999 shards")),
    ):
        size, seconds = references(count, shards)
        print(
            f"{count:,} images, {shards:,} shards: a reference takes {size:.1f} bytes (target: at most {name:g}) and "
            f"{1e6 * seconds:.1f} µs",
            flush=True,
        )
    print(f"commit: {commit_bytes():.0f} bytes a shard (target: at most {floor('memory of a commit'):g})", flush=True)
    print(f"opening {MAX_SHARDS:,} shards: {opening_seconds():.2f} s (target: at most {floor('opening 99,999 shards'):g})")


def references(count: int, shards: int) -> tuple[float, float]:
    """Return bytes and seconds of a reference that workers exchange."""
    started = time.process_time()
    size = sum(len(chunk) for _, chunk in chunk_refs(Images(count).refs(), shards))
    return size / count, (time.process_time() - started) / count


def commit_bytes() -> float:
    """Return the memory of a commit for a further shard."""
    peaks = {}
    for shards in (1000, 5000):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            features(SHARD_IMAGES * shards, shards, folder)
            output = features_output(folder, shards)
            output.folder.delete(MANIFEST_NAME)
            tracemalloc.start()
            commit(output)
            peaks[shards] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return (peaks[5000] - peaks[1000]) / 4000


def opening_seconds() -> float:
    """Return the least time of reading a manifest of the greatest number of shards."""
    parameters = features_output(Path(), MAX_SHARDS).parameters
    entries = (
        ShardEntry(shard_name(number, MAX_SHARDS), 1 << 29, f"{number:064x}", 1000, f"{number:064x}")
        for number in range(MAX_SHARDS)
    )
    fingerprint = fingerprint_of("features", parameters, (), MAX_SHARDS)
    text = Manifest("features", fingerprint, parameters, (), {}, tuple(entries)).to_json()
    seconds = []
    for _ in range(OPENINGS):
        started = time.process_time()
        Manifest.from_json(text, "here")
        seconds.append(time.process_time() - started)
    return min(seconds)


if __name__ == "__main__":
    main()

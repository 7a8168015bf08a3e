"""Measure reading images from object stores 40 ms away, against plain HTTP to the same place, and count requests.

Emulators on this machine stand for the stores, behind a proxy that delays every request and remembers images: an emulator is slower
than a store.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from measuring import machine, ratio

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelines.inputs.images import open_images
from pipelines.inputs.web import PARALLEL_READS, WebAccess, fetch
from schemas.fingerprints import Identity
from schemas.manifest import MANIFEST_NAME
from schemas.output import Output
from schemas.storage import Folder
from schemas.survey import Survey
from schemas.writing import ShardWriter, commit, write_dataset
from tests.stores import FarStore, emulator, far_away

SECONDS, IMAGES, IMAGE_BYTES, ROUNDS, SHARDS = 0.04, 200, 60_000, 4, 16
AIM = 0.8


def main() -> None:
    """Print the ratios and the numbers of requests."""
    print(machine())
    for scheme in ("gs", "s3"):
        with emulator(scheme) as store, far_away(store, SECONDS, remembers=".jpg") as far:
            os.environ.update(far.environment)
            _reading(far)
            _resuming(far, Output(Folder(far.address("features")), _identity()))


def _reading(far: FarStore) -> None:
    folder = Folder(far.address("photos"))
    names = [f"{number:03d}.jpg" for number in range(IMAGES)]
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        list(pool.map(lambda name: folder.write(name, os.urandom(IMAGE_BYTES)), names))
    source, access = open_images(folder.location), WebAccess(allow_private_addresses=True)
    refs = list(source.refs())
    far.asked()

    def rate(read: Callable[[int], bytes]) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            with ThreadPoolExecutor(PARALLEL_READS) as pool:
                assert all(len(data) == IMAGE_BYTES for data in pool.map(read, list(range(IMAGES)) * ROUNDS))
            return IMAGES * ROUNDS / (time.perf_counter() - started)

        return run

    ours, plain = rate(lambda n: source.read(refs[n])), rate(lambda n: fetch(far.web_address(f"photos/{names[n]}"), access))
    far.asked()
    ours()  # The proxy remembers from here on.
    asked = far.asked()
    plain()
    ratio(
        f"images from {far.scheme}://, {PARALLEL_READS} threads, {SECONDS * 1000:.0f} ms",
        ours,
        plain,
        unit="images/s",
        at_least=AIM,
    )
    print(
        f"{far.scheme}://: {len(asked) / IMAGES / ROUNDS:.2f} requests per image, at most {asked.at_once} at once", flush=True
    )


def _resuming(far: FarStore, output: Output) -> None:
    def make_shard(number: int, shard: ShardWriter) -> None:
        values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4, np.float32)), type=output.schema.field(1).type)
        shard.write(pa.table([pa.array([f"i{number}"]), values], schema=output.schema))

    far.asked()
    write_dataset(output, make_shard)
    whole = far.asked()
    Survey(output).complete()
    complete = far.asked()
    output.folder.delete(MANIFEST_NAME)
    far.asked()
    Survey(output).finished()
    finished = far.asked()
    commit(output)
    committed = far.asked()
    print(
        f"{far.scheme}://, {SHARDS} shards: {len(whole)} requests to write them, {len(complete)} to recognise a complete dataset, "
        f"{len(finished) / SHARDS:.1f} per finished shard (at most {finished.at_once} at once), {len(committed)} for a commit",
        flush=True,
    )


def _identity() -> Identity:
    return Identity("features", {"feature": {"name": "r", "shape": [4], "dtype": "float32", "source": ""}}, shards=SHARDS)


if __name__ == "__main__":
    main()

"""Measure reading from and writing to object stores 40 ms away, and what a launcher keeps of each image.

Images are read by as many threads as `features` reads with; the yardstick is plain HTTP to the same place, by as many threads.
Emulators on this machine stand for the stores, behind a proxy that delays every request, counts it and remembers images: an
emulator is slower than a store. The images of the launcher are missing: their references go the way of all others, and no time is
spent on pixels.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import urllib3
from aims import floor
from measuring import machine, ratio

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelines.inputs.images import open_images
from pipelines.inputs.web import PARALLEL_READS
from schemas.manifest import MANIFEST_NAME
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import commit, write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.shard_writer import ShardWriter
from tests.stores import FarStore, Requests, emulator, far_away

ROOT = Path(__file__).parents[2]
SECONDS, IMAGES, IMAGE_BYTES, ROUNDS, SHARDS = 0.04, 200, 60_000, 4, 16
REFERENCES = 20_000
RUNS = 3
AIM, MOST_BYTES = floor("reading images from a store"), floor("launcher's memory of an image")


def main() -> None:
    """Print the ratios, the numbers of requests and the bytes."""
    print(machine(), flush=True)
    for scheme in ("gs", "s3"):
        with emulator(scheme) as store, far_away(store, SECONDS, remembers=".jpg") as far:
            os.environ.update(far.environment)
            reading(far)
            print_requests(far)
    print_launcher()


def reading(far: FarStore) -> None:
    """Print how fast images are read, against plain HTTP, and in how many requests."""
    folder = Folder(far.address("photos"))
    names = [f"{number:03d}.jpg" for number in range(IMAGES)]
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        list(pool.map(lambda name: folder.write(name, os.urandom(IMAGE_BYTES)), names))
    source, plain = open_images(folder.location), urllib3.PoolManager(maxsize=PARALLEL_READS)
    refs = list(source.refs())

    def rate(read: Callable[[int], bytes]) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            with ThreadPoolExecutor(PARALLEL_READS) as pool:
                assert all(len(data) == IMAGE_BYTES for data in pool.map(read, list(range(IMAGES)) * ROUNDS))
            return IMAGES * ROUNDS / (time.perf_counter() - started)

        return run

    ours = rate(lambda n: source.read(refs[n]))
    yardstick = rate(lambda n: plain.request("GET", far.web_address(f"photos/{names[n]}")).data)
    far.asked()
    ours()  # The proxy remembers from here on.
    asked = far.asked()
    yardstick()
    what = f"images from {far.scheme}://, {PARALLEL_READS} threads, {SECONDS * 1000:.0f} ms"
    ratio(what, ours, yardstick, unit="images/s", at_least=AIM, runs=RUNS)
    print(f"{far.scheme}://, {len(asked) / IMAGES / ROUNDS:.2f} requests per image, up to {asked.at_once} at once", flush=True)


def print_requests(far: FarStore) -> None:
    """Print what a store is asked for a dataset."""
    counts = defaultdict(list)
    for run in range(RUNS):
        for what, count in requests(far, f"features{run}").items():
            counts[what].append(count)
    for what, found in counts.items():
        print(f"{far.scheme}://, {SHARDS} shards, {what}: {spread(found)}", flush=True)


def requests(far: FarStore, name: str) -> dict[str, float]:
    """Write a dataset, and return what the store is asked for that and for later runs, by what it is asked for."""
    feature = {"name": "r", "shape": [4], "dtype": "float32", "source": ""}
    output = OutputDataset(Folder(far.address(name)), "features", {"feature": feature}, shards=SHARDS)

    def write_feature_shard(number: int, shard: ShardWriter) -> None:
        values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4, np.float32)), type=output.schema.field(1).type)
        shard.write(pa.table([pa.array([f"i{number}"]), values], schema=output.schema))

    def asked_for(step: Callable[[], object]) -> Requests:
        far.asked()
        step()
        return far.asked()

    written = asked_for(lambda: write_dataset(output, write_feature_shard))
    complete = asked_for(lambda: OutputState(output).committed_manifest())
    output.folder.delete(MANIFEST_NAME)
    resumed = asked_for(lambda: OutputState(output).finished())
    committed = asked_for(lambda: commit(output))
    return {
        "requests per shard that is written": len(written) / SHARDS,
        "requests to recognise a complete dataset": len(complete),
        "of these for shards (aim: 0)": of_shards(complete),
        "requests per finished shard of a run that goes on (aim: at most 2, and the listing)": (len(resumed) - 1) / SHARDS,
        "of the shards at once (aim: 1)": resumed.at_once / SHARDS,
        "requests per shard of a commit": len(committed) / SHARDS,
        "of these that read shards (aim: 0)": of_shards(committed),
    }


def of_shards(asked: Requests) -> int:
    """Return how many requests read shards or ask for one."""
    return sum(request.method in ("GET", "HEAD") and ".parquet" in request.path for request in asked.all)


def print_launcher() -> None:
    """Print how much memory a launcher takes for each image more."""
    found = []
    for _ in range(RUNS):
        few, many = launcher(REFERENCES), launcher(10 * REFERENCES)
        found.append((many - few) / (9 * REFERENCES))
    print(
        f"launcher of features, {10 * REFERENCES:,} local images against {REFERENCES:,}: {spread(found)} bytes per image "
        f"(aim: at most {MOST_BYTES})",
        flush=True,
    )


def launcher(images: int) -> int:
    """Return the peak memory of the launcher of a local run, without its workers, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "images.csv")
        names = (f"COCO_train2014_{number:012d}" for number in range(images))
        table.write_text("image_id,uri\n" + "".join(f"{name},train2014/{name}.jpg\n" for name in names))
        extractor = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--device", "cpu")
        command = (sys.executable, "-m", "imagepivot", "features", str(table), f"{folder}/features", *extractor)
        options = ("--shards", str(SHARDS), "--workers", "2")
        process = subprocess.Popen(
            (*command, *options), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            time.sleep(0.05)
        if process.returncode != 3:  # Written, and some images failed: here, all.
            raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
        return peak


def peak_of(pid: int) -> int:
    """Return the peak memory of a process so far, in bytes; 0 of one that has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def spread(values: list[float]) -> str:
    """Return the median of some values, and from where to where they go."""
    return f"{statistics.median(values):.4g}, from {min(values):.4g} to {max(values):.4g} in {len(values)} runs"


if __name__ == "__main__":
    main()

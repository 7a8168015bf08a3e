"""Measure reading images from object stores 40 ms away, and the memory of a launcher for each image.

Images are read by as many threads as `features` reads with; the baseline is plain HTTP to the same place, by as many threads.
Emulators on this machine stand for the stores, behind a proxy that delays every request, counts it and remembers images: an
emulator is slower than a store. The images of the launcher are missing: their references go the way of all others, and no time is
spent on pixels.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import urllib3
from measuring import ratio
from processor import machine
from targets import floor

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelines.inputs.images import open_images
from pipelines.inputs.web import PARALLEL_READS
from schemas.storage.folder import Folder
from tests.stores import FarStore, emulator, far_away

ROOT = Path(__file__).parents[2]
SECONDS, IMAGES, IMAGE_BYTES, ROUNDS = 0.04, 200, 60_000, 4
REFERENCES = 20_000
RUNS = 3


def main() -> None:
    """Print the ratios, the numbers of requests and the bytes."""
    print(machine(), flush=True)
    for scheme in ("gs", "s3"):
        with emulator(scheme) as store, far_away(store, SECONDS, remembers=".jpg") as far:
            os.environ.update(far.environment)
            reading(far)
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
    baseline = rate(lambda n: plain.request("GET", far.web_address(f"photos/{names[n]}")).data)
    far.asked()
    ours()  # The proxy remembers from here on.
    asked = far.asked()
    baseline()
    what = f"images from {far.scheme}://, {PARALLEL_READS} threads, {SECONDS * 1000:.0f} ms"
    ratio(what, ours, baseline, unit="images/s", at_least=floor("reading images from a store"), runs=RUNS)
    print(f"{far.scheme}://, {len(asked) / IMAGES / ROUNDS:.2f} requests per image, up to {asked.at_once} at once", flush=True)


def print_launcher() -> None:
    """Print how much memory a launcher takes for each image more."""
    found, most = [], floor("launcher's memory of an image")
    for _ in range(RUNS):
        few, many = launcher(REFERENCES), launcher(10 * REFERENCES)
        found.append((many - few) / (9 * REFERENCES))
    print(
        f"launcher of features, {10 * REFERENCES:,} local images against {REFERENCES:,}: {spread(found)} bytes per image "
        f"(target: at most {most})",
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
        options = ("--shards", "16", "--workers", "2")
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

"""Peak memory of the command: the Multi30K text from raw files to encoded shards, and ``features`` over ten times the images.

Ten times the images twice over: 40 and 400 with ResNet-50, 200 and 2,000 with a small model of timm's, where the images and
what is kept of each weigh more than the weights.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from measuring import PeakMemory, machine, test_data

from pipelines.demo.scenes import draw, make_scenes

COMMAND = str(Path(sys.executable).with_name("imagepivot"))
GROWTH = {"resnet50-pool": (40, 400), "timm:test_resnet.r160_in1k": (200, 2000)}


def main() -> None:
    """Print the peaks."""
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        text(folder)
    for extractor, counts in GROWTH.items():
        if extractor.startswith("timm:") and find_spec("timm") is None:
            print(f"{extractor}: skipped, needs timm")
            continue
        with tempfile.TemporaryDirectory() as folder:
            few, many = (features(Path(folder), extractor, count) for count in counts)
        print(
            f"{extractor}, {counts[1]:,} images against {counts[0]:,}: {many:.2f} GB / {few:.2f} GB = {many / few:.2f} "
            "(aim: at most 1.2)",
            flush=True,
        )


def text(folder: str) -> None:
    """Print the peaks of the commands that prepare all captions of Multi30K."""
    data = test_data("multi30k")
    if data is None:
        print("text: skipped, needs the Multi30K text: set IMAGEPIVOT_TEST_DATA")
        return
    for arguments in (
        ("captions", str(data), f"{folder}/captions", "--format", "multi30k"),
        ("vocabulary", f"{folder}/captions", f"{folder}/vocabulary"),
        ("encode", f"{folder}/captions", f"{folder}/vocabulary", f"{folder}/encoded"),
    ):
        together, largest = peak(*arguments)
        print(
            f"{arguments[0]}, all of Multi30K: {together:.2f} GB together (aim: under 1.5), {largest:.2f} GB the largest",
            flush=True,
        )


def features(folder: Path, extractor: str, count: int) -> float:
    """Return the peak in GB of extracting features of so many drawn scenes."""
    images = folder / f"images-{count}"
    images.mkdir()
    for name, scene in make_scenes(count):
        draw(scene).save(images / f"{name}.jpg", quality=90)
    options = ("--extractor", extractor, "--weights", "random:0", "--device", "cpu", "--shards", "4")
    return peak("features", str(images), str(folder / f"features-{count}"), *options)[0]


def peak(*arguments: str) -> tuple[float, float]:
    """Run the command; return the peak of all its processes together and of the largest one, in GB."""
    process = subprocess.Popen([COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with PeakMemory(process.pid) as memory:
        if process.wait():
            raise SystemExit(f"{' '.join(arguments)} ended with exit code {process.returncode}")
    return memory.peak / 1e9, memory.largest / 1e9


if __name__ == "__main__":
    main()

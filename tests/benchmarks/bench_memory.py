"""Peak memory of the command: text from raw files to encoded shards, and ``features`` over ten times the images.

The text is all of Multi30K, and then a table of its lines, each with a number of its own, once and ten times over, in 16 and in 256
shards: 0.44 and 4.4 million captions.

Ten times the images twice over: 40 and 400 with ResNet-50, 200 and 2,000 with a small model of timm's, where the images and
what is kept of each weigh more than the weights.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from measuring import PeakMemory, test_data
from processor import machine
from targets import floor

from pipelines.demo.scenes import draw, make_scenes
from pipelines.inputs.captions.base import Selection
from pipelines.inputs.captions.opening import open_captions

COMMAND = str(Path(sys.executable).with_name("imagepivot"))
GROWTH = {"resnet50-pool": (40, 400), "timm:test_resnet.r160_in1k": (200, 2000)}


def main() -> None:
    """Print the peaks."""
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        text(folder)
    growing_text()
    for extractor, counts in GROWTH.items():
        if extractor.startswith("timm:") and find_spec("timm") is None:
            print(f"{extractor}: skipped, needs timm")
            continue
        with tempfile.TemporaryDirectory() as folder:
            few, many = (features(Path(folder), extractor, count) for count in counts)
        print(
            f"{extractor}, {counts[1]:,} images against {counts[0]:,}: {many:.2f} GB / {few:.2f} GB = {many / few:.2f} "
            f"(target: at most {floor('memory of ten times the images')})",
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
            f"{arguments[0]}, all of Multi30K: {together:.2f} GB together "
            f"(target: at most {floor('memory of text')}), {largest:.2f} GB the largest",
            flush=True,
        )


def growing_text() -> None:
    """Print the peaks of the commands that prepare a table of captions, once and ten times as long, in few and many shards."""
    data = test_data("multi30k")
    if data is None:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        peaks: dict[str, list[float]] = {}
        for copies in (1, 10):
            table = folder / "captions.tsv"
            rows = write_table(table, data, copies)
            for shards in (16, 256):
                captions = (str(table), str(folder / "captions"), "--format", "table", "--shards", str(shards))
                runs = {"captions": captions}
                if shards == 16:
                    runs["vocabulary"] = (str(folder / "captions"), str(folder / "vocabulary"))
                    runs["encode"] = (str(folder / "captions"), str(folder / "vocabulary"), str(folder / "encoded"))
                for command, arguments in runs.items():
                    started = time.perf_counter()
                    together, largest = peak(command, *arguments)
                    rate = rows / (time.perf_counter() - started)
                    print(
                        f"{command}, {rows:,} captions in {shards} shards: {together:.2f} GB together, "
                        f"{largest:.2f} GB the largest; {rate:,.0f} captions/s",
                        flush=True,
                    )
                    peaks.setdefault(f"{command}, {shards} shards", []).append(together)
                for output in ("captions", "vocabulary", "encoded"):
                    shutil.rmtree(folder / output, ignore_errors=True)
        for what, (few, many) in peaks.items():
            print(
                f"{what}, ten times the captions: {many / few:.2f} times the memory "
                f"(target: at most {floor('memory of ten times the captions')})",
                flush=True,
            )


def write_table(path: Path, data: Path, copies: int) -> int:
    """Write the captions of Multi30K several times over, each with a number of its own, and return how many there are."""
    source, rows = open_captions("multi30k", data), 0
    with path.open("w", encoding="utf-8") as file:
        file.write("image_id\tlanguage\tportion\tsplit\ttext\n")
        for copy in range(copies):
            for part in source.parts(Selection()):
                for image_id, language, portion, _, split, text in source.read(part, Selection()):
                    line = text.replace("\t", " ").replace('"', "'")
                    file.write(f"{copy}-{image_id}\t{language}\t{portion}\t{split}\t{line} {rows * 7919 % 10_007}\n")
                    rows += 1
    return rows


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

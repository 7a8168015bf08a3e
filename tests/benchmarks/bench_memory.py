"""Peak memory of the command, all its processes together: the whole Multi30K text from raw files to encoded shards, and
``features`` over ten times the images against once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import PeakMemory, machine, test_data

from pipelines.demo.scenes import draw, make_scenes

COMMAND = str(Path(sys.executable).with_name("imagepivot"))


def peak(*arguments: str) -> tuple[float, float]:
    """Runs the command; returns the peak of all its processes together and of the largest one, in GB."""
    process = subprocess.Popen([COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with PeakMemory(process.pid) as memory:
        if process.wait():
            raise SystemExit(f"{' '.join(arguments)} ended with exit code {process.returncode}")
    return memory.peak / 1e9, memory.largest / 1e9


def main() -> None:
    """Prints the peaks."""
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        data = test_data("multi30k")
        if data is not None:
            for arguments in (
                ("captions", str(data), f"{folder}/captions", "--format", "multi30k"),
                ("vocabulary", f"{folder}/captions", f"{folder}/vocabulary"),
                ("encode", f"{folder}/captions", f"{folder}/vocabulary", f"{folder}/encoded"),
            ):
                together, largest = peak(*arguments)
                print(
                    f"{arguments[0]}, all of Multi30K: {together:.2f} GB together (aim: under 1.5), {largest:.2f} GB the largest"
                )
        peaks = []
        for count in (40, 400):
            images = Path(folder, f"images-{count}")
            images.mkdir()
            for name, scene in make_scenes(count):
                draw(scene).save(images / f"{name}.jpg")
            peaks.append(
                peak("features", str(images), f"{folder}/features-{count}", "--weights", "random:0", "--shards", "4")[0]
            )
        print(
            f"features, 400 images against 40: {peaks[1]:.2f} GB / {peaks[0]:.2f} GB = {peaks[1] / peaks[0]:.2f} (aim: at most 1.2)"
        )


if __name__ == "__main__":
    main()

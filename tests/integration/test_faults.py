"""Faults that a run must survive: kills at random moments, and thirty bad images in a thousand."""

from __future__ import annotations

import random
import signal
import struct
import time
import zlib
from pathlib import Path

import pytest

from pipelines.demo.scenes import draw, make_scenes
from schemas.dataset import open_dataset
from schemas.writing.records import record_name
from schemas.writing.validation import validate
from tests.integration.processes import start

pytestmark = pytest.mark.cluster

pytest.importorskip("timm", reason="a small model of timm's makes many runs possible")

SMALL = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--device", "cpu")
KILLS = 6


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards_in(folder: Path) -> dict[str, int]:
    """Return the time of writing of each finished shard, by name: its record comes after it, and a kill may come between."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*") if (folder / record_name(path.name)).exists()}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    for name, scene in make_scenes(120):
        draw(scene).resize((160, 120)).save(folder / f"{name}.jpg", quality=90)
    return folder


def test_killed_again_and_again_the_result_is_that_of_an_undisturbed_run(scenes: Path, imagepivot, tmp_path: Path) -> None:
    """120 images in 40 shards; the whole process group gets SIGKILL at random moments of its work."""
    options = ("--shards", "40", "--batch-size", "1", *SMALL)
    imagepivot("features", scenes, tmp_path / "undisturbed", *options)
    expected = snapshot(tmp_path / "undisturbed")
    generator = random.Random(2018)
    kills, dataset, output = 0, 0, tmp_path / "killed-0"
    while kills < KILLS:
        before = shards_in(output)
        with start("features", scenes, output, *options, folder=tmp_path / "process") as run:
            # Either during start-up, or up to 0.2 seconds after the next finished shard.
            deadline = time.monotonic() + (generator.uniform(0, 1) if generator.random() < 0.3 else 120)
            while time.monotonic() < deadline and run.runs:
                if len(shards_in(output)) > len(before):
                    deadline = min(deadline, time.monotonic() + generator.uniform(0, 0.2))
                time.sleep(0.005)
            if run.runs:
                run.send(signal.SIGKILL)
                kills += 1
            run.wait()
        after = shards_in(output)
        assert {name: stamp for name, stamp in after.items() if name in before} == before, "a finished shard was made again"
        if (output / "_manifest.json").exists():
            assert snapshot(output) == expected
            dataset += 1
            output = tmp_path / f"killed-{dataset}"
    imagepivot("features", scenes, output, *options)
    assert snapshot(output) == expected
    assert validate(output) == []


def png_of(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size and which holds no pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BAD = {
    "empty": lambda good: b"",
    "not_an_image": lambda good: b"this is no picture\n" * 20,
    "truncated": lambda good: good[: len(good) // 2],
    "too_large": lambda good: png_of(30_000, 30_000),
    "unreadable": None,
}


def test_thirty_bad_images_in_a_thousand(scenes: Path, imagepivot, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    good = [path.read_bytes() for path in sorted(scenes.glob("*.jpg"))]
    generator = random.Random(7)
    bad = dict(zip(generator.sample(range(1000), 30), [reason for reason in BAD for _ in range(6)], strict=True))
    for number in range(1000):
        path = images / f"image{number:04d}.jpg"
        make = BAD[bad[number]] if number in bad else lambda data: data
        if make is None:
            path.symlink_to(tmp_path / "nowhere")
        else:
            path.write_bytes(make(good[number % len(good)]))
    arguments = ("features", images, tmp_path / "features", *SMALL)
    done = imagepivot(*arguments, code=3)
    assert "30 inputs failed" in done.stderr
    assert "Traceback" not in done.stderr
    dataset = open_dataset(tmp_path / "features")
    assert (len(dataset), dataset.manifest.failed) == (970, 30)
    assert sorted(dataset.image_ids()) == sorted(f"image{n:04d}" for n in range(1000) if n not in bad)
    failures = {row["key"]: row["reason"] for row in dataset.failures().to_pylist()}
    assert failures == {f"image{number:04d}": reason for number, reason in bad.items()}
    assert validate(tmp_path / "features") == []
    imagepivot(*arguments, "--max-failures", "29", code=3)
    imagepivot(*arguments, "--max-failures", "30")

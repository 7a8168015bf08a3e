"""What must survive anything: killed at random moments, thirty bad images in a thousand, ten times the images."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from pipelines.demo.scenes import draw, make_scenes
from schemas.dataset import open_dataset
from schemas.validation import validate

pytestmark = pytest.mark.slow

pytest.importorskip("timm", reason="a small model of timm's stands for a slow one")

COMMAND = str(Path(sys.executable).with_name("imagepivot"))
SMALL = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--device", "cpu")
KILLS = 20


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    for name, scene in make_scenes(200):
        draw(scene).save(folder / f"{name}.jpg", quality=90)
    return folder


def test_killed_twenty_times_the_result_is_that_of_an_undisturbed_run(scenes: Path, tmp_path: Path) -> None:
    """Two hundred images in forty shards; the whole process group gets SIGKILL at random moments of its work."""
    arguments = ("features", scenes, "--shards", "40", "--batch-size", "4", *SMALL)
    done = run(*arguments[:2], tmp_path / "undisturbed", *arguments[2:])
    assert done.returncode == 0, done.stderr
    expected = snapshot(tmp_path / "undisturbed")
    generator = random.Random(2018)
    kills, attempt, output = 0, 0, tmp_path / "killed-0"
    while kills < KILLS:
        before = {path.name: path.stat().st_mtime_ns for path in output.glob("part-*")}
        process = subprocess.Popen(
            [COMMAND, *map(str, (*arguments[:2], output, *arguments[2:]))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Either somewhere in the start, or so much later than the next finished shard.
        deadline = time.monotonic() + (generator.uniform(0, 3) if generator.random() < 0.3 else 120)
        while time.monotonic() < deadline and process.poll() is None:
            if len(list(output.glob("part-*"))) > len(before):
                deadline = min(deadline, time.monotonic() + generator.uniform(0, 0.4))
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait(60)
        after = {path.name: path.stat().st_mtime_ns for path in output.glob("part-*")}
        assert {name: stamp for name, stamp in after.items() if name in before} == before, "a finished shard was made again"
        if (output / "manifest.json").exists():
            assert snapshot(output) == expected
            attempt += 1
            output = tmp_path / f"killed-{attempt}"
    done = run(*arguments[:2], output, *arguments[2:])
    assert done.returncode == 0, done.stderr
    assert snapshot(output) == expected
    assert validate(output) == []


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and which holds no pixels."""

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


def test_thirty_bad_images_in_a_thousand(scenes: Path, tmp_path: Path) -> None:
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
    done = run(*arguments)
    assert done.returncode == 3, done.stderr
    assert "30 inputs failed" in done.stderr
    assert "Traceback" not in done.stderr
    dataset = open_dataset(tmp_path / "features")
    assert (len(dataset), dataset.manifest.failed) == (970, 30)
    assert sorted(dataset.image_ids()) == sorted(f"image{n:04d}" for n in range(1000) if n not in bad)
    failures = {row["key"]: row["reason"] for row in dataset.failures().to_pylist()}
    assert failures == {f"image{number:04d}": reason for number, reason in bad.items()}
    assert validate(tmp_path / "features") == []
    assert run(*arguments, "--max-failures", "29").returncode == 3
    assert run(*arguments, "--max-failures", "30").returncode == 0


def peak_rss(arguments: tuple[str | Path, ...]) -> int:
    """Peak of the command's own process, in KiB, as the kernel counts it."""
    code = (
        "import json, resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True);"
        "print(json.dumps([done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, COMMAND, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    returncode, peak = json.loads(done.stdout)
    assert returncode == 0
    return peak


def test_memory_stays_flat_over_ten_times_the_images(scenes: Path, tmp_path: Path) -> None:
    pictures = [path.read_bytes() for path in sorted(scenes.glob("*.jpg"))]
    peaks = []
    for count in (200, 2000):
        images = tmp_path / f"images-{count}"
        images.mkdir()
        for number in range(count):
            (images / f"image{number:04d}.jpg").write_bytes(pictures[number % len(pictures)])
        peaks.append(peak_rss(("features", images, tmp_path / f"features-{count}", *SMALL)))
    assert peaks[1] <= 1.2 * peaks[0], peaks


def test_a_killed_worker_ends_in_a_clear_error_and_nothing_torn(scenes: Path, tmp_path: Path) -> None:
    output = tmp_path / "features"
    arguments = ("features", scenes, output, *SMALL, "--shards", "60", "--batch-size", "2", "--workers", "2")
    process = subprocess.Popen(
        [COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list(output.glob("part-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    workers = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"worker.py" in path.read_bytes() and os.getpgid(int(path.parent.name)) == process.pid
    ]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a worker process ended unexpectedly" in errors
    assert "Traceback" not in errors
    assert not (output / "manifest.json").exists()
    assert run(*arguments[:-2]).returncode == 0
    assert validate(output) == []

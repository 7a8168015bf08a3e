"""Processes that decode give what threads give, and leave nothing behind, however they end."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import extractors
from extractors.images.preprocessing import cropped_pixels
from extractors.whole_image.resnet50 import PREPROCESSING
from pipelines.features.decoding_processes import DecodingProcesses
from pipelines.features.inference import Tally
from pipelines.features.shard_worker import MIN_CORES_FOR_PROCESSES, decoding_processes
from schemas.errors import ImagepivotError
from schemas.features import FeatureSpec
from tests.crashing_decoder import crash
from tests.fake_extractors import extract_images

CROP = partial(cropped_pixels, preprocessing=PREPROCESSING)


def resize_and_crop(image, preprocessing):
    return torch.from_numpy(cropped_pixels(image, preprocessing))


SPEC = FeatureSpec("fake", (3,))


class Means(extractors.Extractor):
    """The feature of an image is the mean of each channel."""

    def preprocess(self, image):
        return resize_and_crop(image, PREPROCESSING)

    def __init__(self):
        super().__init__(extractors.Description(SPEC, {"name": "fake"}))

    def extract(self, batch):
        return batch.to(torch.float32).mean((2, 3)).numpy()


def photograph(number: int, kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (60 + number, 80, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((90 + number, 70)).save(file, kind)
    return file.getvalue()


def files() -> dict[str, bytes]:
    """Return images, and one file for each reason of a failure."""
    found = {f"{number:02d}": photograph(number) for number in range(12)}
    thin = io.BytesIO()
    Image.new("RGB", (60_000, 1)).save(thin, "PNG")
    return found | {
        "03": b"",
        "05": b"no image",
        "07": photograph(7)[:700],
        "09": thin.getvalue(),
        "10": photograph(10, "PNG")[:60] + b"?" + photograph(10, "PNG")[61:],
    }


def rows_and_failures(processes: DecodingProcesses | None):
    tally = Tally()
    tables = extract_images(files(), Means(), batch_size=3, threads=2, processes=processes, tally=tally)
    return [row for table in tables for row in table.to_pylist()], tally.failures, tally.digests


@pytest.fixture(scope="module")
def processes():
    return DecodingProcesses(CROP, 2)


def pids_of(processes: DecodingProcesses) -> list[int]:
    """Return the ids of the running processes of a pool."""
    return [worker._process.pid for worker in processes._workers if worker is not None]


def wait_until_gone(pids, seconds=60):
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z (zombie)" not in status(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def status(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


@pytest.mark.cluster
def test_rows_and_failures_are_those_of_threads(processes):
    found, expected = rows_and_failures(processes), rows_and_failures(None)
    assert found == expected
    assert len(expected[0]) == 7
    assert {failure["reason"] for failure in expected[1]} >= {"empty", "not_an_image", "truncated", "too_large"}
    assert len(pids_of(processes)) == 2


@pytest.mark.cluster
def test_decoding_processes_pixels_equal_threads_after_ctrl_c(processes):
    data = photograph(3)
    expected = resize_and_crop(extractors.decode_image(data), PREPROCESSING)
    for _ in range(4):
        found = processes.pixels(data)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
        for pid in pids_of(processes):
            os.kill(pid, signal.SIGINT)  # A terminal sends it to all processes; the launcher decides.


@pytest.mark.cluster
def test_pixels_are_not_overwritten_by_those_of_the_next_image(processes):
    images = [photograph(number) for number in range(8)]
    with ThreadPoolExecutor(2) as pool:
        pixels = list(pool.map(processes.pixels, images))
    assert all(map(torch.equal, pixels, (resize_and_crop(extractors.decode_image(image), PREPROCESSING) for image in images)))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (signal.SIGKILL, r"was killed, probably because memory ran out\. Finished shards are kept.*more memory, or with fewer"),
        (signal.SIGUSR1, r"a process that decodes images was ended by SIGUSR1; .*Finished shards are kept"),
    ],
)
def test_decoding_processes_killed_process_is_an_error_and_restarted(ends, message):
    own = DecodingProcesses(CROP, 1)
    expected = own.pixels(photograph(1))
    (pid,) = pids_of(own)
    os.kill(pid, ends)
    wait_until_gone([pid])
    with pytest.raises(ImagepivotError, match=message):
        own.pixels(photograph(1))
    assert torch.equal(own.pixels(photograph(1)), expected)
    assert pids_of(own) != [pid]


def crashing(log: Path, signum: int, times: int, num_processes: int = 2) -> DecodingProcesses:
    """Return processes that crash with an image of 106 columns, at most so many times."""
    return DecodingProcesses(partial(crash, log=str(log), signum=signum, times=times, preprocess=CROP), num_processes)


@pytest.mark.cluster
def test_image_that_crashes_a_process_is_tried_once_more_alone_and_then_a_failure(tmp_path):
    log = tmp_path / "log"
    images = {f"{number:02d}": photograph(number) for number in (15, 16, 17)}
    own = crashing(log, signal.SIGABRT, 9)
    tally = Tally()
    tables = list(extract_images(images, Means(), batch_size=3, threads=2, processes=own, tally=tally))
    assert [row["image_id"] for table in tables for row in table.to_pylist()] == ["15", "17"]
    [failure] = tally.failures
    assert (failure["key"], failure["stage"], failure["reason"]) == ("16", "decode", "crashed")
    assert failure["message"] == "a decoder crashed twice with SIGABRT"
    assert tally.digests["16"] == hashlib.sha256(images["16"]).hexdigest()
    lines = log.read_text().splitlines()
    assert lines.count("106 begins") == 2
    last = len(lines) - 1 - lines[::-1].index("106 begins")
    assert all(lines[:last].count(f"{width} begins") == lines[:last].count(f"{width} ends") for width in (105, 107))  # Alone.
    assert torch.equal(own.pixels(images["15"]), resize_and_crop(extractors.decode_image(images["15"]), PREPROCESSING))


@pytest.mark.cluster
def test_image_whose_second_attempt_succeeds_is_no_failure(tmp_path):
    own = crashing(tmp_path / "log", signal.SIGBUS, 1, 1)
    assert torch.equal(own.pixels(photograph(16)), resize_and_crop(extractors.decode_image(photograph(16)), PREPROCESSING))


@pytest.mark.cluster
def test_images_that_crash_simultaneously_wait_for_each_other(tmp_path):
    own = crashing(tmp_path / "log", signal.SIGSEGV, 99)

    def reason(_number):
        with pytest.raises(extractors.DecodeError, match="a decoder crashed twice with SIGSEGV") as caught:
            own.pixels(photograph(16))
        return caught.value.reason

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(reason, range(2))) == ["crashed"] * 2


HOLDS_ONE = """
import sys
from functools import partial
from extractors.images.preprocessing import cropped_pixels
from extractors.whole_image.resnet50 import PREPROCESSING
from pipelines.features.decoding_processes import DecodingProcesses
processes = DecodingProcesses(partial(cropped_pixels, preprocessing=PREPROCESSING), 1)
processes.pixels(open(sys.argv[1], "rb").read())
print(*(worker._process.pid for worker in processes._workers), flush=True)
sys.stdin.read()
"""


@pytest.mark.cluster
@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_worker_however_it_ends(ends, tmp_path):
    (tmp_path / "image.jpg").write_bytes(photograph(1))
    command = [sys.executable, "-c", HOLDS_ONE, str(tmp_path / "image.jpg")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        pids = [int(pid) for pid in worker.stdout.readline().split()]
        assert len(pids) == 1
        worker.send_signal(ends)
        worker.wait(60)
    wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50-pool", "vgg19-10crop-caffe", "vgg19-grid"])
def test_preprocessor_equals_preprocess(name):
    extractor = extractors.load_extractor(name, weights="random:0", device="cpu")
    sent = pickle.dumps(extractor.preprocessor)
    assert len(sent) < 1000
    image = extractors.decode_image(photograph(4))
    found, expected = torch.from_numpy(pickle.loads(sent)(image)), extractor.preprocess(image)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_decoding_processes_only_with_many_cores():
    on_gpu, sendable = {"on_gpu": True}, {"preprocessor": property(lambda _: CROP)}
    assert decoding_processes(type("Elsewhere", (Means,), on_gpu)(), 64) is None  # It has nothing that could be sent.
    assert decoding_processes(type("Sendable", (Means,), sendable)(), 64) is None  # The model needs the cores.
    extractor = type("Both", (Means,), on_gpu | sendable)()
    assert decoding_processes(extractor, MIN_CORES_FOR_PROCESSES - 1) is None
    before = threading.active_count()
    found = decoding_processes(extractor, MIN_CORES_FOR_PROCESSES)
    assert (found.num_processes, pids_of(found)) == (MIN_CORES_FOR_PROCESSES, [])
    assert threading.active_count() == before

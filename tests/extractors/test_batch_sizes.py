"""The search for the size of batches, on a GPU of which only the answers to questions are faked."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from extractors.base import Description, Extractor
from extractors.batch_sizes import find_batch_size
from schemas.features import FeatureSpec

GB = 2**30


class Timed(Extractor):
    """Takes the seconds and the memory that a test says for a batch of so many images."""

    def __init__(
        self, *, seconds=lambda size: 1.0, image_bytes=GB // 8, device="cuda:0", kind="features", width=8, **parameters
    ):
        spec = FeatureSpec("timed", (width,))
        super().__init__(Description(spec, {"precision": "fp32", **parameters}, kind=kind), torch.device(device))
        self._seconds, self._image_bytes = seconds, image_bytes
        self.now, self.peak = 0.0, 0
        self.sizes: list[int] = []

    def preprocess(self, image):
        assert image.mode == "RGB"
        return torch.zeros(3, 32, 32, dtype=torch.uint8)

    def extract(self, batch):
        self.sizes.append(len(batch))
        self.now += self._seconds(len(batch))
        self.peak = max(self.peak, len(batch) * self._image_bytes)
        return np.zeros((len(batch), 8), np.float32)


@pytest.fixture
def find(monkeypatch):
    """Return a function that finds the size for an extractor on a GPU with so much free memory."""

    def find(extractor, *, free=80 * GB, name="a GPU", memory=80 * GB):
        def forget(device):
            extractor.peak = 0

        answers = {
            "get_device_name": lambda device: name,
            "get_device_properties": lambda device: SimpleNamespace(total_memory=memory),
            "mem_get_info": lambda device: (free - 2 * GB, memory),
            "memory_reserved": lambda device: 3 * GB,
            "memory_allocated": lambda device: GB,
            "max_memory_allocated": lambda device: GB + extractor.peak,
            "reset_peak_memory_stats": forget,
        }
        for question, answer in answers.items():
            monkeypatch.setattr(torch.cuda, question, answer)
        return find_batch_size(extractor, clock=lambda: extractor.now)

    return find


@pytest.mark.parametrize(("knee", "expected"), [(1000, 256), (16, 16), (64, 64), (100, 128), (128, 128)])
def test_find_batch_size_doubles_while_faster_up_to_256(find, knee, expected):
    extractor = Timed(seconds=lambda size: max(1.0, size / knee))
    assert find(extractor) == expected
    tried = [size for size in (16, 32, 64, 128, 256) if size <= 2 * expected]
    assert extractor.sizes == [size for size in tried for _ in range(2)]  # Each once to warm up.


@pytest.mark.parametrize(("free", "expected"), [(3 * GB, 16), (8 * GB, 32), (17 * GB, 64), (32 * GB, 128), (64 * GB, 256)])
def test_find_batch_size_tries_at_most_half_of_free_memory(find, free, expected):
    extractor = Timed()
    assert find(extractor, free=free) == expected
    assert max(extractor.sizes) == expected


def test_find_batch_size_is_limited_by_host_memory(find):
    assert find(Timed(width=2**18)) == 32  # A MiB, and 3 KiB of pixels: 64 would be more than 64 MiB.


@pytest.mark.parametrize(
    "extractor", [{"device": "cpu"}, {"kind": "regions"}, {"compiled": True}], ids=["cpu", "regions", "compiled"]
)
def test_find_batch_size_cpu_regions_or_compiled_is_fixed(find, extractor):
    timed = Timed(**extractor)
    assert find(timed) == 16
    assert timed.sizes == []


def test_find_batch_size_caches_by_gpu_extractor_and_precision(find, monkeypatch):
    assert find(Timed()) == 256
    again = Timed(seconds=lambda size: float(size))
    assert find(again) == 256
    assert again.sizes == []
    assert find(again, name="another GPU") == 16
    assert find(again, memory=40 * GB) == 16
    assert find(Timed(seconds=lambda size: float(size), precision="bf16")) == 16
    assert find(Timed(seconds=lambda size: float(size), width=9)) == 16
    assert find(again) == 256

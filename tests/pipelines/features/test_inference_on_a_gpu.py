"""A shard from a small network on a fake GPU: its rows, and what the host waits for."""

import io
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import nn

from extractors import Description
from extractors.fixed_size import CenterCropExtractor
from extractors.images.preprocessing import Preprocessing
from extractors.options import ExtractorOptions
from schemas.features import FeatureSpec
from tests.fake_extractors import extract_images
from tests.fake_gpu import fake_gpu

SPEC = FeatureSpec("tiny", (4,))
PREPROCESSING = Preprocessing(resize_short=16, crop=12, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


class Tiny(CenterCropExtractor):
    """The mean over the cells of one convolution; fails for want of memory with more than ``most`` images."""

    most = 100

    def __init__(self, device: str) -> None:
        trunk = nn.Conv2d(3, 4, 3)
        generator = torch.Generator().manual_seed(0)
        trunk.weight.data = torch.randn(4, 3, 3, 3, generator=generator)
        trunk.bias.data = torch.randn(4, generator=generator)
        super().__init__(
            Description(SPEC, {"name": "tiny"}), trunk, PREPROCESSING, ExtractorOptions(SPEC), torch.device(device)
        )

    def features(self, maps):
        if self.on_gpu and len(maps) > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return maps.mean(dim=(2, 3))


def photo(number: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (20, 17 + number % 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def extract(extractor, count: int) -> dict[str, list[float]]:
    tables = extract_images({f"{number:02d}": photo(number) for number in range(count)}, extractor, threads=2)
    return {row["image_id"]: row["feature"] for row in pa.concat_tables(tables).to_pylist()}


@pytest.mark.parametrize("most", [100, 3, 1])
def test_shard_of_fake_gpu_equals_cpu(most):
    expected = extract(Tiny("cpu"), 26)
    with fake_gpu() as gpu:
        extractor = Tiny("cuda:0")
        extractor.most = most
        gpu.reset()
        found = extract(extractor, 26)
        waits = Counter(event.operation for event in gpu.waits.elements())
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5, atol=1e-6)
    # Nothing is waited for but the end of each batch's download.
    assert waits == {"event": 7}, gpu.report()


def test_batch_for_a_gpu_is_pinned_and_has_the_order_of_the_models():
    with fake_gpu():
        extractor = Tiny("cuda:0")
        pixels = [extractor.preprocess(Image.new("RGB", (20, 20), (number, 0, 0))) for number in range(3)]
        batch = extractor.collate(pixels)
        assert batch.is_pinned()
        assert batch.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(batch, torch.stack(pixels))

"""The pool of ResNet50; tests/integration/test_features_photos.py compares its numbers with torchvision."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import extractors
from extractors.whole_image import resnet50
from tests.threads import threads_of_torch


@pytest.fixture(scope="module")
def extractor() -> resnet50.ResNet50Pool:
    return extractors.load_extractor("resnet50-pool", weights="random:0")


@pytest.fixture(scope="module")
def files(photos) -> list[Path]:
    """Every third photograph: six."""
    return sorted((photos / "images").iterdir())[::3]


@pytest.fixture(scope="module")
def crops(extractor, files) -> torch.Tensor:
    return extractor.collate([extractor.preprocess(extractors.decode_image(file.read_bytes())) for file in files])


@pytest.fixture(scope="module")
def features(extractor, crops) -> np.ndarray:
    return extractor.extract(crops)


def assert_same_bytes(extractor, crops, features, size) -> None:
    parts = [extractor.extract(part) for part in crops.split(size)]
    assert np.concatenate(parts).tobytes() == features.tobytes()


@pytest.mark.cluster
@pytest.mark.parametrize(("threads", "size"), [(1, 1), (2, 5), (4, 3)])
def test_resnet50_features_do_not_depend_on_threads_and_batch(extractor, crops, features, threads, size):
    with threads_of_torch(threads):
        assert extractor.feeder_threads == (2 if threads > 1 else 0)
        with ThreadPoolExecutor(2) as callers:
            both = list(callers.map(lambda _: assert_same_bytes(extractor, crops, features, size), range(2)))
        assert len(both) == 2


@pytest.mark.slow
def test_extract_does_not_depend_on_order_and_memory_layout(extractor, crops, features):
    assert_same_bytes(extractor, crops.flip(0).contiguous(), np.ascontiguousarray(features[::-1]), 4)

"""Features as float16, maps, and what follows them: reading, checking, exporting and importing."""

import numpy as np
import pytest

from schemas.dataset import open_dataset
from schemas.writing.validation import validate

pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")

pytestmark = pytest.mark.slow

NAME = "timm:test_resnet.r160_in1k"


def features(imagepivot, photos, output, *arguments, **more):
    options = ("--extractor", NAME, "--weights", "random:0", "--device", "cpu", "--shards", "2", *arguments)
    imagepivot("features", photos / "images", output, *options, **more)
    return open_dataset(output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("types")


@pytest.fixture(scope="module")
def whole(imagepivot, photos, folder):
    return features(imagepivot, photos, folder / "whole")


@pytest.fixture(scope="module")
def half(imagepivot, photos, folder):
    return features(imagepivot, photos, folder / "half", "--dtype", "float16")


def test_values_are_those_of_float32_rounded(folder, whole, half):
    assert (whole.spec.dtype, half.spec.dtype) == ("float32", "float16")
    assert half.numpy().tobytes() == whole.numpy().astype(np.float16).tobytes()
    assert half.image_ids() == whole.image_ids()
    assert half.fingerprint != whole.fingerprint
    assert (half.manifest.parameters["extractor"]["dtype"], "dtype" in whole.manifest.parameters["extractor"]) == (
        "float16",
        False,
    )
    sizes = [sum(shard.bytes for shard in dataset.manifest.shards) for dataset in (whole, half)]
    assert sizes[0] - sizes[1] == pytest.approx(18 * 96 * 2, abs=300)  # the footers differ by some letters
    assert validate(folder / "half") == []


def test_maps_are_read_in_their_shape(imagepivot, photos, folder, whole):
    maps = features(imagepivot, photos, folder / "maps", "--unpooled", "--dtype", "float16")
    assert maps.spec.shape == (25, 96)
    assert maps.numpy().shape == (18, 25, 96)
    assert maps.get("chelsea")["feature"].shape == (25, 96)
    means = maps.numpy().astype(np.float32).mean(axis=1)
    assert np.abs(means - whole.numpy()).max() < 1e-3 * np.abs(whole.numpy()).max()
    assert validate(folder / "maps") == []
    imagepivot("view", folder / "maps", photos / "images", "--image", "chelsea", "-o", folder / "crop.png")

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


def test_commands_take_it(imagepivot, folder, whole, half):
    assert "halffloat[96]" in imagepivot("inspect", folder / "half").stdout
    imagepivot("validate", folder / "half")
    done = imagepivot("diff", folder / "whole", folder / "half", code=(0, 1))
    assert "feature.dtype" in done.stdout
    imagepivot("export", folder / "half", folder / "npy", "--format", "npy")
    array = np.load(folder / "npy" / "features.npy")
    assert array.dtype == np.float16
    assert array.tobytes() == half.numpy().tobytes()
    ids = ("--ids", folder / "npy" / "ids.txt", "--name", "half")
    imagepivot("import", folder / "npy" / "features.npy", folder / "again", *ids, "--shards", "2")
    again = open_dataset(folder / "again")
    assert (again.spec.dtype, again.image_ids()) == ("float16", half.image_ids())
    assert again.numpy().tobytes() == half.numpy().tobytes()


def test_maps_are_read_in_their_shape(imagepivot, photos, folder, whole):
    maps = features(imagepivot, photos, folder / "maps", "--unpooled", "--dtype", "float16")
    assert maps.spec.shape == (25, 96)
    assert maps.numpy().shape == (18, 25, 96)
    assert maps.get("chelsea")["feature"].shape == (25, 96)
    means = maps.numpy().astype(np.float32).mean(axis=1)
    assert np.abs(means - whole.numpy()).max() < 1e-3 * np.abs(whole.numpy()).max()
    assert validate(folder / "maps") == []
    assert "halffloat[2400]" in imagepivot("inspect", folder / "maps").stdout
    imagepivot("view", folder / "maps", photos / "images", "--image", "chelsea", "-o", folder / "crop.png")
    imagepivot("export", folder / "maps", folder / "maps-npy", "--format", "npy")
    assert np.load(folder / "maps-npy" / "features.npy").tobytes() == maps.numpy().tobytes()

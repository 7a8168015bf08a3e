import json

import numpy as np
import pytest

from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from train.data.feature_checks import FeatureOutliers, find_feature_outliers
from train.data.features import read_features

IDS = [f"image-{number:02d}" for number in range(20)]


@pytest.fixture
def features(new_dataset, tmp_path):
    """Write features of length 5, some of them scaled, and read them."""

    def features(factors: dict[int, float], shape: tuple[int, ...] = (2,), dtype: str = "float32", **arguments):
        rows = [{"image_id": name, "feature": np.broadcast_to([3, 4], shape).astype(dtype)} for name in IDS]
        for number, factor in factors.items():
            first = rows[number]["feature"] = rows[number]["feature"].copy()
            first.reshape(-1, 2)[0] *= np.array(factor, dtype)
        folder = tmp_path / f"features-{len(list(tmp_path.iterdir()))}"
        new_dataset(folder, "features", rows, parameters={}, spec=FeatureSpec("toy", shape, dtype))
        return read_features(open_dataset(folder), IDS, **arguments)

    return features


@pytest.mark.parametrize("arguments", [{}, {"l2": True}])
@pytest.mark.parametrize("mapped", [True, False])
def test_outliers_are_counted(features, tmp_path, arguments, mapped):
    if mapped:
        arguments = {**arguments, "memory_map": tmp_path / "cache"}
    read = features({3: 0, 5: 101, 6: 99, 7: 1 / 101, 8: 1 / 99, 11: 1e25, 12: 0}, **arguments)
    found = find_feature_outliers("train", read, IDS)
    assert found == FeatureOutliers("train", images=20, zero_features=2, norm_outliers=3, median=5.0, example="image-03")
    assert json.loads(json.dumps(vars(found)))["norm_outliers"] == 3


def test_outliers_among_several_vectors_zeros_or_none(features):
    found = find_feature_outliers("val", features({4: 0}, shape=(3, 2), dtype="float16"), IDS)
    assert (found.zero_features, found.norm_outliers, found.example) == (1, 0, "image-04")
    zeros = find_feature_outliers("val", features(dict.fromkeys(range(20), 0.0)), IDS)
    assert (zeros.zero_features, zeros.norm_outliers, zeros.median) == (20, 0, 0.0)
    assert find_feature_outliers("train", features({1: 99.0, 2: 1 / 99}), IDS) is None

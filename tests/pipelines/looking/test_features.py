import numpy as np
import pytest
from sklearn.decomposition import PCA

from pipelines.looking.exhibits import Photos
from pipelines.looking.features import describe_features, principal_components
from pipelines.looking.pages import PictureMap
from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from tests.builders import write_rows


@pytest.mark.parametrize(("images", "width"), [(30, 12), (12, 30)])
def test_map_is_that_of_scikit_learn(images, width):
    vectors = np.random.default_rng(0).standard_normal((images, width)).astype(np.float32) * np.arange(width)
    points, expected = principal_components(vectors), PCA(2).fit_transform(vectors.astype(np.float64))
    assert points == pytest.approx(expected * np.sign((points * expected).sum(0)), abs=1e-6)


def test_images_with_nan_are_named_and_not_mapped(tmp_path):
    vectors = {"a": [1.0, 2.0], "b": [np.nan, 1.0], "c": [3.0, 4.0], "d": [np.inf, 0.0], "e": [0.0, 2.0]}
    rows = [{"image_id": image_id, "feature": vector} for image_id, vector in vectors.items()]
    write_rows(tmp_path / "some", "features", rows, FeatureSpec("toy", (2,)))
    blocks, remarks = describe_features(open_dataset(tmp_path / "some"), Photos())
    assert remarks[0] == "2 images with NaN or infinite values, left out below: b, d"
    [table, mapped] = blocks
    assert table.rows[0] == (3, 2, pytest.approx(2), pytest.approx(5**0.5), pytest.approx(5))
    assert isinstance(mapped, PictureMap)
    assert len(mapped.dots) == 3
    assert np.isfinite(mapped.dots).all()
    write_rows(tmp_path / "all", "features", rows[1:2], FeatureSpec("toy", (2,)))
    expected = ([], ["1 image with NaN or infinite values, left out below: b"])
    assert describe_features(open_dataset(tmp_path / "all"), Photos()) == expected

import numpy as np
import pytest
from sklearn.decomposition import PCA

from pipelines.looking.features import principal_components


@pytest.mark.parametrize(("images", "width"), [(30, 12), (12, 30)])
def test_map_is_that_of_scikit_learn(images, width):
    vectors = np.random.default_rng(0).standard_normal((images, width)).astype(np.float32) * np.arange(width)
    points, expected = principal_components(vectors), PCA(2).fit_transform(vectors.astype(np.float64))
    assert points == pytest.approx(expected * np.sign((points * expected).sum(0)), abs=1e-6)


def test_one_image_has_a_place():
    assert principal_components(np.ones((1, 3), np.float32)).tolist() == [[0, 0]]

from math import sqrt

import numpy as np
import pandas as pd
import pytest

from train.sts.correlation import Correlation, cosines
from train.sts.pairs import StsPairs


def scored(scores):
    sentences = tuple(map(str, scores))
    return StsPairs("pairs", "pairs.tsv", tuple(scores), sentences, sentences, tuple(range(1, len(scores) + 1)))


@pytest.mark.parametrize("seed", range(5))
def test_correlations_equal_pandas(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 26, size=120) / 5  # Like human scores: with many ties.
    y = np.round(x + rng.normal(0, 2, size=120), 1)
    frame = pd.DataFrame({"x": x, "y": y})
    correlation = scored(x).correlation(y)
    assert correlation.pearson == pytest.approx(100 * frame.x.corr(frame.y), abs=1e-10)
    assert correlation.spearman == pytest.approx(100 * frame.x.rank().corr(frame.y.rank()), abs=1e-10)
    assert scored([1, 2]).correlation([0.5, 0.25]) == Correlation(-100, -100)


@pytest.mark.parametrize("constant", [[1, 1, 1], [0.9999999, 1.0, 0.99999995], [0, 0, 0]])
def test_correlation_with_a_constant_series_is_none(constant):
    none = Correlation(None, None)
    assert scored([1, 2, 3]).correlation(constant) == scored(constant).correlation([1, 2, 3]) == none
    assert scored([1]).correlation([2]) == none


def test_cosines_are_those_of_each_row():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 5)), rng.standard_normal((7, 5))
    a[3] = 0
    expected = [0 if n == 3 else sum(a[n] * b[n]) / sqrt(sum(a[n] ** 2) * sum(b[n] ** 2)) for n in range(7)]
    np.testing.assert_allclose(cosines(a, b), expected, atol=1e-12)
    assert cosines(a.astype(np.float32), a.astype(np.float32)).dtype == np.float64
    np.testing.assert_allclose(cosines(a, 1000 * a), [1, 1, 1, 0, 1, 1, 1])
    assert cosines(a, a).max() <= 1

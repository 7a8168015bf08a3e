from __future__ import annotations

from math import sqrt
from statistics import mean

import numpy as np
import pandas as pd
import pytest

from train.evaluation.correlations import Correlation, correlation, cosines, pearson, ranks_with_ties, spearman


def r_by_hand(x, y) -> float:
    """Pearson's r by its definition."""
    a, b = [v - mean(x) for v in x], [v - mean(y) for v in y]
    return sum(p * q for p, q in zip(a, b, strict=True)) / sqrt(sum(p * p for p in a) * sum(q * q for q in b))


def ranks_by_hand(values) -> list[float]:
    """The mean of the places that a value can take in the sorted series."""
    ordered = sorted(values)
    return [mean(place for place, other in enumerate(ordered, start=1) if other == value) for value in values]


@pytest.mark.parametrize("seed", range(5))
def test_correlations_equal_the_definition_and_pandas(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 26, size=120) / 5  # Like scores of people: with many ties.
    y = np.round(x + rng.normal(0, 2, size=120), 1)
    assert pearson(x, y) == pytest.approx(r_by_hand(x.tolist(), y.tolist()), abs=1e-12)
    assert ranks_with_ties(x).tolist() == ranks_by_hand(x.tolist())
    assert spearman(x, y) == pytest.approx(r_by_hand(ranks_by_hand(x.tolist()), ranks_by_hand(y.tolist())), abs=1e-12)
    frame = pd.DataFrame({"x": x, "y": y})
    assert pearson(x, y) == pytest.approx(frame.x.corr(frame.y), abs=1e-12)
    assert spearman(x, y) == pytest.approx(frame.x.rank().corr(frame.y.rank()), abs=1e-12)
    assert correlation(x, y) == Correlation(100 * pearson(x, y), 100 * spearman(x, y))


def test_spearman_sees_the_order_alone():
    x = [0.1, 0.2, 0.5, 0.9]
    assert spearman(x, np.exp(10 * np.array(x))) == pytest.approx(1)
    assert pearson(x, np.exp(10 * np.array(x))) < 0.95
    assert spearman(x, [4, 3, 2, 1]) == pytest.approx(-1)


@pytest.mark.parametrize("constant", [[1, 1, 1], [0.9999999, 1.0, 0.99999995], [0, 0, 0]])
def test_what_is_constant_correlates_with_nothing(constant):
    assert correlation([1, 2, 3], constant) == correlation(constant, [1, 2, 3]) == Correlation(None, None)
    assert correlation([1], [2]) == Correlation(None, None)


def test_series_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"series of the shapes \(3,\) and \(2,\): expected two of one length"):
        pearson([1, 2, 3], [1, 2])


def test_cosines_are_those_of_each_row():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 5)), rng.standard_normal((7, 5))
    a[3] = 0
    expected = [0 if n == 3 else sum(a[n] * b[n]) / sqrt(sum(a[n] ** 2) * sum(b[n] ** 2)) for n in range(7)]
    np.testing.assert_allclose(cosines(a, b), expected, atol=1e-12)
    assert cosines(a.astype(np.float32), a.astype(np.float32)).dtype == np.float64
    np.testing.assert_allclose(cosines(a, 1000 * a), [1, 1, 1, 0, 1, 1, 1])
    assert cosines(a, a).max() <= 1

from itertools import combinations

import numpy as np
import pytest

from train.chance import RECALLS
from train.evaluation.ranks import Queries
from train.evaluation.statistics import holm, paired_p_values, seed_p_value
from train.reports import significance
from train.reports.significance import Difference, adjust, best_rows, compare_rows, not_worse

IMAGES = np.repeat(np.arange(40), 3)
IDS = np.array([f"{image}/{index}" for index, image in enumerate(IMAGES)])


def queries(share: float, seed: int, runs: int = 1) -> Queries:
    return Queries(IDS, IMAGES, np.random.default_rng(seed).geometric(share, (runs, len(IDS))))


def recalls(row: Queries, cutoff: int) -> list[float]:
    return [100 * sum(int(rank) <= cutoff for rank in ranks) / len(ranks) for ranks in row.ranks]


def test_compare_rows_of_four_rows_tests_all_pairs():
    rows = {"a": queries(0.1, 0, runs=3), "b": queries(0.3, 1, runs=2), "c": queries(0.2, 2), "d": queries(0.1, 3)}
    tests = list(compare_rows("place", rows))
    assert {(test.measure, frozenset(test.rows)) for test in tests} == {
        (measure, frozenset(pair)) for measure in RECALLS for pair in combinations(rows, 2)
    }
    for test in tests:
        first, second = (rows[name] for name in test.rows)
        means = [np.mean(recalls(row, int(test.measure.rpartition("_")[2]))) for row in (first, second)]
        assert test.difference == pytest.approx(means[0] - means[1])
        assert test.difference >= 0
        assert test.p_value == paired_p_values(first.ranks, second.ranks, IMAGES)[test.measure]
        assert (test.seed_p_value is not None) == (set(test.rows) == {"a", "b"})
    (seeds,) = (test for test in tests if test.measure == "recall_at_5" and set(test.rows) == {"a", "b"})
    assert seeds.seed_p_value == seed_p_value(recalls(rows["a"], 5), recalls(rows["b"], 5))


def test_compare_rows_of_five_rows_tests_those_to_the_best():
    rows = {
        name: queries(share, index) for index, (name, share) in enumerate(zip("abcde", (0.1, 0.2, 0.5, 0.3, 0.1), strict=True))
    }
    for measure in RECALLS:
        pairs = [test.rows for test in compare_rows("place", rows) if test.measure == measure]
        best = max(rows, key=lambda name: recalls(rows[name], int(measure.rpartition("_")[2])))
        assert {first for first, _ in pairs} == {best}
        assert {second for _, second in pairs} == set(rows) - {best}


def test_adjust_corrects_images_and_seeds_apart():
    p_values, seeds = [0.01, 0.04, 0.03], [0.1, None, 0.3]
    tests = [Difference("x", "recall_at_1", ("a", "b"), 1.0, *values) for values in zip(p_values, seeds, strict=True)]
    adjusted = adjust(tests)
    assert [test.p_value for test in adjusted] == holm(p_values) == [0.03, 0.06, 0.06]
    assert [test.seed_p_value for test in adjusted] == [0.2, None, 0.3]


def row_of(*ranks: np.ndarray) -> Queries:
    return Queries(np.arange(1000), np.repeat(np.arange(200), 5), np.stack(ranks))


def test_best_rows_are_those_without_a_difference():
    rng = np.random.default_rng(0)
    best = rng.geometric(0.2, (2, 1000))
    near = best.copy()
    near[:, :4] += 20  # Of one image; two runs never differ significantly over seeds.
    rows = {"best": row_of(*best), "near": row_of(*near), "worse": row_of(best[0] + rng.integers(0, 3, 1000))}
    assert {row for _, measure, row in best_rows("place", rows) if measure == "recall_at_1"} == {"best", "near"}


@pytest.mark.parametrize(("p_values", "best"), [((0.02, 0.03), "a"), ((0.03, 0.04), "abc"), ((0.02, 0.06), "ac")])
def test_p_values_are_corrected_over_the_rows(monkeypatch, p_values, best):
    by_seeds = dict(enumerate(p_values, start=2))  # The number of seeds tells the rows apart.
    monkeypatch.setattr(significance, "paired_p_values", lambda a, b, images: dict.fromkeys(RECALLS, by_seeds[len(b)]))
    rows = {name: row_of(*[np.full(1000, rank)] * seeds) for name, seeds, rank in (("a", 1, 1), ("b", 2, 11), ("c", 3, 11))}
    assert best_rows("place", rows) == {("place", measure, row) for row in best for measure in RECALLS}


def draw_method(rng: np.random.Generator, seeds: int, deviation: float, mean: float = 40.0) -> Queries:
    """Draw runs of a method whose R@1 varies over trainings: the easiest queries of each are hits."""
    ease = np.arange(1000) + 300 * rng.random((seeds, 1000))
    hits = np.clip(np.round(10 * rng.normal(mean, deviation, seeds)), 1, 999).astype(int)
    return row_of(*(np.where(row.argsort().argsort() < count, 1, 99) for row, count in zip(ease, hits, strict=True)))


@pytest.mark.parametrize("deviation", [1.2, 1.8])
@pytest.mark.parametrize(("seeds", "shares"), [(3, (0, 0)), (5, (1, 9))])
def test_equal_methods_seldom_lose_the_mark(monkeypatch, seeds, shares, deviation):
    """Three seeds allow no p below 0.1 and lose none, five about 5 %, whatever the images tell of these trainings."""
    monkeypatch.setattr(significance, "paired_p_values", lambda a, b, images: dict.fromkeys(RECALLS, 0.0))
    monkeypatch.setattr(significance, "RECALLS", RECALLS[:1])
    rng, rounds, lost = np.random.default_rng(1), 150, 0
    for _ in range(rounds):
        rows = {name: draw_method(rng, seeds, deviation) for name in "ab"}
        lost += not not_worse(adjust(list(compare_rows("place", rows))))
    assert shares[0] <= 100 * lost / rounds <= shares[1]
    apart = {"a": draw_method(rng, 5, deviation), "b": draw_method(rng, 5, deviation, mean=20.0)}
    assert not not_worse(adjust(list(compare_rows("place", apart))))
    single = {"a": apart["a"], "b": draw_method(rng, 1, deviation)}
    assert not not_worse(adjust(list(compare_rows("place", single))))  # Over images, for lack of seeds.

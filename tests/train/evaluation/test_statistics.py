"""Intervals and tests equal plain Python loops, hold the truth as often as promised and reject as seldom."""

import functools
import math
from itertools import combinations
from statistics import NormalDist, mean

import numpy as np
import pytest

from train.evaluation import statistics
from train.evaluation.statistics import (
    Interval,
    bootstrap_intervals,
    holm,
    paired_p_values,
    seed_p_value,
)

NORMAL = NormalDist()
IMAGES = np.repeat(np.arange(100), 5)
"""Image of each of 500 captions."""


def draw_ranks(generator: np.random.Generator, location: float, size: int = 1) -> np.ndarray:
    """Draw log-normal ranks ``[size, Q]``; captions of one image have a correlation of 0.5."""
    of_image = generator.standard_normal((100, 1))
    of_caption = generator.standard_normal((size, 100, 5))
    normal = math.sqrt(0.5) * (of_image + of_caption)
    return (1 + np.floor(np.exp(location + 1.5 * normal))).astype(np.int64).reshape(size, -1)


def loop_metrics(ranks: list[list[int]]) -> list[float]:
    """Return R@1, R@5, R@10 and the median of queries, means over seeds."""
    total = sum(map(len, ranks))
    recalls = [100 * sum(rank <= cutoff for row in ranks for rank in row) / total for cutoff in (1, 5, 10)]
    medians = [(sorted(row)[(len(row) - 1) // 2] + sorted(row)[len(row) // 2]) // 2 for row in ranks]
    return [*recalls, sum(medians) / len(medians)]


def loop_intervals(ranks: np.ndarray, images: list[str], resamples: int, seed: int) -> list[Interval]:
    """Return BCa intervals of recalls and percentile intervals of the median, by one loop over resamples."""
    names = sorted(set(images))
    queries = {name: [query for query, image in enumerate(images) if image == name] for name in names}
    generator = np.random.default_rng(seed)
    resampled = []
    for _ in range(resamples):
        drawn = [names[index] for index in generator.integers(len(names), size=len(names), dtype=np.int32)]
        chosen = [query for name in drawn for query in queries[name]]
        resampled.append(loop_metrics([[row[query] for query in chosen] for row in ranks.tolist()]))
    whole = loop_metrics(ranks.tolist())
    intervals = []
    for measure in range(4):
        values = sorted(metrics[measure] for metrics in resampled)
        levels = [0.025, 0.975]
        if measure < 3:
            below = sum(value < whole[measure] for value in values) + sum(value <= whole[measure] for value in values)
            bias = NORMAL.inv_cdf(below / 2 / resamples)
            cutoff = (1, 5, 10)[measure]
            influence = [
                sum((row[query] <= cutoff) - whole[measure] / 100 for row in ranks.tolist() for query in queries[name])
                for name in names
            ]
            acceleration = sum(u**3 for u in influence) / 6 / sum(u**2 for u in influence) ** 1.5
            shifted = [bias + NORMAL.inv_cdf(level) for level in levels]
            levels = [NORMAL.cdf(bias + z / (1 - acceleration * z)) for z in shifted]
        low = max(math.floor((resamples + 1) * levels[0]), 1)
        high = min(math.ceil((resamples + 1) * levels[1]), resamples)
        intervals.append(Interval(values[low - 1], values[high - 1]))
    return intervals


@pytest.mark.parametrize("seeds", [1, 3])
def test_intervals_equal_plain_loops(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_AT_ONCE", 1000)  # Several chunks.
    generator = np.random.default_rng(seeds)
    images = [f"image-{generator.integers(25)}" for _ in range(60)]  # One to six captions each.
    ranks = 1 + generator.integers(15, size=(seeds, 60))
    intervals = bootstrap_intervals(ranks, np.array(images), resamples=400, seed=7)
    expected = loop_intervals(ranks, images, 400, 7)
    assert [intervals.recall_at_1, intervals.recall_at_5, intervals.recall_at_10, intervals.median_rank] == expected


def test_medians_of_repeated_images_are_exact() -> None:
    generator = np.random.default_rng(0)
    weights = generator.multinomial(9, np.full(9, 1 / 9), size=50)
    images, ranks = np.sort(generator.integers(9, size=31)), np.sort(generator.integers(1, 99, size=31))
    repeated = [np.repeat(ranks, row[images]) for row in weights]  # The rank depends on the image: medians vary.
    expected = [(row[(len(row) - 1) // 2] + row[len(row) // 2]) // 2 for row in repeated]
    assert statistics._medians(weights, images, ranks).tolist() == expected


@pytest.mark.parametrize(
    ("images", "hits", "bounds"),
    [(1, 1, (0.5, 98)), (100, 0, (0, 3.6217)), (100, 2, (38.5513, 42.1730)), (100, 5, (96.3783, 100))],
)
def test_intervals_of_equal_images_allow_for_unseen_ones(images: int, hits: int, bounds: tuple[float, float]) -> None:
    """A share of 3.6217 % of other images is seen in none of 100 with a probability of 2.5 %; their recall is 0 or 100 %."""
    ranks = np.tile(np.where(np.arange(5) < hits, 1, 99), images)
    interval = bootstrap_intervals(ranks, np.repeat(np.arange(images), 5), resamples=99).recall_at_1
    assert (interval.low, interval.high) == pytest.approx(bounds, abs=1e-4)


@pytest.mark.cluster
@pytest.mark.timeout(3600)
def test_intervals_of_10000_draws_hold_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    image_weights = statistics._image_weights
    monkeypatch.setattr(statistics, "_image_weights", functools.cache(lambda *sizes: list(image_weights(*sizes))))
    generator = np.random.default_rng(0)
    outside: dict[str, list[bool]] = {}
    for _ in range(10_000):
        location = generator.uniform(-2.4, 4.8)
        intervals = bootstrap_intervals(draw_ranks(generator, location)[0], IMAGES, resamples=1000)
        truths = {f"recall_at_{cutoff}": 100 * NORMAL.cdf((math.log(cutoff) - location) / 1.5) for cutoff in (1, 5, 10)}
        truths = {name: recall for name, recall in truths.items() if 5 <= recall <= 95}
        for name, truth in (truths | {"median_rank": 1 + math.floor(math.exp(location))}).items():
            interval = getattr(intervals, name)
            outside.setdefault(name, []).append(not interval.low - 1e-9 <= truth <= interval.high + 1e-9)
    coverage = {name: 100 - 100 * mean(misses) for name, misses in outside.items()}
    assert len(coverage) == 4
    for name, percent in coverage.items():
        assert (94 if name == "median_rank" else 93.5) <= percent, coverage
        assert name == "median_rank" or percent <= 96.5, coverage


def loop_p_values(ranks_a: np.ndarray, ranks_b: np.ndarray, images: list[str]) -> list[float]:
    """Return exact mid-p values, by one loop over all signs of images."""
    names = sorted(set(images))
    differences = []
    for name in names:
        queries = [query for query, image in enumerate(images) if image == name]
        means = [
            [sum(int(row[q] <= k) for row in ranks for q in queries) * 6 // len(ranks) for k in (1, 5, 10)]
            for ranks in (ranks_a, ranks_b)
        ]
        first, second = means
        differences.append([a - b for a, b in zip(first, second, strict=True)])
    columns = [[difference[k] for difference in differences] for k in range(3)] + [[sum(item) for item in differences]]
    values = []
    for column in columns:
        sums = [abs(sum(d if bits >> i & 1 else -d for i, d in enumerate(column))) for bits in range(1 << len(column))]
        observed = abs(sum(column))
        values.append(mean((s > observed) + (s == observed) / 2 for s in sums))
    return values


@pytest.mark.parametrize("seeds", [(1, 1), (2, 3)])
def test_paired_p_values_near_all_signs_of_plain_loops(seeds: tuple[int, int]) -> None:
    generator = np.random.default_rng(4)
    images = [f"image-{index % 12}" for index in range(30)]
    ranks_a, ranks_b = 1 + generator.integers(12, size=(seeds[0], 30)), 1 + generator.integers(20, size=(seeds[1], 30))
    p_values = paired_p_values(ranks_a, ranks_b, np.array(images), draws=100_000)
    assert list(p_values) == ["recall_at_1", "recall_at_5", "recall_at_10", "sum_of_recalls"]
    assert list(p_values.values()) == pytest.approx(loop_p_values(ranks_a, ranks_b, images), abs=0.006)


def test_paired_p_values_of_models_without_a_difference_are_one() -> None:
    ranks, images = 1 + np.arange(40) % 12, np.arange(40) // 2
    other = ranks + (ranks > 10)  # Of no other recall at 1, 5 and 10.
    assert set(paired_p_values(ranks, ranks, images, draws=99).values()) == {1.0}
    assert set(paired_p_values(ranks, other, images, draws=99).values()) == {1.0}
    other[ranks == 10] = 11
    p_values = paired_p_values(ranks, other, images, draws=99)
    assert (p_values["recall_at_1"], p_values["recall_at_5"]) == (1.0, 1.0)
    assert p_values["recall_at_10"] < 0.5


@pytest.mark.cluster
def test_paired_p_values_of_10000_draws_reject_5_percent() -> None:
    generator = np.random.default_rng(0)
    rejected: dict[str, list[bool]] = {}
    for _ in range(10_000):
        first, second = draw_ranks(generator, generator.uniform(0.0, 2.0), size=2)
        p_values = paired_p_values(first, second, IMAGES, draws=1000)
        for cutoff in (1, 5, 10):
            if ((first <= cutoff) != (second <= cutoff)).sum() >= 100:
                rejected.setdefault(f"recall_at_{cutoff}", []).append(p_values[f"recall_at_{cutoff}"] <= 0.05)
    shares = {name: 100 * mean(values) for name, values in rejected.items()}
    assert len(shares) == 3
    assert all(4.3 <= share <= 5.7 for share in shares.values()), shares


def test_paired_p_values_detect_a_difference() -> None:
    generator = np.random.default_rng(0)
    better, worse = draw_ranks(generator, 1.0)[0], draw_ranks(generator, 2.0)[0]
    p_values = paired_p_values(better, worse, IMAGES)
    assert p_values["recall_at_5"] == paired_p_values(worse, better, IMAGES)["recall_at_5"] == 0.5 / 10_001


def loop_seed_p_value(first: list[float], second: list[float]) -> float:
    scores = first + second
    differences = []
    for chosen in combinations(range(len(scores)), len(first)):
        others = [score for index, score in enumerate(scores) if index not in chosen]
        differences.append(abs(mean(scores[index] for index in chosen) - mean(others)))
    return mean(difference >= abs(mean(first) - mean(second)) - 1e-9 for difference in differences)


@pytest.mark.parametrize(
    ("first", "second"),
    [([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), ([10.1, 10.2], [10.3, 10.1, 10.0]), ([0.1 + 0.2, 1.0, 0.5], [0.3, 1.0, 0.4])],
)
def test_seed_p_value_equals_plain_loops(first: list[float], second: list[float]) -> None:
    assert seed_p_value(first, second) == pytest.approx(loop_seed_p_value(first, second), abs=1e-12)


def test_seed_p_value_of_many_runs_is_near_that_of_all_permutations() -> None:
    first, second = [1.0, 2.5, 3.0, 3.5, 5.0, 6.5, 1.5], [2.0, 4.0, 4.5, 6.0, 7.0, 3.2, 5.5]
    exact = seed_p_value(first, second)
    assert exact == pytest.approx(loop_seed_p_value(first, second), abs=1e-12)
    sampled = seed_p_value(first, second, draws=math.comb(14, 7) - 1)
    assert sampled == pytest.approx(exact, abs=0.02)
    assert sampled != exact


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [([], []), ([0.2], [0.2]), ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]), ([0.6, 0.5, 0.001], [1.0, 1.0, 0.003])],
)
def test_holm_multiplies_in_order_and_never_falls(p_values: list[float], adjusted: list[float]) -> None:
    assert holm(p_values) == pytest.approx(adjusted)

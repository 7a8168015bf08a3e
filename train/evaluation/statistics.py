"""Confidence intervals of recalls, and tests between runs.

The unit of resampling is the image with all its queries, since captions of one image are not independent.
Gallery and ranks are those of the whole set: intervals and paired tests describe fixed models on other images
of the same kind, not other trainings. `seed_p_value` compares trainings.

Letters: ``S`` seeds, ``Q`` queries, ``I`` images, ``R`` resamples, ``K`` cutoffs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, fsum
from statistics import NormalDist

import numpy as np

from train.chance import CUTOFFS, RECALLS

_LEVEL = 0.95
_NORMAL = NormalDist()
_AT_ONCE = 1 << 20  # Weights in memory: 8 MiB in int64, near the processor.
_FEW_IMAGES = 6  # The median is outside of the range of five draws in 6.25 % of cases: no interval within it holds 95 %.
_UNITS = 10**9  # Scores are compared in billionths, since sums of recalls differ in their last bits.


@dataclass(frozen=True)
class Interval:
    """Confidence interval with 95 % coverage, in the unit of the number."""

    low: float
    high: float


@dataclass(frozen=True)
class MetricIntervals:
    """Confidence intervals of recalls in percent and of the median rank.

    Names are those of `train.evaluation.metrics.RecallMetrics`.
    """

    recall_at_1: Interval
    recall_at_5: Interval
    recall_at_10: Interval
    median_rank: Interval


def interval_notes(num_images: Iterable[int]) -> list[str]:
    """Return notes below a table with intervals, from the images of each gallery."""
    remark = f"intervals of fewer than {_FEW_IMAGES} images are too narrow"
    note = "95 % interval: by a bootstrap over images; for other images, not other trainings"
    return [note, *([remark] if min(num_images, default=_FEW_IMAGES) < _FEW_IMAGES else [])]


def bootstrap_intervals(ranks: np.ndarray, images: np.ndarray, *, resamples: int = 10_000, seed: int = 0) -> MetricIntervals:
    """Estimate confidence intervals by a bootstrap over images.

    Intervals of recalls are BCa (Efron 1987, DiCiccio and Efron 1996), since percentile intervals hold the
    truth too rarely for few images and recalls near 0 or 100 %. Images with equal recalls, or a single one,
    leave a bootstrap nothing to resample; the interval then allows for the share of other images that an
    exact binomial interval allows for unseen ones. Intervals of the median are percentile intervals.

    Args:
        ranks: int ``[Q]``, from 1, not empty; ``[S, Q]`` for several seeds, where recalls and median are means over seeds.
        images: int ``[Q]``, the image of each query.
        resamples: number of resamples.
        seed: seed of the draws.
    """
    ranks = np.atleast_2d(ranks)
    _, groups, num_queries = np.unique(images, return_inverse=True, return_counts=True)
    hits = _hits(ranks, groups, len(num_queries))
    totals = np.column_stack((hits, num_queries)).astype(np.float64)  # Exact: integers below 2**53.
    orders = np.argsort(ranks, axis=1, kind="stable")
    sums, medians = [], []
    for weights in _image_weights(len(num_queries), ranks.shape[1], resamples, seed):
        sums.append(weights @ totals)
        medians.append([_medians(weights, groups[order], row[order]) for order, row in zip(orders, ranks, strict=True)])
    resampled = np.concatenate(sums)
    recalls = 100 * resampled[:, :-1] / (len(ranks) * resampled[:, -1:])
    median = np.concatenate(medians, axis=1).mean(0)
    tail = (1 - _LEVEL) / 2
    first, fifth, tenth = (_recall_interval(recalls[:, k], hits[:, k], num_queries, len(ranks)) for k in range(len(CUTOFFS)))
    return MetricIntervals(first, fifth, tenth, _quantiles(median, tail, 1 - tail))


def _hits(ranks: np.ndarray, groups: np.ndarray, num_images: int) -> np.ndarray:
    """Count the hits of each image at each cutoff, over all seeds: int64 ``[I, K]``."""
    hits = [np.bincount(groups, weights=(ranks <= cutoff).sum(0), minlength=num_images) for cutoff in CUTOFFS]
    return np.column_stack(hits).astype(np.int64)


def _image_weights(num_images: int, num_queries: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Draw images with replacement; yield their counts: int64 ``[chunk, I]``."""
    generator = np.random.default_rng(seed)
    chunk = max(1, _AT_ONCE // num_queries)
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        draws = generator.integers(num_images, size=(size, num_images), dtype=np.int32)
        draws += num_images * np.arange(size, dtype=np.int32)[:, None]
        yield np.bincount(draws.ravel(), minlength=size * num_images).reshape(size, num_images)


def _medians(weights: np.ndarray, images: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the median of each resample, from queries in the order of ranks."""
    places = weights.astype(np.int32).take(images, axis=1).cumsum(axis=1, dtype=np.int32)
    total = places[:, -1:]
    low, high = ((places <= middle).sum(1) for middle in ((total - 1) // 2, total // 2))
    return (ranks[low] + ranks[high]) // 2


def _recall_interval(resampled: np.ndarray, hits: np.ndarray, num_queries: np.ndarray, num_seeds: int) -> Interval:
    """Return the BCa interval of a recall from resamples ``[R]`` and hits ``[I]``."""
    num_hits, num_trials = int(hits.sum()), num_seeds * int(num_queries.sum())
    estimate = 100 * num_hits / num_trials
    if (hits * num_queries.sum() == num_queries * num_hits).all():
        seen = ((1 - _LEVEL) / 2) ** (1 / len(hits))
        return Interval(estimate * seen, 100 - (100 - estimate) * seen)
    share_below = (np.count_nonzero(resampled < estimate) + np.count_nonzero(resampled <= estimate)) / (2 * len(resampled))
    bias = _NORMAL.inv_cdf(min(max(share_below, 0.5 / len(resampled)), 1 - 0.5 / len(resampled)))
    influence = hits - num_queries * (num_hits / int(num_queries.sum()))
    acceleration = fsum(influence**3) / (6 * fsum(influence**2) ** 1.5)
    levels = []
    for z in (_NORMAL.inv_cdf((1 - _LEVEL) / 2), _NORMAL.inv_cdf((1 + _LEVEL) / 2)):
        levels.append(_NORMAL.cdf(bias + (bias + z) / (1 - acceleration * (bias + z))))
    return _quantiles(resampled, *levels)


def _quantiles(resampled: np.ndarray, low: float, high: float) -> Interval:
    """Return the order statistics of resamples at two levels, the outer ones."""
    ordered = np.sort(resampled)
    indices = floor((len(ordered) + 1) * low), ceil((len(ordered) + 1) * high)
    return Interval(*(float(ordered[min(max(index, 1), len(ordered)) - 1]) for index in indices))


def paired_p_values(
    ranks_a: np.ndarray, ranks_b: np.ndarray, images: np.ndarray, *, draws: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """Test two models for equal recalls on the same queries.

    The test is two-sided: a paired randomization over images. Under the hypothesis, the two models are
    interchangeable on each image, so that the sign of the image's difference of hits is random. Values are
    mid-p (Lancaster 1961, Fagerland et al. 2013), since hits are discrete: only half of the draws with the
    observed difference count. The least value is ``0.5 / (draws + 1)``; without any difference it is 1.

    Args:
        ranks_a: int ``[Q]``, from 1, or ``[S, Q]`` for several seeds, where recalls are means over seeds.
        ranks_b: ranks of the other model; the number of seeds may differ.
        images: int ``[Q]``, the image of each query.
        draws: number of draws of all signs.
        seed: seed of the draws.

    Returns:
        p-values of ``recall_at_1``, ``recall_at_5``, ``recall_at_10`` and the sum of the three, ``sum_of_recalls``.

    Raises:
        ValueError: the models have different queries.
    """
    ranks_a, ranks_b = np.atleast_2d(ranks_a), np.atleast_2d(ranks_b)
    _, groups, num_queries = np.unique(images, return_inverse=True, return_counts=True)
    hits_a, hits_b = (_hits(ranks, groups, len(num_queries)) for ranks in (ranks_a, ranks_b))
    differences = len(ranks_b) * hits_a - len(ranks_a) * hits_b  # Differences of means over seeds, in integers.
    differences = np.column_stack((differences, differences.sum(1)))
    # Images with equal differences are interchangeable, too: the number of their positive signs is binomial.
    kinds, sizes = np.unique(differences, axis=0, return_counts=True)
    observed = np.abs(differences.sum(0))
    generator = np.random.default_rng(seed)
    extreme = np.ones(len(observed), np.int64)  # Twice the number of draws; the observation itself counts half, too.
    chunk = max(1, _AT_ONCE // len(kinds))
    for start in range(0, draws, chunk):
        positive = generator.binomial(sizes, 0.5, size=(min(chunk, draws - start), len(kinds)))
        drawn = np.abs((2 * positive - sizes) @ kinds)
        extreme += (drawn > observed).sum(0) + (drawn >= observed).sum(0)
    names = (*RECALLS, "sum_of_recalls")
    extreme[~differences.any(0)] = 2 * (draws + 1)
    return {name: float(count / (2 * (draws + 1))) for name, count in zip(names, extreme, strict=True)}


def seed_p_value(scores_a: Sequence[float], scores_b: Sequence[float], *, draws: int = 10_000, seed: int = 0) -> float:
    """Test two groups of runs for equal mean scores.

    The test is two-sided, by permutations of the runs: all if they are at most ``draws``, otherwise a sample. ``n`` seeds per group
    allow no p below ``2 / comb(2 * n, n)``: 0.33 for 2 seeds, 0.1 for 3, 0.029 for 4, 0.0079 for 5 and 0.0022 for 6, before `holm`.

    Raises:
        ValueError: a group has fewer than two runs.
    """
    from scipy.stats import permutation_test  # Loaded to compute: the import takes a second.

    def difference(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return np.abs(len(scores_b) * a.sum(axis) - len(scores_a) * b.sum(axis))

    groups = [np.round(np.array(scores) * _UNITS) for scores in (scores_a, scores_b)]  # Exact: integers below 2**53.
    result = permutation_test(
        groups, difference, vectorized=True, n_resamples=draws, alternative="greater", random_state=np.random.default_rng(seed)
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values of several tests (Holm 1979), in their order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - step) * p_values[index]))
        adjusted[index] = least
    return adjusted

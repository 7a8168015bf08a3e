from itertools import combinations
from statistics import median_low

import numpy as np
import pytest

from train.chance import CUTOFFS, Chance, chance_measures, chance_recall, is_above_chance


@pytest.mark.parametrize(("images", "captions"), [(20, 1), (60, 5)])
def test_chance_standard_error_covers_random_rankings(images, captions):
    rng = np.random.default_rng(0)
    shares = [(100 * k / images, chance_recall(k, captions, images * captions)) for k in CUTOFFS]
    chance = Chance(tuple(share[1] for share in shares), tuple(share[0] for share in shares), images)
    sums = []
    for _ in range(400):
        orders = rng.random((images, images * captions)).argsort(1)
        first = np.nonzero(orders // captions == np.arange(images)[:, None])  # Places of the own captions.
        image_to_text = np.array([first[1][first[0] == row].min() for row in range(images)])
        text_to_image = rng.integers(0, images, images * captions)  # Place of the own image.
        sums.append(sum(100 * np.mean(ranks < k) for ranks in (image_to_text, text_to_image) for k in CUTOFFS))
    assert np.mean(sums) == pytest.approx(chance.sum_of_recalls, rel=0.05)
    assert 0.4 * chance.standard_error < np.std(sums) < chance.standard_error
    assert np.mean([is_above_chance(score, [chance]) for score in sums]) < 0.01
    assert is_above_chance(chance.sum_of_recalls + 2.1 * chance.standard_error, [chance])


@pytest.mark.parametrize(
    ("right", "items"), [([1], 1), ([1], 2), ([1, 1], 7), ([1], 8), ([2, 2, 2], 9), ([1, 3, 5], 9), ([9], 9)]
)
def test_chance_measures_are_those_of_all_orders(right, items):
    """The correct items of a query are at each set of places equally often; queries with few orders count as often as others."""
    by_query = [[min(places) for places in combinations(range(1, items + 1), number)] for number in right]
    times = int(np.lcm.reduce([len(ranks) for ranks in by_query]))
    ranks = [rank for query in by_query for rank in query * (times // len(query))]
    *recalls, median = chance_measures(right, items)
    assert recalls == pytest.approx([100 * np.mean(np.array(ranks) <= cutoff) for cutoff in CUTOFFS])
    assert (median, type(median)) == (median_low(ranks), int)


def test_chance_measures_of_karpathys_test_images():
    """Half of all orders have the first of five captions among 5,000 by place 647: 0.5 ** (1 / 5) of the others is 0.8706."""
    assert chance_measures([5] * 1000, 5000)[3] == 647 == round(5000 * (1 - 0.5 ** (1 / 5)))
    assert chance_measures([1] * 5000, 1000) == (0.1, 0.5, 1.0, 500)

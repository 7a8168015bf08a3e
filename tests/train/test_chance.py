import numpy as np
import pytest

from train.chance import CUTOFFS, Chance, chance_recall, is_above_chance


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

"""Pairs of captions against nested loops."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from train.data.pairs import ByImage, caption_pairs

# Number of captions of each image, by language; a few images have none.
COUNTS = {"en": [5, 0, 2, 1, 0], "de": [5, 3, 0, 1, 0], "fr": [1, 2, 3, 1, 1], "cs": [1, 1, 1, 0, 0]}


@pytest.fixture
def captions(new_captions):
    rows = [
        (f"image-{image}", language, "comparable", index, [1, 2])
        for language, counts in COUNTS.items()
        for image, count in enumerate(counts)
        for index in range(count)
    ]
    return new_captions([rows[n] for n in np.random.default_rng(0).permutation(len(rows))], tuple(COUNTS))


def test_pairs_are_all_pairs_of_an_image_in_different_languages(captions):
    expected = set()
    for a, b in combinations(range(len(captions)), 2):
        if captions.images[a] == captions.images[b] and captions.languages[a] != captions.languages[b]:
            expected.add((a, b) if captions.languages[a] < captions.languages[b] else (b, a))
    pairs = caption_pairs(captions)
    assert len(pairs) == len(expected)
    assert set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)) == expected
    assert (pairs.first.dtype, pairs.second.dtype) == (np.int32, np.int32)
    assert len(expected) == (25 + 5 + 5 + 5 + 5 + 1) + (6 + 3 + 2) + (6 + 2 + 3) + 3


@pytest.mark.parametrize("languages", [(), ("en",)])
def test_without_a_second_language_there_are_no_pairs(captions, languages):
    chosen = captions.select(captions.languages < len(languages))
    assert len(caption_pairs(chosen)) == 0


def test_captions_by_image(captions):
    by_image = ByImage.of(captions)
    assert by_image.counts.tolist() == np.transpose(list(COUNTS.values())).tolist()
    for image in range(5):
        for language in range(4):
            start, count = by_image.starts[image, language], by_image.counts[image, language]
            expected = np.flatnonzero((captions.images == image) & (captions.languages == language))
            assert by_image.rows[start : start + count].tolist() == expected.tolist()

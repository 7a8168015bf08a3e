"""Data regimes: counts, seeds, and dependence on seed and image ids alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from schemas.errors import UsageError
from train.data.captions import Captions
from train.data.pairs import caption_pairs
from train.data.regimes import disjoint_halves, half_of_images, one_caption_per_image


def keys(captions: Captions) -> list[tuple[str, str, str, int]]:
    return [
        (
            captions.image_ids[captions.images[n]],
            captions.language_names[captions.languages[n]],
            captions.portion_names[captions.portions[n]],
            int(captions.indices[n]),
        )
        for n in range(len(captions))
    ]


def images_of(captions: Captions, language: str) -> set[str]:
    return {key[0] for key in keys(captions) if key[1] == language}


def bilingual_rows(images: int) -> list[tuple[str, str, str, int, list[int]]]:
    """Five captions per image in each of two languages, like the comparable portion of Multi30K."""
    return [
        (f"image-{image:04d}", language, "comparable", index, [1, 4 + index, 2])
        for image in range(images)
        for language in ("de", "en")
        for index in range(5)
    ]


@pytest.fixture
def bilingual(new_captions):
    return new_captions(bilingual_rows(1000), ("en", "de"))


def test_one_caption_of_each_image_and_language(bilingual):
    chosen = one_caption_per_image(bilingual, 0)
    assert len(chosen) == 2000
    assert Counter((image, language) for image, language, _, _ in keys(chosen)).most_common(1)[0][1] == 1
    drawn = set(keys(chosen))
    assert [key for key in keys(bilingual) if key in drawn] == keys(chosen)  # The order stays.


def test_every_caption_is_equally_likely(bilingual):
    chosen = keys(one_caption_per_image(bilingual, 0))
    for language in ("en", "de"):
        counts = Counter(index for _, other, _, index in chosen if other == language)
        # 200 expected, standard deviation 12.6.
        assert sorted(counts) == [0, 1, 2, 3, 4]
        assert all(150 <= count <= 250 for count in counts.values())
    # The draws are independent: the two languages agree for a fifth of the images, not for all.
    drawn = {(image, language): index for image, language, _, index in chosen}
    same = sum(drawn[image, "en"] == drawn[image, "de"] for image in bilingual.image_ids)
    assert 150 <= same <= 250


def test_one_caption_of_portions_together(new_captions):
    rows = [
        ("b", "en", "translation", 0, [1]),
        ("a", "en", "comparable", 0, [2]),
        ("a", "en", "translation", 0, [3]),
        ("a", "fr", "translation", 0, [4]),
    ]
    captions = new_captions(rows)
    drawn = [keys(one_caption_per_image(captions, seed)) for seed in range(40)]
    assert {len(draw) for draw in drawn} == {3}
    assert all(("a", "fr", "translation", 0) in draw and ("b", "en", "translation", 0) in draw for draw in drawn)
    assert {portion for draw in drawn for image, language, portion, _ in draw if (image, language) == ("a", "en")} == {
        "comparable",
        "translation",
    }


@pytest.mark.parametrize("images", [1000, 7])
def test_half_of_the_images_with_all_their_captions(new_captions, images):
    captions = new_captions(bilingual_rows(images))
    chosen = half_of_images(captions, 0)
    kept = images_of(chosen, "en")
    assert len(kept) == images // 2
    assert keys(chosen) == [key for key in keys(captions) if key[0] in kept]


def test_disjoint_halves(bilingual):
    chosen = disjoint_halves(bilingual, 3)
    english, german = images_of(chosen, "en"), images_of(chosen, "de")
    assert (len(english), len(german), len(english & german), len(chosen)) == (500, 500, 0, 5000)
    assert english == images_of(half_of_images(bilingual, 3), "en")


@pytest.mark.slow
def test_disjoint_halves_need_two_languages(bilingual, new_captions):
    with pytest.raises(UsageError, match="divided between two languages, but there are 1: en"):
        disjoint_halves(new_captions([("a", "en", "comparable", 0, [1])]), 0)


@pytest.mark.slow
@pytest.mark.parametrize("regime", [one_caption_per_image, half_of_images, disjoint_halves])
def test_seeds(bilingual, regime):
    assert keys(regime(bilingual, 5)) == keys(regime(bilingual, 5))
    assert keys(regime(bilingual, 5)) != keys(regime(bilingual, 6))


@pytest.mark.parametrize("regime", [one_caption_per_image, half_of_images, disjoint_halves])
def test_the_order_of_rows_and_images_without_captions_make_no_difference(bilingual, new_captions, regime):
    rows = bilingual_rows(60)
    shuffled = [rows[n] for n in np.random.default_rng(0).permutation(len(rows))]
    expected = sorted(keys(regime(new_captions(rows, ("en", "de")), 1)))
    assert sorted(keys(regime(new_captions(shuffled, ("en", "de")), 1))) == expected
    # Here 940 images no longer have a caption.
    assert sorted(keys(regime(bilingual.select(bilingual.images < 60), 1))) == expected


@pytest.mark.parametrize("regime", [one_caption_per_image, half_of_images])
def test_draws_do_not_depend_on_other_languages(bilingual, regime):
    alone = bilingual.select(bilingual.rows_of("en"))
    assert keys(regime(alone, 2)) == [key for key in keys(regime(bilingual, 2)) if key[1] == "en"]


@pytest.mark.parametrize("regime", [one_caption_per_image, half_of_images, disjoint_halves])
def test_no_captions(bilingual, regime):
    assert len(regime(bilingual.select(np.zeros(0, np.int64)), 0)) == 0


# --- the counts of the papers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def multi30k_training() -> Captions:
    """As many images and captions as the training split of Multi30K: comparable English and German, translated French and Czech."""
    images, counts = 29_000, {"en": 5, "de": 5, "fr": 1, "cs": 1}
    languages = np.repeat(np.arange(4), list(counts.values()))
    return Captions(
        token_ids=np.tile(np.array([1, 2], np.int32), images * 12),
        offsets=2 * np.arange(images * 12 + 1),
        images=np.repeat(np.arange(images, dtype=np.int32), 12),
        languages=np.tile(languages.astype(np.int8), images),
        portions=np.tile((languages > 1).astype(np.int8), images),
        indices=np.tile(np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0], np.int16), images),
        image_ids=tuple(f"{image:05d}" for image in range(images)),
        language_names=tuple(counts),
        portion_names=("comparable", "translation"),
        split="train",
    )


@pytest.mark.slow
def test_counts_of_kadar_2018(multi30k_training):
    """Sections 4 to 6 of the paper."""
    everything = multi30k_training
    bilingual = replace(everything.select(everything.languages < 2), language_names=("en", "de"))
    # Section 4: five English and five German descriptions of 29K images.
    assert [len(bilingual.rows_of(language)) for language in ("en", "de")] == [145_000, 145_000]
    assert len(caption_pairs(bilingual)) == 725_000
    # Section 5.2: 29K pairs.
    assert len(one_caption_per_image(bilingual, 0)) == 2 * 29_000
    assert len(caption_pairs(one_caption_per_image(bilingual, 0))) == 29_000
    # Section 5.3: 72.5K captions over 14.5K images; 145K bilingual captions on 14.5K and on 29K images.
    half, disjoint = half_of_images(bilingual, 0), disjoint_halves(bilingual, 0)
    assert [len(half.rows_of(language)) for language in ("en", "de")] == [72_500, 72_500]
    assert (len(half), len(half.compact().image_ids)) == (145_000, 14_500)
    assert (len(disjoint), len(disjoint.compact().image_ids), len(caption_pairs(disjoint))) == (145_000, 29_000, 0)
    # Section 6.1: one caption of each language; section 6.2: 46 possible caption pairs.
    assert len(one_caption_per_image(everything, 0)) == 4 * 29_000
    assert len(caption_pairs(everything)) == 46 * 29_000

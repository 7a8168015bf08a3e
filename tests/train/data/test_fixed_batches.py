from collections import Counter

import numpy as np
import pytest

from train.config.sections import LossConfig, ScheduleConfig
from train.data.fixed_batches import fixed_batches
from train.data.splits import open_data

PORTIONS = {"en": ["comparable"], "de": ["comparable"], "fr": ["translation"]}


@pytest.fixture(scope="module")
def captions(toy):
    return open_data(toy.captions, toy.features, split="val", portions=PORTIONS).captions


def rows_in(batches):
    return Counter(int(row) for batch in batches for side in batch.captions for row in side)


@pytest.mark.parametrize("batch_size", [5, 7, 1000])
def test_each_caption_comes_once_with_its_image(captions, batch_size):
    batches = fixed_batches(captions, ScheduleConfig(batch_size=batch_size), LossConfig())
    assert rows_in(batches) == Counter(range(len(captions)))
    for batch in batches:
        assert batch.task == "c2i"
        (rows,) = batch.captions
        assert len(rows) <= batch_size
        assert {captions.language_names[captions.languages[row]] for row in rows} == set(batch.languages)
        assert captions.images[rows].tolist() == batch.images.tolist()
    if batch_size < 10:
        assert any(np.any(np.diff(batch.images) < 0) for batch in batches)  # Negatives are not neighbours in the alphabet.


@pytest.mark.parametrize(("probability", "share"), [(0.5, 1), (0.2, 0.25), (1.0, 1)])
def test_caption_pairs_are_as_frequent_as_in_a_training(captions, probability, share):
    batches = fixed_batches(captions, ScheduleConfig(batch_size=8), LossConfig(c2c_probability=probability))
    pairs = [batch for batch in batches if batch.task == "c2c"]
    assert sum(len(batch.images) for batch in pairs) == round(share * len(captions))
    assert len(pairs) == len(batches) if probability == 1 else rows_in(set_of(batches, "c2i")) == Counter(range(len(captions)))
    seen = Counter()
    for batch in pairs:
        first, second = batch.captions
        assert captions.images[first].tolist() == captions.images[second].tolist() == batch.images.tolist()
        assert all(captions.languages[first] < captions.languages[second])
        seen.update(zip(first.tolist(), second.tolist(), strict=True))
        for side, language in zip(batch.captions, batch.languages, strict=True):
            spoken = {captions.language_names[n] for n in captions.languages[side]}
            assert language == (spoken.pop() if len(spoken) == 1 else None)
    assert set(seen.values()) == {1}


def set_of(batches, task):
    return [batch for batch in batches if batch.task == task]


def test_images_come_with_a_caption_in_every_language(captions):
    batches = fixed_batches(captions, ScheduleConfig(batches="images", batch_size=5), LossConfig())
    found = rows_in(batches)
    assert set(found) == set(range(len(captions)))
    english = captions.rows_of("en")
    assert {found[row] for row in english.tolist()} == {1}
    assert {found[row] for row in captions.rows_of("fr").tolist()} == {3}  # One for three in English.
    for batch in batches:
        assert len(set(batch.images.tolist())) == len(batch.images) <= 5
        for rows, language in zip(batch.captions, batch.languages, strict=True):
            assert captions.language_of(rows) == language
            assert captions.images[rows].tolist() == batch.images.tolist()


def test_images_without_some_language_take_no_part(captions, caplog):
    french = captions.language_names.index("fr")
    few = captions.select((captions.languages != french) | (captions.images < 4))
    batches = fixed_batches(few, ScheduleConfig(batches="images", batch_size=5), LossConfig())
    assert {int(image) for batch in batches for image in batch.images} == {0, 1, 2, 3}
    for batch in batches:
        for rows, language in zip(batch.captions, batch.languages, strict=True):
            assert few.language_of(rows) == language
            assert few.images[rows].tolist() == batch.images.tolist()
    none = captions.select((captions.languages == french) ^ (captions.images < 4))
    apart = none.select((none.languages != french) | (none.images >= 4))
    assert fixed_batches(apart, ScheduleConfig(batches="images", batch_size=5), LossConfig()) == []
    assert caplog.messages == []


def test_they_are_the_same_every_time(captions):
    for settings in (ScheduleConfig(batch_size=5), ScheduleConfig(batches="images", batch_size=5)):
        first, second = (fixed_batches(captions, settings, LossConfig()) for _ in range(2))
        assert [batch.images.tolist() for batch in first] == [batch.images.tolist() for batch in second]
        assert [[side.tolist() for side in batch.captions] for batch in first] == [
            [side.tolist() for side in batch.captions] for batch in second
        ]

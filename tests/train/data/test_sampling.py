"""Samplers: the rows of a pass, the mix of tasks and languages, and restored samplers."""

import json
import logging
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from schemas.errors import UsageError
from train.config.sections import LossConfig, ScheduleConfig
from train.data.captions import caption_pairs
from train.data.sampling import BUCKET_BATCHES, EpochBatches, ImageSampler, TaskSampler, fixed_batches
from train.data.splits import open_data


@pytest.fixture
def rows(new_captions):
    """Captions of 23 images: five English and three German ones per image, and one French one for all but three images."""

    def make(**counts: int):
        rng = np.random.default_rng(0)
        captions = [
            (f"image-{image:02d}", language, "comparable", index, [1] * int(rng.integers(2, 9)))
            for image in range(23)
            for language, count in (counts or {"en": 5, "de": 3, "fr": 1}).items()
            for index in range(count)
            if (language, image) not in {("fr", 3), ("fr", 7), ("fr", 22)}
        ]
        return new_captions(captions, tuple(counts or ("en", "de", "fr")))

    return make


def same(a, b) -> bool:
    return (a.task, a.languages) == (b.task, b.languages) and all(
        x.dtype == y.dtype and np.array_equal(x, y)
        for x, y in zip((*a.captions, a.images), (*b.captions, b.images), strict=True)
    )


@pytest.mark.parametrize(("count", "size"), [(10, 4), (12, 4), (3, 4), (1, 1)])
@pytest.mark.parametrize("by_length", [False, True])
def test_epoch_batches_cover_every_row(count, size, by_length):
    lengths = np.arange(count) % 5 if by_length else None
    shuffled = EpochBatches(count, size, (0,), lengths=lengths)
    steps = -(-count // size)
    assert shuffled.epoch_steps == steps
    passes = []
    for number in range(3):
        batches = [shuffled.next() for _ in range(steps)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(count))
        assert sorted(len(batch) for batch in batches)[1:] == [size] * (steps - 1)
        assert sum(map(len, batches)) == count
        assert shuffled.epoch == number + 1
        passes.append(np.concatenate(batches).tolist())
    if count >= 10:
        assert passes[0] != passes[1] != passes[2]


def test_epoch_batches_bucket_by_length():
    lengths = np.random.default_rng(0).integers(3, 40, size=64 * 8 * BUCKET_BATCHES + 5)
    shuffled = EpochBatches(len(lengths), 8, (0,), lengths=lengths)
    batches = [shuffled.next() for _ in range(shuffled.epoch_steps)]
    spread = np.mean([np.ptp(lengths[batch]) for batch in batches])
    plain = EpochBatches(len(lengths), 8, (0,))
    assert spread < 0.15 * np.mean([np.ptp(lengths[plain.next()]) for _ in batches])
    means = np.array([lengths[batch].mean() for batch in batches])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1
    pool = np.concatenate(batches[:BUCKET_BATCHES])
    assert set(pool.tolist()) == set(np.concatenate([EpochBatches(len(lengths), 8 * BUCKET_BATCHES, (0,)).next()]).tolist())


def test_epoch_batches_orders_are_uniform():
    shuffled = EpochBatches(4, 4, (1,))
    orders = Counter(tuple(shuffled.next().tolist()) for _ in range(2400))
    assert len(orders) == 24
    assert all(60 <= count <= 140 for count in orders.values())  # 100 expected, standard deviation 9.8.


def test_task_sampler_epoch_of_one_language(rows):
    captions = rows()
    captions = captions.select(captions.rows_of("de"))
    with pytest.raises(UsageError, match="the training split has no captions in language 'en'"):
        TaskSampler(captions, 8, seed=0)
    captions = rows(de=3)
    sampler = TaskSampler(captions, 8, seed=0)
    assert sampler.epoch_steps == 9  # 69 captions
    for epoch in range(2):
        batches = [sampler.next() for _ in range(9)]
        assert sorted(np.concatenate([batch.captions[0] for batch in batches]).tolist()) == list(range(69))
        assert sampler.epoch == epoch + 1
        assert {(batch.task, batch.languages, len(batch.captions)) for batch in batches} == {("c2i", ("de",), 1)}
        for batch in batches:
            assert batch.images.tolist() == captions.images[batch.captions[0]].tolist()


def test_task_sampler_languages_are_equally_likely(rows):
    captions = rows()
    sampler = TaskSampler(captions, 4, seed=0)
    assert sampler.epoch_steps == 29 + 18 + 5
    batches = [sampler.next() for _ in range(1500)]
    counts = Counter(batch.languages[0] for batch in batches)
    assert all(430 <= counts[language] <= 570 for language in ("en", "de", "fr"))  # 500, standard deviation 18.
    for language, steps in {"en": 29, "de": 18, "fr": 5}.items():
        rows_of_batches = [batch.captions[0].tolist() for batch in batches if batch.languages == (language,)]
        for start in range(0, len(rows_of_batches) - steps, steps):
            assert sorted(chain.from_iterable(rows_of_batches[start : start + steps])) == captions.rows_of(language).tolist()


def test_task_sampler_c2c_probability(rows):
    captions = rows()
    sampler = TaskSampler(captions, 4, seed=1, c2c_probability=0.25)
    assert sampler.epoch_steps == round(52 / 0.75)
    batches = [sampler.next() for _ in range(2000)]
    between = [batch for batch in batches if batch.task == "c2c"]
    assert 420 <= len(between) <= 580  # 500, standard deviation 19.
    everything = sorted(map(tuple, caption_pairs(captions).tolist()))
    steps = -(-len(everything) // 4)
    sampled = [pair for batch in between[:steps] for pair in zip(*(side.tolist() for side in batch.captions), strict=True)]
    assert sorted(sampled) == everything
    for batch in between:
        sides = [captions.languages[side] for side in batch.captions]
        assert (sides[0] < sides[1]).all()
        for side, language in zip(sides, batch.languages, strict=True):
            names = {captions.language_names[number] for number in side}
            assert language == (names.pop() if len(names) == 1 else None)
        assert (
            batch.images.tolist() == captions.images[batch.captions[0]].tolist() == captions.images[batch.captions[1]].tolist()
        )
    assert {len(batch.languages) for batch in between} == {2}
    assert any(None in batch.languages for batch in between)


def test_task_sampler_pairs_of_two_languages(rows):
    sampler = TaskSampler(rows(en=2, de=3), 8, seed=0, c2c_probability=1)
    assert sampler.epoch_steps == -(-23 * 6 // 8)
    assert {sampler.next().languages for _ in range(40)} == {("en", "de")}


def test_task_sampler_buckets_pairs_by_length(rows):
    captions = rows(en=5, de=5)
    spreads = []
    for bucket in (False, True):
        sampler = TaskSampler(captions, 8, seed=0, c2c_probability=1, bucket_by_length=bucket)
        batches = [sampler.next() for _ in range(sampler.epoch_steps)]
        longer = [np.maximum(*(captions.lengths[side] for side in batch.captions)) for batch in batches]
        assert sum(map(len, longer)) == 23 * 25
        spreads.append(np.mean([np.ptp(lengths) for lengths in longer]))
    assert spreads[1] < 0.4 * spreads[0]


def test_task_sampler_without_pairs_is_refused(rows):
    with pytest.raises(UsageError, match="no image has captions in two languages"):
        TaskSampler(rows(en=2), 8, seed=0, c2c_probability=0.5)


def test_image_sampler_epoch(rows):
    captions = rows(en=5, de=5)
    sampler = ImageSampler(captions, 4, seed=0)
    assert sampler.epoch_steps == 5 * 6
    matches = []
    for epoch in range(2):
        batches = [sampler.next() for _ in range(30)]
        assert sampler.epoch == epoch + 1
        for batch in batches:
            assert (batch.task, batch.languages) == ("images", ("en", "de"))
            assert len(set(batch.images.tolist())) == len(batch.images)
            for language, side in enumerate(batch.captions):
                assert (captions.languages[side] == language).all()
                assert captions.images[side].tolist() == batch.images.tolist()
        for language in range(2):
            sampled = np.concatenate([batch.captions[language] for batch in batches])
            assert sorted(sampled.tolist()) == captions.rows_of(captions.language_names[language]).tolist()
        assert [len(batch.images) for batch in batches] == [4, 4, 4, 4, 4, 3] * 5
        matches.append({pair for batch in batches for pair in zip(*(side.tolist() for side in batch.captions), strict=True)})
    assert matches[0] != matches[1]


def test_image_sampler_repeats_captions_of_smaller_languages(rows, caplog):
    captions = rows()
    with caplog.at_level(logging.WARNING):
        sampler = ImageSampler(captions, 64, seed=0)
    assert "3 images lack captions in some language; training continues with 20" in caplog.text
    assert sampler.epoch_steps == 5
    batches = [sampler.next() for _ in range(5)]
    assert [len(batch.images) for batch in batches] == [20] * 5
    names = {captions.image_ids[image] for image in batches[0].images}
    assert names == {f"image-{n:02d}" for n in range(23)} - {"image-03", "image-07", "image-22"}
    for language, times in enumerate([{1}, {1, 2}, {5}]):
        counts = Counter(row for batch in batches for row in batch.captions[language].tolist())
        assert set(counts.values()) == times
        chosen = np.isin(captions.images, batches[0].images) & (captions.languages == language)
        assert sorted(counts) == np.flatnonzero(chosen).tolist()


def test_image_sampler_images_with_fewer_captions(new_captions):
    captions = new_captions([("a", "en", "c", n, [1]) for n in range(3)] + [("b", "en", "c", 0, [1])])
    sampler = ImageSampler(captions, 2, seed=0)
    batches = [sampler.next() for _ in range(sampler.epoch_steps)]
    assert [sorted(batch.images.tolist()) for batch in batches] == [[0, 1], [0], [0]]
    assert sorted(np.concatenate([batch.captions[0] for batch in batches]).tolist()) == [0, 1, 2, 3]


def test_image_sampler_without_complete_images_is_refused(new_captions):
    captions = new_captions([("a", "en", "c", 0, [1]), ("b", "de", "c", 0, [1])])
    with pytest.raises(UsageError, match="no image has captions in every one of de, en"):
        ImageSampler(captions, 2, seed=0)


SAMPLERS = {
    "c2i": lambda captions, seed: TaskSampler(captions, 4, seed=seed),
    "c2c": lambda captions, seed: TaskSampler(captions, 4, seed=seed, c2c_probability=0.5, bucket_by_length=True),
    "images": lambda captions, seed: ImageSampler(captions, 4, seed=seed),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("step", [0, 1, 17, 25, 60, 333])
def test_sampler_restores_its_position(rows, name, step):
    captions, make = rows(), SAMPLERS[name]
    sampler = make(captions, 7)
    for _ in range(step):
        sampler.next()
    position = json.loads(json.dumps(sampler.position()))
    other = make(captions, 7)
    other.next()
    other.restore(position)
    assert other.position() == position
    for _ in range(100):
        assert same(sampler.next(), other.next())
        assert sampler.epoch == other.epoch


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_follows_the_seed(rows, name):
    captions, make = rows(), SAMPLERS[name]
    first, again, other = make(captions, 0), make(captions, 0), make(captions, 1)
    batches = [(first.next(), again.next(), other.next()) for _ in range(20)]
    assert all(same(a, b) for a, b, _ in batches)
    assert not any(same(a, c) for a, _, c in batches)


PORTIONS = {"en": ["comparable"], "de": ["comparable"], "fr": ["translation"]}


@pytest.fixture(scope="module")
def captions(toy):
    return open_data(toy.captions, toy.features, split="val", portions=PORTIONS).captions


def rows_in(batches):
    return Counter(int(row) for batch in batches for side in batch.captions for row in side)


@pytest.mark.parametrize("batch_size", [5, 7, 1000])
def test_fixed_batches_cover_every_caption(captions, batch_size):
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
def test_fixed_batches_share_of_caption_pairs(captions, probability, share):
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


def test_fixed_batches_of_images(captions):
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


def test_fixed_batches_exclude_incomplete_images(captions, caplog):
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


def test_fixed_batches_are_reproducible(captions):
    for settings in (ScheduleConfig(batch_size=5), ScheduleConfig(batches="images", batch_size=5)):
        first, second = (fixed_batches(captions, settings, LossConfig()) for _ in range(2))
        assert [batch.images.tolist() for batch in first] == [batch.images.tolist() for batch in second]
        assert [[side.tolist() for side in batch.captions] for batch in first] == [
            [side.tolist() for side in batch.captions] for batch in second
        ]

"""Samplers: the rows of a pass, the mix of tasks and languages, and restored samplers."""

import json
import logging
from collections import Counter
from itertools import chain

import numpy as np
import pytest

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


def check(captions, batch) -> None:
    """Check that the sides of a batch have its images and languages."""
    for side, language in zip(batch.captions, batch.languages, strict=True):
        assert captions.images[side].tolist() == batch.images.tolist()
        names = {captions.language_names[number] for number in captions.languages[side]}
        assert language == (names.pop() if len(names) == 1 else None)
    if batch.task == "images":
        assert batch.languages == captions.language_names
        assert len(set(batch.images.tolist())) == len(batch.images)
    elif batch.task == "c2c":
        first, second = (captions.languages[side] for side in batch.captions)
        assert (first < second).all()
    else:
        assert (batch.task, len(batch.captions), None in batch.languages) == ("c2i", 1, False)


@pytest.mark.parametrize(("count", "size"), [(10, 4), (12, 4), (3, 4), (1, 1)])
@pytest.mark.parametrize("by_length", [False, True])
def test_epoch_batches_cover_every_row(count, size, by_length):
    shuffled = EpochBatches(count, size, (0,), lengths=np.arange(count) % 5 if by_length else None)
    steps = -(-count // size)
    assert shuffled.epoch_steps == steps
    passes = []
    for number in range(3):
        batches = [shuffled.next() for _ in range(steps)]
        passes.append(np.concatenate(batches).tolist())
        assert sorted(passes[-1]) == list(range(count))
        assert sorted(map(len, batches))[1:] == [size] * (steps - 1)
        assert shuffled.epoch == number + 1
    assert count < 10 or passes[0] != passes[1] != passes[2]


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
    for batch in batches:
        check(captions, batch)
    assert any(None in batch.languages for batch in between)
    assert TaskSampler(captions, 8, seed=0, c2c_probability=1).epoch_steps == -(-len(everything) // 8)


def test_image_sampler_repeats_captions_of_smaller_languages(rows, caplog):
    captions = rows()
    with caplog.at_level(logging.WARNING):
        sampler = ImageSampler(captions, 8, seed=0)
    assert "3 images lack captions in some language; training continues with 20" in caplog.text
    assert sampler.epoch_steps == 5 * 3
    complete = np.flatnonzero(~np.isin(captions.image_ids, ["image-03", "image-07", "image-22"]))
    matches = []
    for epoch in range(2):
        batches = [sampler.next() for _ in range(15)]
        assert sampler.epoch == epoch + 1
        assert [len(batch.images) for batch in batches] == [8, 8, 4] * 5
        for batch in batches:
            check(captions, batch)
        for language, times in enumerate([{1}, {1, 2}, {5}]):
            counts = Counter(row for batch in batches for row in batch.captions[language].tolist())
            assert set(counts.values()) == times
            chosen = np.isin(captions.images, complete) & (captions.languages == language)
            assert sorted(counts) == np.flatnonzero(chosen).tolist()
        matches.append({pair for batch in batches for pair in zip(*(side.tolist() for side in batch.captions), strict=True)})
    assert matches[0] != matches[1]


def test_image_sampler_images_with_fewer_captions(new_captions):
    captions = new_captions([("a", "en", "c", n, [1]) for n in range(3)] + [("b", "en", "c", 0, [1])])
    sampler = ImageSampler(captions, 2, seed=0)
    batches = [sampler.next() for _ in range(sampler.epoch_steps)]
    assert [sorted(batch.images.tolist()) for batch in batches] == [[0, 1], [0], [0]]
    assert sorted(np.concatenate([batch.captions[0] for batch in batches]).tolist()) == [0, 1, 2, 3]


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


@pytest.mark.parametrize("batch_size", [5, 7, 1000])
def test_fixed_batches_cover_every_caption(captions, batch_size):
    batches = fixed_batches(captions, ScheduleConfig(batch_size=batch_size), LossConfig())
    assert sorted(row for batch in batches for row in batch.captions[0].tolist()) == list(range(len(captions)))
    for batch in batches:
        check(captions, batch)
        assert len(batch.images) <= batch_size
    if batch_size < 10:
        assert any(np.any(np.diff(batch.images) < 0) for batch in batches)  # Negatives are not neighbours in the alphabet.


@pytest.mark.parametrize(("probability", "share"), [(0.5, 1), (0.2, 0.25), (1.0, 1)])
def test_fixed_batches_share_of_caption_pairs(captions, probability, share):
    batches = fixed_batches(captions, ScheduleConfig(batch_size=8), LossConfig(c2c_probability=probability))
    rows, pairs = [], []
    for batch in batches:
        check(captions, batch)
        (pairs if batch.task == "c2c" else rows).extend(zip(*(side.tolist() for side in batch.captions), strict=True))
    assert len(pairs) == len(set(pairs)) == round(share * len(captions))
    assert sorted(rows) == ([] if probability == 1 else [(row,) for row in range(len(captions))])


def test_fixed_batches_exclude_incomplete_images(captions, caplog):
    french = captions.language_names.index("fr")
    few = captions.select((captions.languages != french) | (captions.images >= 8))
    settings = ScheduleConfig(batches="images", batch_size=3)
    batches = fixed_batches(few, settings, LossConfig())
    rows = Counter(row for batch in batches for side in batch.captions for row in side.tolist())
    # Of each image three captions in English, two in German and one in French.
    assert rows.keys() == set(np.flatnonzero(few.images >= 8).tolist())
    times = {(few.language_names[few.languages[row]], count) for row, count in rows.items()}
    assert times == {("en", 1), ("de", 1), ("de", 2), ("fr", 3)}
    for batch in batches:
        check(few, batch)
    apart = few.select((few.languages != french) ^ (few.images >= 8))
    assert fixed_batches(apart, settings, LossConfig()) == []
    assert caplog.messages == []

"""Encoded captions against their rows, pairs against nested loops, data regimes by counts, seeds and image ids."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from tests.train.trainings import ALL_PORTIONS, CONFIG, assert_equal, rewrite, weights
from train.data.captions import Captions, caption_pairs, disjoint_halves, half_of_images, one_caption_per_image, read_captions
from train.evaluation.scores import evaluate
from train.jobs import EvaluateJob
from train.runs.checkpoints import BEST
from train.runs.run import open_run

KEY = ("image_id", "language", "portion", "index")
PORTIONS = {"en": ("comparable", "translation"), "fr": ("translation",)}


def expected_rows(path: str, split: str, portions) -> list[dict]:
    rows = [row for row in open_dataset(path).table().to_pylist() if row["split"] == split]
    rows = [row for row in rows if row["portion"] in portions.get(row["language"], ())]
    # A stable sort without the language: languages keep their order in the shards, which is by name.
    return sorted(rows, key=lambda row: tuple(row[name] for name in KEY))


def found_rows(captions) -> list[dict]:
    return [
        {
            "image_id": captions.image_ids[captions.images[n]],
            "language": captions.language_names[captions.languages[n]],
            "portion": captions.portion_names[captions.portions[n]],
            "index": int(captions.indices[n]),
            "split": captions.split,
            "token_ids": captions.token_ids[captions.offsets[n] : captions.offsets[n + 1]].tolist(),
            "length": int(captions.lengths[n]),
        }
        for n in range(len(captions))
    ]


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("portions", [PORTIONS, {"fr": ("translation",), "de": ("comparable",)}])
def test_read_captions_equals_rows(toy, split, portions):
    captions = read_captions(open_dataset(toy.captions), split=split, portions=portions)
    assert found_rows(captions) == expected_rows(toy.captions, split, portions)
    assert captions.image_ids == tuple(sorted(set(captions.image_ids)))
    assert captions.language_names == tuple(portions)
    types = [array.dtype.name for array in (captions.token_ids, captions.offsets, captions.images, captions.languages)]
    assert types == ["int32", "int64", "int32", "int8"]
    assert (captions.portions.dtype, captions.indices.dtype) == (np.int8, np.int16)


def divided(toy, folder: Path) -> str:
    """Write the captions with half of the training images in the split ``restval``, as COCO's, in shards of few images or none."""
    moved = {"split": "restval"}
    return rewrite(
        toy.captions,
        folder,
        lambda rows: [row | (moved if "train-020" <= row["image_id"] < "u" else {}) for row in rows],
        shards=30,
    )


@pytest.mark.slow
def test_read_captions_of_several_splits(toy, tmp_path):
    encoded = open_dataset(divided(toy, tmp_path / "encoded"))
    captions = read_captions(encoded, split=("train", "restval"), portions=PORTIONS)
    expected = read_captions(open_dataset(toy.captions), split="train", portions=PORTIONS)
    assert captions.split == "train,restval"
    assert found_rows(replace(captions, split="train")) == found_rows(expected)
    assert captions.image_ids == expected.image_ids
    assert read_captions(encoded, split=("restval", "train"), portions=ALL_PORTIONS).portion_names == (
        "comparable",
        "translation",
    )
    message = r"no captions of split 'test2015' in these languages and portions\. It has: restval: de"
    with pytest.raises(DatasetError, match=message):
        read_captions(encoded, split=("train", "test2015"), portions=PORTIONS)


@pytest.mark.slow
def test_training_on_several_splits_equals_one(toy, train_toy, tmp_path, finished_run):
    corpus = replace(toy, captions=divided(toy, tmp_path / "encoded"))
    train_toy(CONFIG.replace("[data]", '[data]\nsplit = ["train", "restval"]'), corpus=corpus)
    assert_equal(weights(tmp_path / "run", BEST), weights(finished_run[0], BEST))
    assert open_run(tmp_path / "run").config.data.splits == ("train", "restval")


@pytest.mark.slow
def test_overlapping_splits_are_reported(toy, train_toy, tmp_path):
    def move(rows):
        chosen = ("train-003", "train-007")
        return [row | ({"split": "test"} if row["image_id"] in chosen and row["index"] == 1 else {}) for row in rows]

    corpus, remarks = replace(toy, captions=rewrite(toy.captions, tmp_path / "e", move)), []
    train_toy(CONFIG.replace("max_steps = 44", "max_steps = 1"), corpus=corpus, on_warning=remarks.append)
    for splits in (("val",), ("test",)):
        job = EvaluateJob(str(tmp_path / "run"), corpus.captions, corpus.features, splits, device="cpu")
        evaluate(job, on_warning=remarks.append)
    expected = "2 images have captions in several splits (2 in test, train): train-003, train-007. "
    assert [remark[: len(expected)] for remark in remarks] == [expected] * 2


def test_read_captions_with_dictionaries_per_row_group(toy, tmp_path: Path, monkeypatch):
    folder = tmp_path / "encoded"
    monkeypatch.setattr("schemas.writing.shard_writer._TEXT_ROW_GROUP_ROWS", 5)
    rewrite(toy.captions, folder, list)
    for path in folder.glob("*.parquet"):
        chunks = pq.read_table(path)["language"].chunks
        assert len(chunks) > 5
        assert len({tuple(chunk.dictionary.to_pylist()) for chunk in chunks}) > 1
    captions = read_captions(open_dataset(folder), split="val", portions=PORTIONS)
    assert found_rows(captions) == expected_rows(toy.captions, "val", PORTIONS)


def test_select(toy):
    captions = read_captions(open_dataset(toy.captions), split="train", portions=PORTIONS)
    rows = np.random.default_rng(0).integers(len(captions), size=200)  # With repetition, in any order.
    chosen = captions.select(rows)
    everything = found_rows(captions)
    assert found_rows(chosen) == [everything[row] for row in rows]
    assert chosen.image_ids is captions.image_ids
    half = captions.select(captions.images % 2 == 1)
    compact = half.compact()
    assert found_rows(compact) == found_rows(half) == [row for row in everything if int(row["image_id"][-3:]) % 2]
    assert (compact.image_ids, compact.images.dtype) == (captions.image_ids[1::2], np.int32)
    nothing = captions.select(np.zeros(0, np.int64))
    assert (len(nothing), nothing.offsets.tolist(), nothing.token_ids.tolist()) == (0, [0], [])
    assert nothing.compact().image_ids == ()
    for language in ("en", "fr", "de"):
        assert captions.rows_of(language).tolist() == [n for n, row in enumerate(everything) if row["language"] == language]


@pytest.mark.parametrize(
    ("split", "portions", "labels"),
    [
        ("dev", {"de": ["comparable"]}, "split 'dev', language 'de', portion 'comparable'"),
        ("val", {"fr": ["comparable"]}, "split 'val', language 'fr', portion 'comparable'"),
    ],
)
def test_missing_captions_are_refused(toy, split, portions, labels):
    listing = "It has: test: de comparable 18, en comparable 27, en translation 9, fr translation 9; train: de comparable 80, "
    with pytest.raises(DatasetError, match=f"has no captions of {labels}.*{listing}"):
        read_captions(open_dataset(toy.captions), split=split, portions=portions)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1, 5, 2], "it holds token id 5, expected 0 to 4"), ([1, -3, 2], "token id -3"), ([], "a caption without token ids")],
)
def test_invalid_token_ids_are_refused(new_dataset, tmp_path, ids, message):
    row = {"image_id": "a", "language": "en", "portion": "comparable", "index": 0, "split": "train", "length": 3}
    rows = [{**row, "token_ids": [1, 4, 2]}, {**row, "index": 1, "token_ids": ids}]
    new_dataset(tmp_path / "encoded", "encoded", rows, parameters={"vocabulary_size": 5})
    with pytest.raises(DatasetError, match=f"is damaged: .*{message}"):
        read_captions(open_dataset(tmp_path / "encoded"), split="train", portions={"en": ["comparable"]})


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


def test_caption_pairs_equal_brute_force(captions):
    expected = set()
    for a, b in combinations(range(len(captions)), 2):
        if captions.images[a] == captions.images[b] and captions.languages[a] != captions.languages[b]:
            expected.add((a, b) if captions.languages[a] < captions.languages[b] else (b, a))
    pairs = caption_pairs(captions)
    assert len(pairs) == len(expected)
    assert set(map(tuple, pairs.tolist())) == expected
    assert pairs.dtype == np.int32
    assert len(expected) == (25 + 5 + 5 + 5 + 5 + 1) + (6 + 3 + 2) + (6 + 2 + 3) + 3
    for languages in (0, 1):
        assert len(caption_pairs(captions.select(captions.languages < languages))) == 0


def keys(captions: Captions) -> list[tuple[str, str, str, int]]:
    return [tuple(row[name] for name in KEY) for row in found_rows(captions)]


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


def test_one_caption_per_image(bilingual):
    chosen = keys(one_caption_per_image(bilingual, 0))
    kept = set(chosen)
    assert [key for key in keys(bilingual) if key in kept] == chosen  # The order stays.
    drawn = {(image, language): index for image, language, _, index in chosen}
    assert len(chosen) == len(drawn) == 2000
    for language in ("en", "de"):
        counts = Counter(index for (_, other), index in drawn.items() if other == language)
        # 200 expected, standard deviation 12.6.
        assert sorted(counts) == [0, 1, 2, 3, 4]
        assert all(150 <= count <= 250 for count in counts.values())
    # The draws are independent: the two languages agree for a fifth of the images, not for all.
    same = sum(drawn[image, "en"] == drawn[image, "de"] for image in bilingual.image_ids)
    assert 150 <= same <= 250


def test_one_caption_per_image_over_portions(new_captions):
    others = [("a", "fr", "translation", 0), ("b", "en", "translation", 0)]
    either = {("a", "en", "comparable", 0), ("a", "en", "translation", 0)}
    captions = new_captions([(*key, [1]) for key in (*either, *others)])
    drawn = [{*keys(one_caption_per_image(captions, seed))} for seed in range(40)]
    assert {frozenset(draw) for draw in drawn} == {frozenset([one, *others]) for one in either}


@pytest.mark.parametrize("images", [100, 7])
def test_halves_of_images(new_captions, images):
    captions = new_captions(bilingual_rows(images))
    half, disjoint = keys(half_of_images(captions, 3)), keys(disjoint_halves(captions, 3))
    kept = {key[0] for key in half}
    assert len(kept) == images // 2
    assert half == [key for key in keys(captions) if key[0] in kept]
    first = captions.language_names[0]
    assert disjoint == [key for key in keys(captions) if (key[0] in kept) == (key[1] == first)]


@pytest.mark.slow
@pytest.mark.parametrize("regime", [one_caption_per_image, half_of_images, disjoint_halves])
def test_regimes_follow_seed_and_images_only(bilingual, new_captions, regime):
    assert keys(regime(bilingual, 5)) == keys(regime(bilingual, 5))
    assert keys(regime(bilingual, 5)) != keys(regime(bilingual, 6))
    rows = bilingual_rows(60)
    shuffled = [rows[n] for n in np.random.default_rng(0).permutation(len(rows))]
    expected = sorted(keys(regime(new_captions(rows, ("en", "de")), 1)))
    assert sorted(keys(regime(new_captions(shuffled, ("en", "de")), 1))) == expected
    # Here 940 images no longer have a caption.
    assert sorted(keys(regime(bilingual.select(bilingual.images < 60), 1))) == expected
    alone = keys(regime(bilingual.select(bilingual.rows_of("en")), 2))
    assert alone == [key for key in keys(regime(bilingual, 2)) if key[1] == "en"]
    assert len(regime(bilingual.select(np.zeros(0, np.int64)), 0)) == 0


@pytest.mark.slow
def test_counts_of_kadar_2018(new_captions):
    """Sections 4 to 6 of the paper, for as many images and captions as in the training split of Multi30K."""
    counts = {"en": ("comparable", 5), "de": ("comparable", 5), "fr": ("translation", 1), "cs": ("translation", 1)}
    rows = [
        (f"{image:05d}", language, portion, index, [1, 2])
        for image in range(29_000)
        for language, (portion, count) in counts.items()
        for index in range(count)
    ]
    everything = new_captions(rows, tuple(counts))
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
